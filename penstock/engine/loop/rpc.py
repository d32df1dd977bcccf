"""Calls of API servers on an engine: run once, between steps, with a receipt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from penstock.engine.loop.idempotency import IdempotencyCache, RpcError
from penstock.engine.loop.two_phase import TwoPhaseParticipant
from penstock.wire.messages import RpcCall, RpcPhase, RpcReply, encode

log = logging.getLogger(__name__)


class RpcServer:
    """Takes calls and answers them, some of them later: a change may have to wait for streams to end."""

    def __init__(
        self,
        run: Callable[[str, dict[str, Any]], Any],
        participants: Mapping[str, TwoPhaseParticipant],
        reply: Callable[[int, RpcReply], None],
        step: Callable[[], int],
    ) -> None:
        """``run`` does a named operation, and raises ValueError for what it does not do; ``participants`` are
        the states that change in two phases, by name. ``reply`` sends to an API server; ``step`` counts what
        the engine has published."""
        self._run = run
        self._participants = participants
        self._reply = reply
        self._step = step
        self._receipts = IdempotencyCache()
        self._waiting: list[tuple[int, RpcCall]] = []

    def handle(self, server: int, call: RpcCall) -> None:
        """Answers at once, or later from :meth:`answer_pending`."""
        reply = self._try(call, lambda: self._begin(server, call))
        if reply is None:
            self._waiting.append((server, call))
            self.answer_pending()
        else:
            self._reply(server, reply)

    def answer_pending(self) -> None:
        """Answer what can be answered by now."""
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
        """An API server is gone, and with it the changes that it alone asked for."""
        self._waiting = [entry for entry in self._waiting if entry[0] != server]
        for participant in self._participants.values():
            participant.withdraw(server)

    # -- one call; None: it is under way

    def _begin(self, server: int, call: RpcCall) -> RpcReply | None:
        first = self._receipts.find(call)
        if first is not None:
            return first
        if call.phase is RpcPhase.RUN:
            return self._run_once(call)
        participant = self._participants.get(call.method)
        if participant is None:
            raise RpcError(f"this engine has no state {call.method!r} to change")
        if call.phase is RpcPhase.ABORT:
            participant.withdraw(server, call.key)
            return RpcReply(call.call, step=self._step())
        participant.begin(server, call)
        return None

    def _continue_call(self, call: RpcCall) -> RpcReply | None:
        first = self._receipts.find(call)  # another API server's COMMIT may have come before
        if first is not None:
            return first
        reply = self._participants[call.method].try_reply(call)
        if reply is not None:
            reply = msgspec.structs.replace(reply, step=self._step())
            if call.phase is RpcPhase.COMMIT and not reply.repeated:
                self._receipts.remember(call, reply)
        return reply

    def _run_once(self, call: RpcCall) -> RpcReply:
        def run() -> RpcReply:
            reply = RpcReply(call.call, None, self._run(call.method, call.arguments), self._step())
            encode(reply)  # a result that cannot be sent is the call's error, not the engine's end
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
        except ValueError as error:
            return RpcReply(call.call, str(error), None, self._step())
        except Exception as error:
            log.exception("call of %s failed", call.method)
            return RpcReply(call.call, f"{type(error).__name__}: {error}", None, self._step())
