"""RPC: runs the calls of API servers between steps, each once, and sends the replies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from penstock.config.errors import ConfigError
from penstock.engine.loop.idempotency import IdempotencyCache, RpcError
from penstock.engine.loop.two_phase import TwoPhaseParticipant
from penstock.logging_setup import RateLimitedLog
from penstock.wire.adapter_list import ADAPTERS
from penstock.wire.messages import MAX_CALL_BYTES, RpcCall, RpcPhase, RpcReply, encode

log = logging.getLogger(__name__)

MAX_WAITING_CALLS = 64
"""Calls of one API server that wait for streams to end, or for another one's commit."""
MAX_SHOWN_CHARS = 200
"""Characters of a method's name in an error."""


class RpcServer:
    """Runs calls and replies, to two-phase changes possibly later: they may wait for streams to end."""

    def __init__(
        self,
        run: Callable[[str, dict[str, Any]], Any],
        participants: Mapping[str, TwoPhaseParticipant],
        reply: Callable[[int, RpcReply], None],
        step: Callable[[], int],
    ) -> None:
        """``run(method, arguments)`` runs an operation and raises ValueError for an unknown one.
        ``participants``: the states that change by two-phase commit, by name. ``reply`` sends to an API
        server. ``step`` returns the number of published steps."""
        self._run = run
        self._participants = participants
        self._reply = reply
        self._step = step
        self._receipts = IdempotencyCache()
        self._receipts_of_lists = IdempotencyCache()
        """Apart, since lists of adapters are long: they would take the room of clients' keys."""
        self._waiting: list[tuple[int, RpcCall]] = []
        """Calls without a reply yet, with their API server."""
        self._complain = RateLimitedLog(log, logging.ERROR)

    def handle(self, server: int, call: RpcCall) -> None:
        """Reply at once, or later from :meth:`answer_pending`."""
        reply = self._try(call, lambda: self._begin(server, call))
        if reply is None:
            self._waiting.append((server, call))
            self.answer_pending()
        else:
            self._reply(server, reply)

    def answer_pending(self) -> None:
        """Reply to the waiting calls that have finished."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for server, call in waiting:
            reply = self._try(call, partial(self._continue_call, call))
            if reply is None:
                self._waiting.append((server, call))
            else:
                self._reply(server, reply)

    def drop_server(self, server: int) -> None:
        """Forget an API server's calls, and undo prepared changes that only it requested."""
        self._waiting = [entry for entry in self._waiting if entry[0] != server]
        for participant in self._participants.values():
            try:
                participant.withdraw(server)
            except Exception:  # noqa: BLE001 - the engine stays in its state
                self._complain(participant.name, "%s cannot be undone", participant.name, exc_info=True)

    def forget_decisions(self) -> None:
        """The API servers of another head come, which numbers its decisions from the beginning."""
        for participant in self._participants.values():
            try:
                participant.forget()
            except Exception:  # noqa: BLE001 - the engine stays in its state
                self._complain(participant.name, "%s cannot be undone", participant.name, exc_info=True)

    # -- one call; None: no reply yet

    def _begin(self, server: int, call: RpcCall) -> RpcReply | None:
        first = self._cache(call).find(call)
        if first is not None:
            return first
        if call.phase is RpcPhase.RUN:
            return self._run_once(call)
        participant = self._participants.get(call.method)
        if participant is None:
            raise RpcError(f"this engine has no state {call.method[:MAX_SHOWN_CHARS]!r} to change")
        if call.phase is RpcPhase.ABORT:
            participant.withdraw(server, call.key)
            return RpcReply(call.call, step=self._step())
        if sum(waiting == server for waiting, _ in self._waiting) >= MAX_WAITING_CALLS:
            raise RpcError(f"{MAX_WAITING_CALLS} calls of this API server wait already")
        participant.begin(server, call)
        return None

    def _continue_call(self, call: RpcCall) -> RpcReply | None:
        first = self._cache(call).find(call)  # another API server's COMMIT may have been carried out first
        if first is not None:
            return first
        reply = self._participants[call.method].try_reply(call)
        if reply is not None:
            reply = msgspec.structs.replace(reply, step=self._step())
            if call.phase is RpcPhase.COMMIT and not reply.repeated:
                self._cache(call).remember(call, reply)
        return reply

    def _cache(self, call: RpcCall) -> IdempotencyCache:
        return self._receipts_of_lists if call.method == ADAPTERS else self._receipts

    def _run_once(self, call: RpcCall) -> RpcReply:
        def run() -> RpcReply:
            reply = RpcReply(call.call, None, self._run(call.method, call.arguments), self._step())
            size = len(encode(reply))  # a result that cannot be encoded fails the call, not the engine
            if size > MAX_CALL_BYTES:
                raise RpcError(f"the result takes {size} bytes, at most {MAX_CALL_BYTES} are sent")
            return reply

        reply = self._try(call, run)
        assert reply is not None
        self._receipts.remember(call, reply)
        return reply

    def _try(self, call: RpcCall, act: Callable[[], RpcReply | None]) -> RpcReply | None:
        try:
            return act()
        except RpcError as error:
            return RpcReply(call.call, str(error), None, self._step(), code=error.code)
        except (ValueError, ConfigError) as error:
            return RpcReply(call.call, str(error), None, self._step())
        except Exception as error:  # noqa: BLE001 - the call fails, not the engine
            method = call.method[:MAX_SHOWN_CHARS]
            self._complain(method, "the call of %r failed", method, exc_info=True)
            return RpcReply(call.call, f"{type(error).__name__}: {error}", None, self._step())
