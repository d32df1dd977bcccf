"""Idempotency keys: replies to keyed calls are kept, so that no call runs twice on an engine."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import msgspec

from penstock.wire.messages import CONFLICT, RpcCall, RpcReply, encode

MAX_RECEIPTS = 1024
MAX_RECEIPT_BYTES = 4 << 20
"""Bytes of encoded calls and replies kept; the newest is kept whatever its size, at most twice
MAX_CALL_BYTES."""
MAX_SHOWN_CHARS = 200
"""Characters of a call shown in an error."""


class RpcError(ValueError):
    """A refused call; ``code`` is sent to the API server with the message."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class _Receipt(NamedTuple):
    asked: bytes
    """Encoded method and arguments."""
    reply: RpcReply
    size: int


class IdempotencyCache:
    """The latest replies by idempotency key, bounded by count and by bytes."""

    def __init__(self, most: int = MAX_RECEIPTS, most_bytes: int = MAX_RECEIPT_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._receipts: OrderedDict[str, _Receipt] = OrderedDict()
        self._bytes = 0

    def find_reply(self, call: RpcCall) -> RpcReply | None:
        """The reply to an earlier call with the same key, addressed to ``call``; None when there was none.

        Raises RpcError when the key was used for a different call, ValueError for arguments that cannot be
        compared: before the call runs.
        """
        if not call.key:
            return None
        asked = _asked(call)
        receipt = self._receipts.get(call.key)
        if receipt is None:
            return None
        if receipt.asked != asked:
            earlier = msgspec.msgpack.decode(receipt.asked)
            raise RpcError(
                f"the idempotency key {call.key!r} was used for {_shown(*earlier)}, "
                f"and cannot be used for {_shown(call.method, call.arguments)}",
                CONFLICT,
            )
        return msgspec.structs.replace(receipt.reply, call=call.call, repeated=True)

    def remember(self, call: RpcCall, reply: RpcReply) -> None:
        """Keep the reply to a call that has run, if the call has a key."""
        if not call.key:
            return
        asked = _asked(call)
        receipt = _Receipt(asked, reply, len(asked) + len(call.key) + len(encode(reply)))
        earlier = self._receipts.pop(call.key, None)
        self._receipts[call.key] = receipt
        self._bytes += receipt.size - (0 if earlier is None else earlier.size)
        while len(self._receipts) > 1 and (
            len(self._receipts) > self._most or self._bytes > self._most_bytes
        ):
            self._bytes -= self._receipts.popitem(last=False)[1].size


def _asked(call: RpcCall) -> bytes:
    """Raises ValueError for arguments that cannot be compared."""
    try:
        return msgspec.msgpack.encode((call.method, call.arguments), order="sorted")
    except TypeError:
        method = call.method[:MAX_SHOWN_CHARS]
        raise ValueError(f"arguments of {method}: keys of objects are strings, not other values") from None


def _shown(method: str, arguments: object) -> str:
    text = f"{method} {arguments}" if arguments else method
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"
