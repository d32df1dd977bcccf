"""What an API server keeps of the last turn of each conversation, so that the next turn costs what it adds.

Clients send the whole conversation with every turn. The bytes of its messages are compared with those of the
turn before, and only what follows is decoded, rendered and tokenized. Whatever does not agree is done anew:
prompts and errors are those of a server without the memory.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from penstock.dispatch.sent_prompts import KnownPrefix

MIN_BODY = 32 * 1024 + 1
"""Bytes of a body from which on its turn is kept; shorter ones take as long to look up."""
MAX_CANDIDATES = 512
"""Conversations of one client whose ends are compared with a body, at 0.2 us each."""
MAX_PARTIAL = 8
"""Of these, those that may begin like the body and are compared byte by byte."""
CHANGED = 4
"""Messages at a turn's end that the next one may change, as clients do that move a mark to the last one; what
changes more becomes a conversation of its own."""
PROBE = 64
"""Bytes at the end of a message that are compared first."""
COMPARED = 1 << 16
"""Bytes that are compared at a time."""
TURN_BYTES, ITEM_BYTES = 2048, 1200
"""Memory of a turn, and of one of its messages, beside their bytes and texts."""
PART_BYTES, VALUE_BYTES = 100, 64
"""Memory of a decoded string, list or object beside its text, and of a value behind a comma, as the request
has it and as the template reads it."""
_SALT = re.compile(rb'"cache_salt"\s*:\s*"([^"\\]*)"')
SALT_AT_END = 1 << 16
"""Bytes at a body's end that may have its cache_salt."""

Scope: TypeAlias = tuple[str, str, bytes]
"""Tenant, type of the request and cache salt: conversations of different scopes share nothing."""


@dataclass(slots=True)
class KeptTurn:
    """One turn. It is not changed once it is kept: threads read it."""

    session: bytes
    """Name of the conversation, which its turns have in common and nobody else knows."""
    items: bytes = b""
    """The bytes of its messages, from the first one to the end of the last one."""
    ends: list[int] = field(default_factory=list)
    """Where each of them ends there."""
    decoded: list[Any] = field(default_factory=list)
    """The messages of the request."""
    parts: int = 0
    """No less than the strings, lists and objects of the messages."""
    commas: int = 0
    """No less than their commas."""
    probes: list[tuple[int, bytes]] = field(default_factory=list)
    """Ends of some messages and the bytes before them."""
    stored: dict[Hashable, Any] = field(default_factory=dict)
    """Parts of it that the server has stored."""
    conversation: Any = None
    """As it was rendered (:class:`~penstock.generation.prompt.renderer.KeptConversation`)."""
    text: str = ""
    """The prompt."""
    cut: int = 0
    """Where it may be cut: the ids of both parts, joined, are those of the whole. 0: nowhere."""
    ids: bytes = b""
    ids_cut: int = 0
    """Its token ids, and how many bytes of them are before the cut."""
    size: int = 0
    """Estimated memory in bytes."""


class Kept(NamedTuple):
    """What a body has in common with the turn before."""

    decoded: list[Any]
    """Its first messages."""
    end: int
    """Where these end in the body."""
    parts: int


class TurnMemory:
    """The last turns of conversations, which the threads of an API server share; the longest unused are
    forgotten first."""

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes``: 0 keeps nothing."""
        self.max_bytes = max_bytes
        self.bytes = 0
        """Estimated memory."""
        self.hits = self.misses = 0
        """Requests that go on with a turn, and that could have."""
        self._lock = Lock()
        self._turns: OrderedDict[bytes, tuple[Scope, KeptTurn]] = OrderedDict()
        self._scopes: dict[Scope, OrderedDict[bytes, KeptTurn]] = {}

    def begin(self, tenant: str | None, size: int) -> NextTurn | None:
        """The turn of a body of so many bytes; None: it is not kept."""
        return NextTurn(self, tenant or "") if MIN_BODY <= size < self.max_bytes else None

    def go_on(self, tenant: str | None, conversation: str | None, size: int) -> NextTurn | None:
        """The turn of a conversation that clients continue by a name of the server's, which nobody else
        knows; None: it has none, or it is not kept. ``size``: bytes of the whole conversation."""
        if conversation is None or not MIN_BODY <= size < self.max_bytes:
            return None
        turn = NextTurn(self, tenant or "")
        session = blake2b(f"{tenant or ''} {conversation}".encode(), digest_size=16).digest()
        with self._lock:
            _, before = self._turns.get(session, (None, None))
        turn.go_on(session, before)
        return turn

    def find(self, scope: Scope, body: bytes, start: int) -> tuple[KeptTurn, int] | None:
        """The turn that a body goes on with, whose messages begin at ``start``, and how many of its messages
        the two have in common."""
        with self._lock:
            of_client = self._scopes.get(scope)
            turns = [] if of_client is None else _newest(of_client)
        best: tuple[KeptTurn, int] | None = None
        partial = 0
        for turn in turns:
            if _ends_at(body, start, turn.probes[0]) and body.startswith(turn.items, start):
                return turn, len(turn.ends)
            if partial < MAX_PARTIAL and any(_ends_at(body, start, each) for each in turn.probes[1:]):
                partial += 1
                number = bisect_right(turn.ends, _common_bytes(turn.items, body, start))
                if best is None or number > best[1]:
                    best = turn, number
        return best if best is not None and best[1] else None

    def keep(self, scope: Scope, turn: KeptTurn, before: KeptTurn | None) -> None:
        """Keep ``turn``, in place of ``before``."""
        if turn.size > self.max_bytes:
            return
        with self._lock:
            self._forget(turn.session)
            if before is not None:
                self._forget(before.session)
            self._turns[turn.session] = scope, turn
            self._scopes.setdefault(scope, OrderedDict())[turn.session] = turn
            self.bytes += turn.size
            while self.bytes > self.max_bytes:
                self._forget(next(iter(self._turns)))

    def count(self, *, hit: bool) -> None:
        with self._lock:
            self.hits += hit
            self.misses += not hit

    def _forget(self, session: bytes) -> None:
        known = self._turns.pop(session, None)
        if known is None:
            return
        scope, turn = known
        self.bytes -= turn.size
        of_client = self._scopes[scope]
        del of_client[session]
        if not of_client:
            del self._scopes[scope]


class NextTurn:
    """The turn of one request: what it has in common with the one before, and what the next one may use."""

    def __init__(self, memory: TurnMemory, tenant: str) -> None:
        self._memory = memory
        self._tenant = tenant
        self._scope: Scope | None = None
        self._replaces = False
        self.named = False
        """Whether its conversation has a name of the server's."""
        self.salt = ""
        """The request's cache salt."""
        self.before: KeptTurn | None = None
        """The turn that this one goes on with."""
        self.turn: KeptTurn | None = None
        """This one, as far as it is known."""
        self.prefix: KnownPrefix | None = None
        """What the prompt has in common with the one before; None: nothing, or it is not known yet."""
        self._compared: tuple[str, int] | None = None
        """The prompt, and how much of it is known."""

    def go_on(self, session: bytes, before: KeptTurn | None) -> None:
        """Go on with the turn before of a conversation that has a name."""
        self.named, self._scope, self._replaces = True, (self._tenant, "", session), True
        self.before, self.turn = before, KeptTurn(session)

    def find(self, kind: str, body: bytes, start: int) -> Kept | None:
        """What the messages of ``body``, which begin at ``start``, have in common with the turn before.
        ``kind``: the type of the request."""
        self._scope = self._tenant, kind, _salt(body, start)
        found = self._memory.find(self._scope, body, start)
        if found is None:
            return None
        turn, number = found
        end = turn.ends[number - 1]
        self.before, self._replaces = turn, number + CHANGED >= len(turn.ends)
        return Kept(turn.decoded[:number], start + end, turn.parts)

    def miss(self) -> None:
        """The body has nothing in common with ``before`` after all."""
        self.before = None

    def learn(self, body: bytes, start: int, ends: list[int], decoded: list[Any], parts: int) -> None:
        """The body's messages. ``ends``: where those behind the ones of the turn before end in the body."""
        known = len(decoded) - len(ends)
        before, commas = ([], 0) if self.before is None else (self.before.ends[:known], self.before.commas)
        ends = before + [end - start for end in ends]
        items = body[start : start + ends[-1]]
        commas += _count(items, b",", before[-1] if before else 0)
        if PART_BYTES * parts + VALUE_BYTES * commas > 2 * len(items):  # messages that changed count, too
            parts = _count(items, b"[{", 0) + (_count(items, b'"', 0) + 1) // 2
            commas = _count(items, b",", 0)
        last = len(ends) - 1
        places = dict.fromkeys((last, max(0, last - CHANGED), last // 2))
        probes = [(ends[at], items[max(0, ends[at] - PROBE) : ends[at]]) for at in places]
        keeps = self.before is not None and self._replaces
        session = self.before.session if self.before is not None and keeps else secrets.token_bytes(16)
        self.turn = KeptTurn(session, items, ends, list(decoded), parts, commas, probes)

    def stored(self, key: Hashable, read: Callable[[], Any]) -> Any:
        """What ``read`` gives for a part of the conversation that the server has stored under ``key``, and
        that never changes; it is kept as long as the conversation goes on with it."""
        if self.turn is None or not self.named:
            return read()
        known = {} if self.before is None else self.before.stored
        value = self.turn.stored[key] = known[key] if key in known else read()
        return value

    def has_stored(self, key: Hashable) -> bool:
        """Whether the turn before had what the server has stored under ``key``."""
        return self.named and self.before is not None and key in self.before.stored

    # -- the prompt

    def resumes(self, messages: int) -> bool:
        """Whether the turn before has at most so many messages, and its rendering may be gone on with."""
        before = self.conversation
        return before is not None and before.loop is not None and len(before.messages) <= messages

    @property
    def conversation(self) -> Any:
        """The conversation of the turn before, as it was rendered."""
        return None if self.before is None else self.before.conversation

    def learn_conversation(self, conversation: Any) -> None:
        """The conversation as it is rendered."""
        if self.turn is not None:
            self.turn.conversation = conversation

    def known_prompt(self, text: str) -> tuple[int, bytes | memoryview]:
        """How many of the first characters the prompt has in common with the one before, as far as both may
        be cut there, and their ids."""
        before = self.before
        if before is None or not before.cut:
            return 0, b""
        if self._compared is None or self._compared[0] is not text:
            known = text.startswith(before.text)
            if not known:  # the whole first: a part is a copy
                known = text.startswith(before.text[: before.cut])
            self._compared = text, before.cut if known else 0
        cut = self._compared[1]
        if not cut:
            return 0, b""
        self.prefix = KnownPrefix(before.ids, before.ids_cut)
        return cut, memoryview(before.ids)[: before.ids_cut]

    def learn_prompt(self, text: str, cut: int, ids: bytes, ids_cut: int) -> None:
        """The prompt: cut at ``cut``, and its ids at the byte ``ids_cut``, its parts have the ids of the
        whole."""
        turn = self.turn
        if turn is not None:
            turn.text, turn.cut, turn.ids, turn.ids_cut = text, cut, ids, ids_cut

    def keep(self) -> None:
        """Keep the turn for the next one."""
        self._memory.count(hit=self.before is not None)
        turn, scope = self.turn, self._scope
        if turn is None or scope is None or not (self.named or scope[2] == self.salt.encode()):
            return
        widest = 4 if not turn.text.isascii() else 1
        turn.size = (
            TURN_BYTES
            + _decoded_bytes(turn)
            + ITEM_BYTES * (len(turn.ends) + 4 * len(turn.stored))
            + widest * len(turn.text)
            + len(turn.ids)
        )
        self._memory.keep(scope, turn, self.before if self._replaces else None)


def _count(items: bytes, characters: bytes, start: int) -> int:
    codes = np.frombuffer(items, np.uint8, offset=start)
    return sum(int(np.count_nonzero(codes == each)) for each in characters)


def _decoded_bytes(turn: KeptTurn) -> int:
    """Estimated memory of the messages: that of their texts and bytes, or of values in them, if it is more,
    whose JSON is a tenth as long: lists of numbers, for instance, as arguments of calls."""
    if turn.items:
        return max(2 * len(turn.items), PART_BYTES * turn.parts + VALUE_BYTES * turn.commas)
    quotes, openings = turn.text.count('"'), turn.text.count("[") + turn.text.count("{")
    parts = openings + (quotes + 1) // 2
    return max(2 * len(turn.text), PART_BYTES * parts + VALUE_BYTES * turn.text.count(","))


def _newest(turns: OrderedDict[bytes, KeptTurn]) -> list[KeptTurn]:
    newest: Iterator[KeptTurn] = reversed(turns.values())
    return [turn for _, turn in zip(range(MAX_CANDIDATES), newest, strict=False)]


def _ends_at(body: bytes, start: int, probe: tuple[int, bytes]) -> bool:
    end = start + probe[0]
    return body[end - len(probe[1]) : end] == probe[1]


def _common_bytes(items: bytes, body: bytes, start: int) -> int:
    """How many of the first bytes of ``items`` stand at ``start`` in ``body``."""
    length = min(len(items), len(body) - start)
    ours = np.frombuffer(items, np.uint8, length)
    theirs = np.frombuffer(body, np.uint8, length, start)
    for at in range(0, length, COMPARED):
        differ = ours[at : at + COMPARED] != theirs[at : at + COMPARED]
        if differ.any():
            return at + int(differ.argmax())
    return length


def _salt(body: bytes, start: int) -> bytes:
    """The cache salt of a body, if it stands where clients write it. Turns of bodies whose salt is another
    are not kept."""
    found = None
    for low, high in ((0, start), (max(start, len(body) - SALT_AT_END), len(body))):
        if body.find(b'"cache_salt"', low, high) >= 0:
            found = _SALT.search(body, low, high) or found
    return b"" if found is None else found[1]
