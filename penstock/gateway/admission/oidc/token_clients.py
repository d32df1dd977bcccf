"""The clients that present tokens of issuers instead of keys.

A token is checked once, outside of the request that brings it first, and then found by its digest. New tokens
are checked in turns of a few milliseconds, so that a flood of them holds up no stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from penstock.gateway.admission.budget_terms import NOT_SHARED, SharedBudgets
from penstock.gateway.admission.oidc.issuer_entry import IssuerEntry
from penstock.gateway.admission.oidc.key_source import MIN_INTERVAL_S, KeySource
from penstock.gateway.admission.oidc.signing_keys import SigningKeys
from penstock.gateway.admission.oidc.token_check import (
    MAX_TOKEN_BYTES,
    TokenCheck,
    TokenRefused,
    UnknownKeyError,
)
from penstock.gateway.admission.oidc.token_pending import TokenPending
from penstock.gateway.requests.caller import Caller
from penstock.http.access_keys import refused_key
from penstock.http.admission import unavailable
from penstock.http.errors import ApiError

log = logging.getLogger(__name__)

TURN_S = 0.002
"""Most seconds of checks in one turn of the event loop; one check is made in any case."""
WAIT_S = 2.0
"""Most seconds for which a request waits until the keys of its token's issuer are fetched."""
MAX_WAITING = 4096
"""Tokens that wait to be checked; each has MAX_TOKEN_BYTES at most."""
MAX_AWAITING_KEYS = 1024
"""Tokens that wait until keys are fetched."""
MAX_CACHED_BYTES = 16 << 20
"""Of good tokens, counted by their lengths and ENTRY_BYTES each."""
ENTRY_BYTES = 1024
MAX_REFUSED = 4096
"""Refusals that are remembered, for REFUSED_S each."""
REFUSED_S = 30.0
MAX_LABELS = 1024
"""Clients of tokens with metrics of their own, in a worker."""
OTHER = "other"
"""Label of all others."""


class _Good(NamedTuple):
    caller: Caller
    until: float
    weight: int


class _Refused(NamedTuple):
    code: str
    text: str
    until: float


class _Waiting(NamedTuple):
    digest: bytes
    token: bytes
    settled: asyncio.Future[None]
    has_waited: bool = False
    """For keys; it waits for them once."""


class _AwaitingKeys(NamedTuple):
    tokens: list[_Waiting]
    end: asyncio.TimerHandle


class TokenClients:
    """Finds clients by their tokens. All its methods belong to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """``clock`` gives Unix times, in seconds."""
        self._clock = clock
        self._sources: dict[str, KeySource] = {}
        """By issuer."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._check = TokenCheck({}, self._keys, frozenset())
        self._shared = NOT_SHARED
        self._good: dict[bytes, _Good] = {}
        self._cached_bytes = 0
        self._refused: dict[bytes, _Refused] = {}
        self._waiting: dict[bytes, _Waiting] = {}
        """Every token that is not settled, by its digest."""
        self._due: deque[_Waiting] = deque()
        """Those of them that are checked next; the others wait for keys."""
        self._awaiting_keys: dict[str, _AwaitingKeys] = {}
        """By issuer."""
        self._labels: set[tuple[str, str]] = set()
        """Name and team of clients that metrics name."""

    # -- requests

    def find(self, digest: bytes, token: bytes) -> Caller | None:
        """The client of a token; None: it is none. Raises ApiError: :class:`TokenPending` for a new one."""
        now = self._clock()
        good = self._good.get(digest)
        if good is not None and now < good.until:
            return good.caller
        if not token.startswith(b"eyJ") or token.count(b".") != 2:  # b'{"' in base64
            return None
        refused = self._refused.get(digest)
        if refused is not None and now < refused.until:
            raise _refusal(refused.code, refused.text)
        if len(token) > MAX_TOKEN_BYTES:
            raise _refusal("token_malformed", f"The token is longer than {MAX_TOKEN_BYTES} bytes.")
        waiting = self._waiting.get(digest)
        if waiting is None:
            if len(self._waiting) >= MAX_WAITING:
                raise unavailable("Too many new tokens wait to be checked.", "too_many_tokens")
            waiting = _Waiting(digest, token, asyncio.get_running_loop().create_future())
            self._waiting[digest] = waiting
            self._enqueue([waiting])
        raise TokenPending(waiting.settled)

    # -- settings

    def configure(
        self, issuers: Iterable[IssuerEntry], reserved: frozenset[str], shared: SharedBudgets = NOT_SHARED
    ) -> None:
        """Tokens of these issuers are good from here on; no name of a token may be ``reserved``; their
        clients have the ``shared`` budgets, too. Keys that are known stay."""
        entries = {entry.issuer: entry for entry in issuers}
        told = entries, reserved, shared
        if told == (self._check.issuers, self._check.reserved, self._shared):
            return
        self._shared = shared
        sources = {issuer: KeySource(entry, self._clock) for issuer, entry in entries.items()}
        for issuer, source in self._sources.items():
            new = sources.get(issuer)
            if new is not None and new.identity == source.identity:
                source.entry = new.entry
                sources[issuer] = source
            else:
                self._tasks.pop(issuer).cancel()
        self._sources = sources
        for issuer, source in sources.items():
            if issuer not in self._tasks:
                self._tasks[issuer] = asyncio.ensure_future(source.follow(self._on_read(issuer)))
        self._check = TokenCheck(entries, self._keys, reserved)
        self._forget()
        for issuer in self._awaiting_keys.keys() - sources.keys():
            self._release(issuer)

    async def close(self) -> None:
        """Fetch no more keys."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- checks

    def _keys(self, issuer: str) -> SigningKeys | None:
        return self._sources[issuer].current()

    def _enqueue(self, waiting: Iterable[_Waiting]) -> None:
        idle = not self._due
        self._due.extend(waiting)
        if idle and self._due:
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        end = time.perf_counter() + TURN_S
        while self._due:
            self._settle(self._due.popleft())
            if time.perf_counter() >= end:
                break
        if self._due:
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _settle(self, waiting: _Waiting) -> None:
        now = self._clock()
        try:
            good = self._check.check(waiting.token, now)
        except UnknownKeyError as refusal:
            if not self._await_keys(refusal.issuer, waiting):
                self._refuse(waiting, refusal, now + MIN_INTERVAL_S)
        except TokenRefused as refusal:
            self._refuse(waiting, refusal, now + REFUSED_S)
        except Exception:  # whatever it is, it is about one token
            log.exception("a token cannot be checked")
            fault = TokenRefused("token_malformed", "The token cannot be checked.")
            self._refuse(waiting, fault, now + MIN_INTERVAL_S)
        else:
            until = min(good.expires, self._sources[good.issuer.issuer].valid_until)
            self._accept(waiting, self._labelled(good.caller), until)

    def _accept(self, waiting: _Waiting, caller: Caller, until: float) -> None:
        weight = len(waiting.token) + ENTRY_BYTES
        self._cached_bytes += weight
        while self._cached_bytes > MAX_CACHED_BYTES:
            self._cached_bytes -= self._good.pop(next(iter(self._good))).weight
        if (before := self._good.pop(waiting.digest, None)) is not None:  # it is checked again
            self._cached_bytes -= before.weight
        self._good[waiting.digest] = _Good(self._shared.added_to(caller), until, weight)
        self._done(waiting)

    def _refuse(self, waiting: _Waiting, refusal: TokenRefused, until: float) -> None:
        self._refused[waiting.digest] = _Refused(refusal.code, refusal.text, until)
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._done(waiting)

    def _done(self, waiting: _Waiting) -> None:
        del self._waiting[waiting.digest]
        waiting.settled.set_result(None)

    def _forget(self) -> None:
        """What is known of tokens was said by other keys or issuers."""
        self._good.clear()
        self._refused.clear()
        self._cached_bytes = 0

    def _labelled(self, caller: Caller) -> Caller:
        labels = caller.name, caller.team
        if len(self._labels) < MAX_LABELS:
            self._labels.add(labels)
        return caller if labels in self._labels else replace(caller, label=OTHER)

    # -- tokens of keys that are not known

    def _await_keys(self, issuer: str, waiting: _Waiting) -> bool:
        """Have the token wait for a fetch of its issuer's keys; False: it has, or must not."""
        count = sum(len(each.tokens) for each in self._awaiting_keys.values())
        if waiting.has_waited or count >= MAX_AWAITING_KEYS or not self._sources[issuer].want():
            return False
        if issuer not in self._awaiting_keys:
            end = asyncio.get_running_loop().call_later(WAIT_S, self._release, issuer)
            self._awaiting_keys[issuer] = _AwaitingKeys([], end)
        self._awaiting_keys[issuer].tokens.append(waiting._replace(has_waited=True))
        return True

    def _release(self, issuer: str) -> None:
        """Check those that wait for keys of an issuer with what is there."""
        released = self._awaiting_keys.pop(issuer, None)
        if released is not None:
            released.end.cancel()
            self._enqueue(released.tokens)

    def _on_read(self, issuer: str) -> Callable[[bool], None]:
        def on_read(changed: bool) -> None:
            if changed:
                self._forget()
            self._release(issuer)

        return on_read


def _refusal(code: str, text: str) -> ApiError:
    return unavailable(text, code) if code == "token_keys_unavailable" else refused_key(text, code)
