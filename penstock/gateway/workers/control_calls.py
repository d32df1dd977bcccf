"""Control calls: operations that set a state of all servers of a pool, and which of them hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from penstock.wire.messages import PAUSE, SLEEP, WEIGHTS

STATES = (WEIGHTS, PAUSE, SLEEP)
"""In the order in which a server that was away gets them."""
MAX_CHAIN = 16
"""Updates of weights that a server needs at most; servers take no more either."""
MAX_REMEMBERED_KEYS = 64
MAX_KEPT_BYTES = 4 << 20
"""Of all calls together."""
OVERHEAD_BYTES = 512
"""Of a call beside its texts, about."""


class ControlCall(msgspec.Struct, array_like=True, frozen=True):
    """A call of one of STATES."""

    state: str
    pool: str | None
    """Its servers; None: those of every pool."""
    model: str
    """Those of them that serve this model; empty: all."""
    key: str
    target: str
    """Path and query."""
    body: bytes
    version: str = ""
    """Of the weights."""
    active: bool = False
    """Whether servers pause or sleep."""
    whole: bool = True
    """Whether it holds alone; otherwise on top of the call before."""
    number: int = 0
    """Calls have settled in this order; 0: not yet."""
    closes: bool = False
    """Whether servers refuse new streams from here on; otherwise they take them as far as this state goes."""
    digests: tuple[str, ...] = ()
    """Of the files that a server has taken, as it said: those that get the call later take no others."""

    @property
    def later_body(self) -> bytes:
        """What servers get that have missed it."""
        if not self.digests:
            return self.body
        fields = msgspec.json.decode(self.body, type=dict[str, msgspec.Raw])
        return msgspec.json.encode({**fields, "digests": self.digests})

    @property
    def scope(self) -> tuple[str, str | None, str]:
        return self.state, self.pool, self.model

    @property
    def operation(self) -> tuple[str, bytes]:
        """What a key stands for."""
        return self.target, self.body

    @property
    def size(self) -> int:
        texts = sum(map(len, (self.key, self.target, self.model, self.version, *self.digests)))
        return OVERHEAD_BYTES + texts + len(self.body)


class ControlEnd(msgspec.Struct, array_like=True, frozen=True):
    """What has become of a call."""

    call: ControlCall
    settled: bool
    """Whether servers have it."""
    missed: list[str]
    """URLs of endpoints that shall have it, and do not."""


class ScopeCalls:
    """The calls of one state for the same servers."""

    def __init__(self) -> None:
        self.chain: list[ControlCall] = []
        """What holds: a whole one, and what was added to it."""
        self.pending: ControlCall | None = None
        self.keys: OrderedDict[str, None] = OrderedDict()
        """Those of the latest settled calls."""

    def refusal(self, call: ControlCall) -> str:
        """Why the call cannot be made; empty: it can, or is the same as one that is known."""
        pending = self.pending
        if pending is not None and pending.key != call.key:
            return f"Another change is under way: {pending.target}, Idempotency-Key {pending.key!r}."
        last = pending or (self.chain[-1] if self.chain else None)
        if last is not None and last.key == call.key:
            if last.operation == call.operation:
                return ""
            return f"Idempotency-Key {call.key!r} was used for: {last.target}, with another query or body."
        if call.key in self.keys:
            return f"Idempotency-Key {call.key!r} is that of an earlier change; another one came after it."
        if not call.whole and len(self.chain) >= MAX_CHAIN:
            return f"There were {MAX_CHAIN} updates since the whole weights: send a whole one."
        return ""

    def knows(self, call: ControlCall) -> bool:
        """Whether it is what holds already."""
        return bool(self.chain) and self.chain[-1].key == call.key

    def settle(self, call: ControlCall) -> None:
        self.chain = [call] if call.whole else [*self.chain, call]
        self.keys[call.key] = None
        while len(self.keys) > MAX_REMEMBERED_KEYS:
            self.keys.popitem(last=False)


def size_of(calls: Iterable[ControlCall]) -> int:
    return sum(call.size for call in calls)
