"""Gives servers what they have missed, before they get requests.

An endpoint that joins, whose connection was lost, or that has not carried out a call is **held**: no worker
picks it. Each worker asks it what it has, sends the calls that it lacks, with their keys, and lets it go. The
workers do so apart from each other: of two that send the same key, the server carries out one.

Those that were paused or put to sleep are asked whether they still are: somebody may have opened one
directly. Then the gateway can serve, and load balancers must know it before they send a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from penstock.gateway.control.fan_out import EndpointReceipt, FanOut
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.workers.control_calls import STATES, ControlCall
from penstock.gateway.workers.shared_controls import SharedControls
from penstock.logging_setup import RateLimitedLog
from penstock.wire.messages import PAUSE, SLEEP, WEIGHTS

log = logging.getLogger(__name__)
_warn = RateLimitedLog(log)

TICK_S = 0.1
"""Interval of looks at the endpoints that are held."""
READ_S = 5.0
"""Time for a server to say what it has."""
SEND_S = 120.0
"""Time for it to carry out a call."""
LOOK_S = 1.0
"""Time between two looks at servers that were closed: are they still?"""
RETRY_S = 1.0
"""Time between two attempts at one endpoint."""
MOST_ROUNDS = 3
"""Times that a call is sent in one attempt, if it does not hold afterwards."""

_READ: Mapping[str, tuple[str, str]] = {
    WEIGHTS: ("/weight_version", "weight_version"),
    PAUSE: ("/is_paused", "is_paused"),
    SLEEP: ("/is_sleeping", "is_sleeping"),
}
"""The route that shows a state, and the field of its reply."""


class _NotYet(Exception):
    """The endpoint cannot be brought up to date now; says why."""


class CatchingUp:
    """One worker's part. ``is_meant`` says whether a call is for an endpoint; ``clock`` gives seconds."""

    def __init__(
        self,
        controls: SharedControls,
        fan_out: FanOut,
        is_meant: Callable[[ControlCall, Endpoint], bool],
        clock: Callable[[], float],
    ) -> None:
        self._controls = controls
        self._fan_out = fan_out
        self._is_meant = is_meant
        self._clock = clock
        self._endpoints: Sequence[Endpoint] = ()
        self._retry_at: dict[Endpoint, float] = {}
        """Of those that are held."""
        self._lost: dict[Endpoint, int] = {}
        """How often each was lost."""
        self._running: dict[Endpoint, asyncio.Task[None]] = {}
        self._look_at = 0.0
        """When servers that were closed are looked at."""
        self._looking: asyncio.Task[None] | None = None
        controls.on_news = self._on_news

    def follow(self, endpoints: Sequence[Endpoint]) -> None:
        """These are the endpoints from here on."""
        known = set(self._endpoints)
        self._endpoints = endpoints
        for endpoint in endpoints:
            if endpoint not in known:
                self._lost[endpoint] = 0
                endpoint.on_lost = partial(self._on_lost, endpoint)
                self._hold(endpoint, "joined")
        for endpoint in known.difference(endpoints):
            self._retry_at.pop(endpoint, None)
            self._lost.pop(endpoint, None)

    async def run(self) -> None:
        """Look after the endpoints that are held, until it is cancelled."""
        try:
            while True:
                now = self._clock()
                for endpoint, retry_at in list(self._retry_at.items()):
                    if now >= retry_at:
                        self._start(endpoint)
                if self._looking is None and now >= self._look_at:
                    self._looking = asyncio.ensure_future(self._look())
                await asyncio.sleep(TICK_S)
        finally:
            for task in (*self._running.values(), self._looking):
                if task is not None:
                    task.cancel()

    async def settle(self, limit_s: float) -> None:
        """Wait until the endpoints have what they lack, or did not take it, for at most ``limit_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._controls.known.wait()
                if tasks := [self._start(endpoint) for endpoint in self._retry_at]:
                    await asyncio.wait(tasks)

    def _start(self, endpoint: Endpoint) -> asyncio.Task[None]:
        if endpoint not in self._running:
            self._running[endpoint] = asyncio.ensure_future(self._catch_up(endpoint))
        return self._running[endpoint]

    # -- who is held

    def _wanted(self, endpoint: Endpoint) -> dict[str, list[ControlCall]]:
        """The calls that hold for it, by state: those of the scope of the latest one."""
        latest = {call.state: call for call in self._controls.calls if self._is_meant(call, endpoint)}
        return {
            state: [call for call in self._controls.calls if call.scope == last.scope]
            for state, last in latest.items()
        }

    def _hold(self, endpoint: Endpoint, reason: str) -> None:
        if endpoint.removed or not self._wanted(endpoint):
            return
        if not endpoint.held:
            log.info("endpoint %s is held until it has what was set: %s", endpoint.url, reason)
        endpoint.held, endpoint.opened = reason, frozenset()
        self._retry_at[endpoint] = self._clock()

    def _on_lost(self, endpoint: Endpoint) -> None:
        if endpoint in self._lost:
            self._lost[endpoint] += 1
            if not endpoint.held:
                self._hold(endpoint, "connection lost")

    def _on_news(self, missed: list[str]) -> None:
        """Other calls hold. Those that are held for others are looked at again; those that take streams again
        need not wait until the time that they gave before."""
        urls = set(missed)
        opened = [call for call in self._controls.calls[-1:] if call.state != WEIGHTS and not call.closes]
        self._look_at = self._clock() + LOOK_S
        latest = {call.state for call in self._controls.calls[-1:]}
        for endpoint in self._endpoints:
            endpoint.opened -= latest
            if endpoint.url in urls or endpoint.held or not self._controls.known.is_set():
                self._hold(endpoint, "missed a call")
            elif any(self._is_meant(call, endpoint) for call in opened):
                endpoint.backoff.clear()

    # -- who was opened directly

    async def _look(self) -> None:
        """Ask all servers that were closed whether they are."""
        try:
            await asyncio.gather(*map(self._look_again, self._endpoints))
        except Exception:
            log.exception("servers could not be asked whether they take requests")
        finally:
            self._look_at, self._looking = self._clock() + LOOK_S, None

    def _closing(self, endpoint: Endpoint) -> dict[str, ControlCall]:
        """The calls that hold for it and have it refuse requests, by state."""
        return {state: chain[-1] for state, chain in self._wanted(endpoint).items() if chain[-1].closes}

    async def _look_again(self, endpoint: Endpoint) -> None:
        closing = {} if endpoint.held else self._closing(endpoint)
        opened = set(endpoint.opened & closing.keys())
        for state in closing:
            with contextlib.suppress(_NotYet):
                closed = await self._read(endpoint, state)
                (opened.discard if closed else opened.add)(state)
        if endpoint.held or closing != self._closing(endpoint):
            return  # it may be told something else meanwhile
        if opened - endpoint.opened:
            endpoint.backoff.clear()
        if opened != endpoint.opened:
            endpoint.opened = frozenset(opened)

    # -- what they lack

    async def _catch_up(self, endpoint: Endpoint) -> None:
        lost, numbers = self._lost.get(endpoint), self._numbers(endpoint)
        try:
            for state, chain in sorted(
                self._wanted(endpoint).items(), key=lambda wanted: STATES.index(wanted[0])
            ):
                await self._bring(endpoint, state, chain)
        except _NotYet as error:
            self._put_off(endpoint, str(error))
        except Exception:
            log.exception("endpoint %s could not be brought up to date", endpoint.url)
            self._put_off(endpoint, "the gateway failed")
        else:
            if endpoint.removed or (lost == self._lost.get(endpoint) and numbers == self._numbers(endpoint)):
                self._retry_at.pop(endpoint, None)
                if endpoint.held:
                    log.info("endpoint %s has what was set", endpoint.url)
                    endpoint.held = ""
                    endpoint.backoff.clear()
        finally:
            self._running.pop(endpoint, None)

    def _put_off(self, endpoint: Endpoint, why: str) -> None:
        _warn(endpoint.url, "endpoint %s is held: %s", endpoint.url, why)
        if endpoint in self._retry_at:
            endpoint.held = why.partition(":")[0]
            self._retry_at[endpoint] = self._clock() + RETRY_S

    def _numbers(self, endpoint: Endpoint) -> list[int]:
        return [call.number for calls in self._wanted(endpoint).values() for call in calls]

    async def _bring(self, endpoint: Endpoint, state: str, chain: list[ControlCall]) -> None:
        """Have the endpoint be in a state. One without such routes is left as it is. Raises _NotYet."""
        found = await self._read(endpoint, state)
        if found is None:
            return
        for round in range(MOST_ROUNDS):
            lacking = _lacking(state, found, chain)
            if not lacking:
                return
            for call in lacking:
                endpoint.held = f"gets {state}"
                receipt = await self._send(endpoint, call, round)
                if receipt.outcome == "unsupported":
                    return
                if receipt.outcome != "done":
                    raise _NotYet(f"{state} not taken: {call.target}: {receipt.error}")
            found = await self._read(endpoint, state)
        raise _NotYet(f"{state} differs: it is {found!r} after {chain[-1].target}")

    async def _send(self, endpoint: Endpoint, call: ControlCall, round: int) -> EndpointReceipt:
        """``round``: with the key of the call first. A server that has carried it out, and then something
        else, would not do so again: further rounds have a key that follows from the first."""
        key = call.key
        if round:
            key = f"{hashlib.sha256(key.encode('latin-1')).hexdigest()[:32]}-{call.number}-{round}"
        return await self._fan_out.ask(endpoint, "POST", call.target, call.later_body, key, SEND_S)

    async def _read(self, endpoint: Endpoint, state: str) -> Any:
        """What the endpoint has; None: it has no such route. Raises _NotYet."""
        path, field = _READ[state]
        receipt = await self._fan_out.ask(endpoint, "GET", path, b"", "", READ_S)
        if receipt.outcome == "unsupported":
            return None
        try:
            if receipt.outcome == "done" and isinstance(receipt.result, msgspec.Raw):
                found = msgspec.json.decode(receipt.result, type=dict[str, Any])
                if found.get("settled") is False:
                    raise _NotYet(f"{state} changes: another change is under way")
                return found[field]
        except (msgspec.DecodeError, KeyError):
            return None  # the route of another kind of server
        raise _NotYet(f"{path} not answered: {receipt.error}")


def _lacking(state: str, found: Any, chain: list[ControlCall]) -> list[ControlCall]:
    """The calls of a chain that a server lacks which has reached ``found``."""
    if state != WEIGHTS:
        return [] if found == chain[-1].active else chain[-1:]
    versions = [call.version for call in chain]
    return chain[versions.index(found) + 1 :] if found in versions else chain
