"""Compiles grammars in threads while their requests wait, within bounds of time and bytes.

One thread compiles small grammars only, the other one large ones first, so that large grammars of one client
never delay the small ones of others. Within a size, API servers take turns. llguidance releases the GIL.

A compilation cannot be interrupted. One that exceeds :data:`COMPILE_TIMEOUT_S` fails, and its thread is
replaced, up to :data:`MAX_LATE_THREADS` times. One that nobody waits for any longer is not begun.
"""

from __future__ import annotations

import enum
import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Lock, Thread, current_thread, stack_size

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from penstock.engine.base import RequestRejected
from penstock.engine.sampling.grammar_limits import check_multiples, in_words
from penstock.logging_setup import RateLimitedLog
from penstock.wire.messages import OVERLOADED

log = logging.getLogger(__name__)

SMALL_GRAMMAR = 16 << 10
"""Bytes of the text of a small grammar, at most. One of that size takes about 50 milliseconds."""
COMPILE_TIMEOUT_S = 20.0
"""CPU seconds that a compilation may take: a busy or suspended machine is not the grammar's fault."""
QUEUE_TIMEOUT_S = 60.0
"""Seconds that a grammar may wait for its compilation."""
MAX_QUEUED_BYTES = 16 << 20
"""Bytes of grammars that wait for their compilation, per API server, small and large ones each."""
STACK_BYTES = 16 << 20
"""Stack of a compiler thread. llguidance recurses as deep as rules refer to one another; API servers pass on
what a stack of 2 MiB was enough for, which is the default of threads where ``ulimit -s`` is unlimited."""
MAX_LATE_THREADS = 4
"""Threads that may be lost to compilations beyond their time, until one of them ends."""
MAX_CACHE_BYTES = 512 << 20
"""Estimated bytes of compiled grammars that are kept for further requests; see :func:`estimated_bytes`."""
MAX_LEXER_STATES = 100_000
"""States of a grammar's lexer that streams may reach, about 700 bytes each. A text of ``maxLength`` 10,000
needs up to 80,000 with a vocabulary of 128,000 tokens, where half as many were too few."""
QUEUE_OVERHEAD = 1024
"""Bytes that a queued or failed grammar counts in addition to its text."""
EXPIRY_INTERVAL_S = 0.25
"""Seconds between two looks for compilations that exceed their time."""
MAX_STEP_ITEMS = 10_000
"""Items of the parser that one mask may create, of which usual grammars need less than a thousand. Their time
grows with the square in ambiguous grammars: up to 100 milliseconds for as many, and 2 seconds for 50,000."""

MAX_EXPRESSIONS = 200_000
"""Expressions that the lexer may make for one mask, about 100 bytes each. A bounded string needs 20,000 to
50,000 at its beginning with a vocabulary of 128,000 tokens, and 2,000 with one of 4,096."""
BYTES_PER_MASK_S = 300 << 20
"""Memory that the lexer takes per CPU second of the first mask."""
LEXER_BYTES_PER_TOKEN, MAX_LEXER_BYTES = 8 << 10, 32 << 20
"""Estimate of what a lexer grows by while streams generate tokens, and of how much in all: usual grammars
5 MB, long bounded strings 20 kB per token up to 70 MB."""

LIMITS = LLParserLimits(
    verbose_errors=False,
    max_lexer_states=MAX_LEXER_STATES,
    step_max_items=MAX_STEP_ITEMS,
    initial_lexer_fuel=MAX_EXPRESSIONS,
    step_lexer_fuel=MAX_EXPRESSIONS,
)


def cpu_seconds(thread: Thread) -> float:
    """CPU time that a running thread has taken; where the system does not tell, monotonic time."""
    if thread.ident is None or not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic()
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def estimated_bytes(text_bytes: int) -> int:
    """Memory of a compiled grammar and its text, once its first mask is computed. Measured with 4,096 tokens:
    0.1 MB for a text of 300 bytes, 11 MB for JSON properties of 114 kB with a pattern each, and 100 to 150 MB
    for a literal or regex of 300 kB, whose lexer has a state for each character."""
    return (128 << 10) + 400 * text_bytes


class CompilationState(enum.Enum):
    QUEUED = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()
    """Compiled or failed."""
    EVICTED = enum.auto()
    """The cache has dropped it: it must be requested again."""


@dataclass(slots=True, eq=False)
class Compilation:
    """One grammar's compilation. Changed under the compiler's lock."""

    grammar: str
    server: int
    """The API server that asked first."""
    text_bytes: int
    since: float
    """Time of its request; from its beginning on, CPU time of its thread at that moment."""
    state: CompilationState = CompilationState.QUEUED
    users: int = 1
    """Waiting streams that want it."""
    matcher: LLMatcher | None = None
    """At the grammar's start; to be copied for each stream."""
    first_tokens: NDArray[np.uint8] | None = None
    """Bitmask of the tokens that may come first."""
    error: RequestRejected | None = None
    """Why no stream may use it, also if that is found while streams run."""
    slow_mask_s: float = 0.0
    """CPU time of its masks beyond what masks may take, less what later ones took less."""
    first_mask_s: float = 0.0
    """CPU time of its first mask."""
    tokens: int = 0
    """Tokens of the streams that have ended."""
    counted_bytes: int = 0
    """What the cache counts for it."""

    @property
    def is_small(self) -> bool:
        return self.text_bytes <= SMALL_GRAMMAR

    @property
    def held_bytes(self) -> int:
        """Estimated memory before its streams generate tokens; see :func:`estimated_bytes`."""
        if self.matcher is None:
            return self.queued_bytes
        return estimated_bytes(self.text_bytes) + int(self.first_mask_s * BYTES_PER_MASK_S)

    @property
    def kept_bytes(self) -> int:
        """Estimated memory with what its lexer has grown to."""
        return self.held_bytes + min(self.tokens * LEXER_BYTES_PER_TOKEN, MAX_LEXER_BYTES)

    @property
    def queued_bytes(self) -> int:
        return self.text_bytes + QUEUE_OVERHEAD


class GrammarQueue:
    """Grammars of one size that wait, by API server; these take turns."""

    def __init__(self) -> None:
        self._by_server: OrderedDict[int, OrderedDict[str, Compilation]] = OrderedDict()
        self._bytes: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._by_server)

    def push(self, waiting: Compilation) -> None:
        """Raises RequestRejected with the code ``overloaded`` if too much of its API server waits."""
        queued = self._bytes.get(waiting.server, 0)
        if queued and queued + waiting.queued_bytes > MAX_QUEUED_BYTES:
            raise RequestRejected(
                f"The engine is overloaded: grammars of {queued} bytes wait to be compiled.", OVERLOADED
            )
        self._bytes[waiting.server] = queued + waiting.queued_bytes
        self._by_server.setdefault(waiting.server, OrderedDict())[waiting.grammar] = waiting

    def pop(self) -> Compilation:
        """Take the longest-waiting grammar of the API server whose turn it is; the queue is not empty."""
        server, waiting = next(iter(self._by_server.items()))
        first = next(iter(waiting.values()))
        self.remove(first)
        if server in self._by_server:
            self._by_server.move_to_end(server)
        return first

    def remove(self, waiting: Compilation) -> None:
        queue = self._by_server[waiting.server]
        del queue[waiting.grammar]
        self._bytes[waiting.server] -= waiting.queued_bytes
        if not queue:
            del self._by_server[waiting.server], self._bytes[waiting.server]

    def since_before(self, when: float) -> list[Compilation]:
        """Compilations that have waited since before ``when``."""
        late = []
        for queue in self._by_server.values():
            for waiting in queue.values():
                if waiting.since >= when:
                    break
                late.append(waiting)
        return late


class GrammarCompiler:
    """Compiles grammar texts to matchers, each text once. One thread, the engine's, calls its methods."""

    def __init__(
        self,
        vocab_size: int,
        eos: Sequence[int],
        tokenizer: Path,
        clock: Callable[[], float] = time.monotonic,
        cpu_seconds: Callable[[Thread], float] = cpu_seconds,
    ) -> None:
        """``tokenizer``: a tokenizer.json, read when the first grammar is compiled."""
        self._vocab_size = vocab_size
        self._eos = list(eos)
        self._path = tokenizer
        self._clock = clock
        self._cpu_seconds = cpu_seconds
        self._tokenizer: LLTokenizer | None = None
        self._loading = Lock()
        self._lock = Condition()
        self._small, self._large = GrammarQueue(), GrammarQueue()
        self._known: OrderedDict[str, Compilation] = OrderedDict()
        """Compilations by text, the least recently requested first."""
        self._cached_bytes = 0
        """Bytes of finished compilations that :meth:`take_finished` has returned."""
        self._running: dict[Compilation, Thread] = {}
        self._late: set[Thread] = set()
        """Threads whose compilation has exceeded its time."""
        self._workers: dict[bool, Thread | None] = {}
        """The thread for small grammars only (True), and the one for large ones first."""
        self._finished: list[Compilation] = []
        self._dropped: list[LLMatcher] = []
        """Evicted: freeing a large one takes up to a second, which the threads do."""
        self._next_expiry = 0.0
        self._log_late = RateLimitedLog(log)

    # -- for streams

    def request(self, server: int, grammar: str) -> Compilation:
        """The compilation of a grammar that a stream of ``server`` waits for; :meth:`withdraw` undoes it.
        Raises RequestRejected with the code ``overloaded`` if too many wait."""
        with self._lock:
            known = self._known.get(grammar)
            if known is not None:
                known.users += 1
                self._known.move_to_end(grammar)
                return known
            made = Compilation(grammar, server, sys.getsizeof(grammar), self._clock())
            (self._small if made.is_small else self._large).push(made)
            self._known[grammar] = made
            self._start_threads()
            self._lock.notify_all()
            return made

    def withdraw(self, compilation: Compilation) -> None:
        """A stream no longer waits. A compilation without streams is not begun."""
        with self._lock:
            compilation.users -= 1
            if not compilation.users and compilation.state is CompilationState.QUEUED:
                (self._small if compilation.is_small else self._large).remove(compilation)
                del self._known[compilation.grammar]

    def take_finished(self) -> list[Compilation]:
        """Compilations that have succeeded or failed since the last call."""
        if not (self._finished or self._running or self._small or self._large):
            return []
        with self._lock:
            self._evict()
            self._expire()
            finished, self._finished = self._finished, []
            for compilation in finished:
                self._count(compilation)
        return finished

    def wait(self, seconds: float) -> None:
        """Wait until a compilation is finished, at most ``seconds``."""
        with self._lock:
            if (self._running or self._small or self._large) and not self._finished:
                self._lock.wait_for(lambda: self._finished, seconds)

    def free_later(self, matcher: LLMatcher) -> None:
        """Have a thread free the last matcher of a grammar."""
        with self._lock:
            self._dropped.append(matcher)
            self._lock.notify_all()

    def on_unused(self, compilation: Compilation) -> None:
        """The last stream with a grammar has ended: counts what it has grown to. A failed one is kept only if
        that is the grammar's own ``error``, without its matcher."""
        with self._lock:
            if compilation.error is not None and compilation.matcher is not None:
                self._dropped.append(compilation.matcher)
                compilation.matcher = compilation.first_tokens = None
            self._count(compilation)
            self._evict()

    def forget(self, compilation: Compilation) -> None:
        """A stream has exceeded llguidance's limits with this grammar: others may not, but it is large."""
        with self._lock:
            if self._known.get(compilation.grammar) is compilation:
                self._drop(compilation)

    # -- the cache; under the lock

    def _count(self, compilation: Compilation) -> None:
        if self._known.get(compilation.grammar) is compilation:
            self._cached_bytes += compilation.kept_bytes - compilation.counted_bytes
            compilation.counted_bytes = compilation.kept_bytes

    def _drop(self, known: Compilation) -> None:
        del self._known[known.grammar]
        self._cached_bytes -= known.counted_bytes
        known.counted_bytes = 0
        if known.matcher is not None:
            self._dropped.append(known.matcher)
        known.matcher = known.first_tokens = None
        known.state = CompilationState.EVICTED

    def _evict(self) -> None:
        """Forget grammars beyond the cache's bytes, the least recently requested first. Those that have just
        been compiled are not counted yet: they stay until streams could begin with them."""
        if self._cached_bytes <= MAX_CACHE_BYTES:
            return
        counted = [known for known in self._known.values() if known.state is CompilationState.DONE]
        for known in counted:
            if self._cached_bytes <= MAX_CACHE_BYTES:
                break
            if known in self._finished:
                continue
            self._drop(known)
        self._lock.notify_all()

    # -- deadlines; under the lock

    def _expire(self) -> None:
        now = self._clock()
        if now < self._next_expiry:
            return
        self._next_expiry = now + EXPIRY_INTERVAL_S
        for queue in (self._small, self._large):
            for waiting in queue.since_before(now - QUEUE_TIMEOUT_S):
                queue.remove(waiting)
                message = f"its grammar waited longer than {QUEUE_TIMEOUT_S:g} s to be compiled."
                self._fail(waiting, RequestRejected(f"The engine is overloaded: {message}", OVERLOADED))
        for running in self._late_ones():
            thread = self._running.pop(running)
            self._late.add(thread)
            self._fail(
                running,
                RequestRejected(
                    f"structured output: compiling the grammar takes more than {COMPILE_TIMEOUT_S:g} s of "
                    "CPU time; use a simpler one"
                ),
            )
            self._log_late("grammar", "a grammar of %d bytes takes too long to compile", running.text_bytes)
            for small_only, worker in self._workers.items():
                if worker is thread:
                    self._workers[small_only] = None
        self._start_threads()

    def _late_ones(self) -> list[Compilation]:
        return [
            running
            for running, thread in self._running.items()
            if self._cpu_seconds(thread) > running.since + COMPILE_TIMEOUT_S
        ]

    def _fail(self, compilation: Compilation, error: RequestRejected) -> None:
        """A grammar's own error is remembered like a result; the engine's is not."""
        compilation.state = CompilationState.DONE
        compilation.error = error
        self._finished.append(compilation)
        if error.code == OVERLOADED:
            del self._known[compilation.grammar]
        self._lock.notify_all()

    def _start_threads(self) -> None:
        for small_only in (True, False):
            if self._workers.get(small_only) is None and len(self._late) < MAX_LATE_THREADS:
                # a daemon: an engine's process, which ends by os._exit, does not wait for a compilation
                thread = Thread(target=self._work, args=(small_only,), name="penstock-grammar", daemon=True)
                self._workers[small_only] = thread
                former = stack_size(STACK_BYTES)
                thread.start()
                stack_size(former)

    # -- in threads

    def _work(self, small_only: bool) -> None:
        own = current_thread()
        while True:
            with self._lock:
                compilation = self._next(small_only)
                while compilation is None and not self._dropped:
                    self._lock.wait()
                    compilation = self._next(small_only)
                dropped, self._dropped = self._dropped, []
                if compilation is not None:
                    compilation.state, compilation.since = CompilationState.RUNNING, self._cpu_seconds(own)
                    self._running[compilation] = own
            dropped.clear()
            if compilation is not None:
                self._finish(compilation, self._compile(compilation.grammar))
            if own in self._late:
                with self._lock:
                    self._late.discard(own)
                    self._start_threads()
                return

    def _next(self, small_only: bool) -> Compilation | None:
        if self._large and not small_only:
            return self._large.pop()
        return self._small.pop() if self._small else None

    def _finish(
        self,
        compilation: Compilation,
        result: tuple[LLMatcher, NDArray[np.uint8], float] | RequestRejected,
    ) -> None:
        with self._lock:
            if self._running.pop(compilation, None) is None:
                return  # it was late
            if isinstance(result, RequestRejected):
                self._fail(compilation, result)
            else:
                compilation.matcher, compilation.first_tokens, compilation.first_mask_s = result
                compilation.state = CompilationState.DONE
                self._finished.append(compilation)
            self._lock.notify_all()

    def _compile(self, grammar: str) -> tuple[LLMatcher, NDArray[np.uint8], float] | RequestRejected:
        """The matcher, its first mask, and the CPU time of that."""
        try:
            check_multiples(grammar)
            matcher = LLMatcher(self._load(), grammar, log_level=0, limits=LIMITS)
            began = time.thread_time()
            first = np.frombuffer(matcher.compute_bitmask(), np.uint8) if not matcher.is_error() else None
            if matcher.is_error() or first is None:
                return RequestRejected(f"structured output: {failure_reason(matcher)}")
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this grammar's
            return RequestRejected(f"structured output: {error}")
        return matcher, first, time.thread_time() - began

    def _load(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                try:
                    text = self._path.read_text()
                except OSError as error:
                    raise ValueError(f"structured output needs a tokenizer: {error}") from None
                self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos or None)
            return self._tokenizer


def failure_reason(matcher: LLMatcher) -> str:
    """Why a matcher is broken."""
    error = matcher.get_error()
    if error.startswith("NoExtension"):
        return "the grammar matches no text"
    return in_words(error.removesuffix("<non-verbose/>").strip()) or matcher.stop_reason()
