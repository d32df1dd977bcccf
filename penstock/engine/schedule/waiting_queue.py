"""The waiting queue: its order (arrival or priority), its limits, and the ends of streams that leave it.

A stream that cannot start when its turn comes is held outside the order, and released when what it waits for
has happened: then it comes first.
"""

from __future__ import annotations

import sys
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

from penstock.config.serve import ServeConfig
from penstock.engine.base import RequestRejected, StepRows, StreamFailure
from penstock.engine.batch.rows import aborted_rows
from penstock.engine.schedule.prefix_cache import Prefix
from penstock.wire.messages import OVERLOADED, Submit, WireError
from penstock.wire.submits import hints_size

if TYPE_CHECKING:
    from penstock.engine.lora.adapter_table import LoadedAdapter
    from penstock.engine.sampling.grammar_compiler import Compilation

StreamKey: TypeAlias = tuple[int, int]
"""(server, stream)"""
MAX_QUEUED_BYTES = 256 << 20
"""Memory of one API server's waiting requests: a thousand prompts of 64,000 tokens."""
BYTES_PER_REQUEST = 2048
"""Memory of a waiting request beside its lists and texts."""
BYTES_PER_TOKEN_ID = 40
"""Memory of an entry of a list of token ids, as Python's objects."""
BYTES_PER_PICTURE = 256
"""Memory of an item of Submit.media."""
BYTES_PER_BIAS = 160
"""Memory of an entry of logit_bias."""


class QueuePosition(IntEnum):
    """Where a stream waits among those of its priority."""

    RELEASED = 0
    """It was held when its turn came, so its turn is now."""
    ARRIVED = 1
    HELD = 2
    """Outside the order: it cannot start yet."""


QueueClass: TypeAlias = tuple[int, bool, QueuePosition]
"""(priority, whether the stream is new, place). Lower classes run earlier: a stream that another engine had
accepted comes before new ones of its priority."""


@dataclass(slots=True)
class WaitingStream:
    """One stream without a slot."""

    server: int
    request: Submit
    queue_class: QueueClass
    prefix: Prefix | None = None
    """What the prefix cache may have of its prompt, once the scheduler has looked it up."""
    compilation: Compilation | None = None
    """The compilation of its grammar, if it has one and the engine compiles it."""
    adapter: LoadedAdapter | None = None
    """None: the base model."""
    held_by: Hashable = None
    """What it waits for, while it is held."""

    @property
    def key(self) -> StreamKey:
        return self.server, self.request.stream

    @property
    def priority(self) -> int:
        return self.queue_class[0]

    @property
    def tokens(self) -> int:
        return len(self.request.prompt) // 4


class QueuedBytes:
    """Memory of the waiting requests, by API server. Choices of one request share all but BYTES_PER_REQUEST,
    which they are known by: their prompt is the same object."""

    def __init__(self) -> None:
        self._by_server: Counter[int] = Counter()
        self._shared: Counter[int] = Counter()
        """Streams that wait with the same prompt object, by its id."""

    def of(self, server: int) -> int:
        return self._by_server[server]

    def added_by(self, request: Submit) -> int:
        """What the request would add."""
        shared = id(request.prompt) in self._shared
        return BYTES_PER_REQUEST if shared else BYTES_PER_REQUEST + shared_bytes(request)

    def sharing(self, request: Submit) -> int:
        """Number of waiting streams that are choices of the same request and prompt."""
        return self._shared[id(request.prompt)]

    def add(self, waiting: WaitingStream) -> None:
        self._by_server[waiting.server] += self.added_by(waiting.request)
        self._shared[id(waiting.request.prompt)] += 1

    def remove(self, waiting: WaitingStream) -> None:
        prompt = id(waiting.request.prompt)
        self._shared[prompt] -= 1
        if not self._shared[prompt]:
            del self._shared[prompt]
        self._by_server[waiting.server] -= self.added_by(waiting.request)
        if not self._by_server[waiting.server]:
            del self._by_server[waiting.server]


def shared_bytes(request: Submit) -> int:
    """Memory of a request's texts and lists, about."""
    sampling = request.sampling
    ids = len(sampling.stop_token_ids) + len(sampling.allowed_token_ids or ())
    ids += sum(2 + len(word) for word in sampling.bad_words)
    texts = (
        request.prompt,
        sampling.grammar,
        request.cache_salt,
        request.adapter,
        request.kv_transfer_params,
    )
    return (
        BYTES_PER_TOKEN_ID * ids
        + hints_size(request.hints)
        + BYTES_PER_BIAS * len(sampling.logit_bias or ())
        + BYTES_PER_PICTURE * len(request.media)
        + sum(sys.getsizeof(text) for text in texts if text is not None)
    )


class WaitingQueue:
    """First come, first served; with the policy ``priority`` the lowest priority first, ties by arrival.

    Pushing, finding, removing and ending a stream take constant time, except for a bisection among the
    priorities that occur.
    """

    def __init__(
        self, config: ServeConfig, on_leave: Callable[[WaitingStream], None] = lambda waiting: None
    ) -> None:
        """``config``: the engine's, with its rank's part of the limits. ``on_leave`` is called with every
        stream that leaves the queue, for whatever reason."""
        self.tokens = 0
        """Prompt tokens of all waiting streams."""
        self._bytes = QueuedBytes()
        self._by_priority = config.scheduling_policy == "priority"
        self._max_requests = config.max_num_queued_reqs
        self._max_tokens = config.max_num_queued_tokens
        self._streams: dict[StreamKey, WaitingStream] = {}
        self._classes: dict[QueueClass, OrderedDict[StreamKey, WaitingStream]] = {}
        self._class_order: list[QueueClass] = []
        """The keys of ``_classes``, in order."""
        self._held: dict[Hashable, dict[StreamKey, WaitingStream]] = {}
        """Held streams, by what they wait for."""
        self._on_leave = on_leave
        self._aborted: list[tuple[int, int, int]] = []
        self._failed: list[StreamFailure] = []

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[WaitingStream]:
        """Streams that are not held, in scheduling order; the queue must not change during the iteration."""
        for queue_class in self._class_order:
            if queue_class[2] is not QueuePosition.HELD:
                yield from self._classes[queue_class].values()

    def __contains__(self, key: StreamKey) -> bool:
        return key in self._streams

    # -- streams come

    def push(
        self, server: int, request: Submit, free_slots: int, adapter: LoadedAdapter | None = None
    ) -> WaitingStream:
        """Queue a stream. ``free_slots``: that many streams will be admitted soon and do not count.
        ``adapter``: the one of the request, as long as it waits.

        Raises RequestRejected with the code ``overloaded`` when the queue is full of streams with the same or
        a more important priority, or the API server's waiting requests take MAX_QUEUED_BYTES; WireError when
        the stream is in the queue already. A resubmitted stream has been accepted before: it is refused only
        at twice MAX_QUEUED_BYTES.
        """
        if (server, request.stream) in self._streams:
            raise WireError(f"Submit.stream {request.stream} is running already")
        priority = request.priority if self._by_priority else 0
        queue_class = priority, not request.resubmitted, QueuePosition.ARRIVED
        newcomer = WaitingStream(server, request, queue_class, adapter=adapter)
        self._check_bytes(newcomer)
        if not request.resubmitted:
            self._make_room(newcomer, free_slots)
        self._insert(newcomer)
        self._streams[newcomer.key] = newcomer
        self.tokens += newcomer.tokens
        self._bytes.add(newcomer)
        if adapter is not None:
            adapter.streams += 1
        return newcomer

    def _check_bytes(self, newcomer: WaitingStream) -> None:
        held = self._bytes.of(newcomer.server)
        most = MAX_QUEUED_BYTES * (2 if newcomer.request.resubmitted else 1)
        # a request above the bound is accepted when none waits: otherwise it could never run
        if held and held + self._bytes.added_by(newcomer.request) > most:
            raise RequestRejected(
                f"The engine is overloaded: requests of {held >> 20} MiB of this API server wait.", OVERLOADED
            )

    def _insert(self, waiting: WaitingStream) -> None:
        if waiting.queue_class not in self._classes:
            self._classes[waiting.queue_class] = OrderedDict()
            insort(self._class_order, waiting.queue_class)
        self._classes[waiting.queue_class][waiting.key] = waiting

    def _make_room(self, newcomer: WaitingStream, free_slots: int) -> None:
        """Fail less important streams until the newcomer fits; none of them if it would not fit anyway."""
        victims: list[WaitingStream] = []
        less_important = self._less_important(newcomer.queue_class)
        waiting, tokens = len(self), self.tokens
        while reason := self._reason_against(newcomer, waiting - free_slots, waiting, tokens):
            victim = next(less_important, None)
            if victim is None:
                raise RequestRejected(f"The engine is overloaded: {reason}.", OVERLOADED)
            victims.append(victim)
            waiting, tokens = waiting - 1, tokens - victim.tokens
        for victim in victims:
            self.fail(
                victim,
                OVERLOADED,
                "The engine is overloaded: a more important request took this one's place in the queue.",
            )

    def _less_important(self, queue_class: QueueClass) -> Iterator[WaitingStream]:
        """New streams of a less important priority: least important first, within a class latest first."""
        for other in reversed(self._class_order):
            if other[0] <= queue_class[0]:
                return
            if other[1]:
                yield from reversed(self._classes[other].values())

    def _reason_against(self, newcomer: WaitingStream, queued: int, waiting: int, tokens: int) -> str | None:
        """Why a newcomer cannot join ``waiting`` streams, ``queued`` of them without a free slot in sight."""
        if self._max_requests is not None and queued >= self._max_requests:
            others = max(0, queued - self._bytes.sharing(newcomer.request))
            return f"{others} others wait and at most {self._max_requests} may (--max-num-queued-reqs)"
        # a prompt longer than the limit is accepted by an empty queue: otherwise it could never run
        if self._max_tokens is not None and waiting and tokens + newcomer.tokens > self._max_tokens:
            others = tokens - newcomer.tokens * self._bytes.sharing(newcomer.request)
            return (
                f"{others} prompt tokens of others wait and at most {self._max_tokens} may "
                "(--max-num-queued-tokens)"
            )
        return None

    # -- streams go

    def remove(self, waiting: WaitingStream) -> None:
        """Take a stream out, for it to get a slot."""
        self._extract(waiting)
        del self._streams[waiting.key]
        self.tokens -= waiting.tokens
        self._bytes.remove(waiting)
        self._leave(waiting)

    def _leave(self, waiting: WaitingStream) -> None:
        if waiting.adapter is not None:
            waiting.adapter.streams -= 1
        self._on_leave(waiting)

    def _extract(self, waiting: WaitingStream) -> None:
        members = self._classes[waiting.queue_class]
        del members[waiting.key]
        if not members:
            del self._classes[waiting.queue_class]
            self._class_order.remove(waiting.queue_class)
        if waiting.queue_class[2] is QueuePosition.HELD:
            held = self._held[waiting.held_by]
            del held[waiting.key]
            if not held:
                del self._held[waiting.held_by]

    def pop(self) -> WaitingStream:
        """Take out the first stream of a queue that is not empty."""
        first = next(iter(self))
        self.remove(first)
        return first

    def fail(self, waiting: WaitingStream, code: str, message: str) -> None:
        """End a stream with an error, also one that has left the queue; :meth:`take_finished` returns its
        end."""
        if waiting.key in self._streams:
            self.remove(waiting)
        self._failed.append(StreamFailure(*waiting.key, waiting.request.resumed, code, message))

    def abort(self, server: int, stream: int) -> bool:
        """Abort a stream; :meth:`take_finished` returns its end. False when it is not in the queue."""
        waiting = self._streams.get((server, stream))
        if waiting is None:
            return False
        self.remove(waiting)
        self._aborted.append((server, stream, waiting.request.resumed))
        return True

    def drop_server(self, server: int) -> None:
        """Forget an API server's streams; they get no rows."""
        for waiting in [waiting for waiting in self._streams.values() if waiting.server == server]:
            self.remove(waiting)
        self._aborted = [end for end in self._aborted if end[0] != server]
        self._failed = [failure for failure in self._failed if failure.server != server]

    def fail_all(self, code: str, message: str) -> list[StreamFailure]:
        """End every stream with an error, also those whose ends were not taken yet."""
        waiting_streams = list(self._streams.values())
        ends = self._aborted + [(*waiting.key, waiting.request.resumed) for waiting in waiting_streams]
        failures = self._failed + [StreamFailure(*end, code, message) for end in ends]
        self._streams, self._classes, self._class_order, self._held, self.tokens = {}, {}, [], {}, 0
        self._bytes = QueuedBytes()
        for waiting in waiting_streams:
            self._leave(waiting)
        self._aborted, self._failed = [], []
        return failures

    # -- streams that cannot start when their turn comes

    def hold(self, waiting: WaitingStream, by: Hashable) -> None:
        """Keep a stream outside the order until :meth:`release` of ``by``, so that it is in nobody's way."""
        self._move(waiting, QueuePosition.HELD)
        waiting.held_by = by
        self._held.setdefault(by, {})[waiting.key] = waiting

    def held_count(self) -> int:
        """Streams that are held."""
        return sum(map(len, self._held.values())) if self._held else 0

    def release(self, by: Hashable) -> list[WaitingStream]:
        """Put the streams that are held by ``by`` in front of those of their priority that came later.
        Returns them."""
        released = list(self._held.get(by, {}).values())
        for waiting in released:
            self._move(waiting, QueuePosition.RELEASED)
        return released

    def _move(self, waiting: WaitingStream, place: QueuePosition) -> None:
        self._extract(waiting)
        priority, is_new, _ = waiting.queue_class
        waiting.queue_class = priority, is_new, place
        self._insert(waiting)

    # -- the ends of aborted and failed streams

    def has_finished(self) -> bool:
        return bool(self._aborted or self._failed)

    def take_finished(self) -> StepRows:
        rows = aborted_rows(self._aborted)
        rows.failed = self._failed
        self._aborted, self._failed = [], []
        return rows
