"""RPC: runs the calls of API servers between steps, each once, and sends the replies."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from penstock.config.errors import ConfigError
from penstock.engine.loop.idempotency import IdempotencyCache, RpcError
from penstock.logging_setup import RateLimitedLog
from penstock.wire.messages import MAX_CALL_BYTES, RpcCall, RpcReply, encode

log = logging.getLogger(__name__)

MAX_SHOWN_CHARS = 200
"""Characters of a method's name in an error."""


class RpcServer:
    """Runs calls and replies."""

    def __init__(
        self,
        run: Callable[[str, dict[str, Any]], Any],
        reply: Callable[[int, RpcReply], None],
        step: Callable[[], int],
    ) -> None:
        """``run(method, arguments)`` runs an operation and raises ValueError for an unknown one. ``reply``
        sends to an API server. ``step`` returns the number of published steps."""
        self._run = run
        self._reply = reply
        self._step = step
        self._receipts = IdempotencyCache()
        self._warn = RateLimitedLog(log, logging.ERROR)

    def handle(self, server: int, call: RpcCall) -> None:
        """Run a call, unless it ran earlier, and reply."""
        self._reply(server, self._try(call, lambda: self._receipts.find_reply(call) or self._run_once(call)))

    def _run_once(self, call: RpcCall) -> RpcReply:
        def run() -> RpcReply:
            reply = RpcReply(call.call, None, self._run(call.method, call.arguments), self._step())
            size = len(encode(reply))  # a result that cannot be encoded fails the call, not the engine
            if size > MAX_CALL_BYTES:
                raise RpcError(f"the result takes {size} bytes, at most {MAX_CALL_BYTES} are sent")
            return reply

        reply = self._try(call, run)
        self._receipts.remember(call, reply)
        return reply

    def _try(self, call: RpcCall, act: Callable[[], RpcReply]) -> RpcReply:
        try:
            return act()
        except RpcError as error:
            return RpcReply(call.call, str(error), None, self._step(), code=error.code)
        except (ValueError, ConfigError) as error:
            return RpcReply(call.call, str(error), None, self._step())
        except Exception as error:  # noqa: BLE001 - the call fails, not the engine
            method = call.method[:MAX_SHOWN_CHARS]
            self._warn(method, "the call of %r failed", method, exc_info=True)
            return RpcReply(call.call, f"{type(error).__name__}: {error}", None, self._step())
