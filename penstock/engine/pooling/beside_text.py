"""One engine for text and for vectors, of the same weights: steps of the one and of the other take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from penstock.config.serve import ServeConfig
from penstock.engine.base import Engine, Hold, Load, StepRows
from penstock.engine.batch.rows import concat_rows
from penstock.engine.pooling.engine import PoolingEngine
from penstock.engine.schedule.step_cost import ALIKE, MAX_RISE, RISE, StepCost
from penstock.engine.weights.weight_loader import WeightLoader
from penstock.wire.kv_events import KVCacheEvent
from penstock.wire.messages import Submit
from penstock.wire.sockets import Wakeup

FIRST_TOKENS = 128
"""Tokens of the first step of vectors beside text, as long as it is not known what a token takes."""
LONGEST_S = 0.02
"""Seconds that a step of vectors may take beside text."""
GROWTH = 1.25
"""Of the tokens that a step may have whatever the estimate says, from one step to the next."""


class FreeTokens:
    """Learns how many tokens a step of vectors takes in hardly more time than it takes for a few.

    The cost of a token includes its share of a step's fixed cost. Where that is most of it, as after requests
    of one short input each, the estimate would keep steps at a single input for ever, and shorten none.
    """

    def __init__(self) -> None:
        self.tokens = 1.0
        self._least_s = float("inf")
        """Duration of a step of ``_least_tokens``, the shortest of late."""
        self._least_tokens = 0

    def observe(self, seconds: float, tokens: int, more: bool) -> None:
        """Record that a step took ``seconds`` for ``tokens``; ``more``: further inputs wait for the next."""
        if seconds < self._least_s:
            self._least_s, self._least_tokens = seconds, tokens
        elif tokens <= self._least_tokens or self.tokens == 1.0:  # no step is smaller: it has become slower
            self._least_s += RISE * (min(seconds, MAX_RISE * self._least_s) - self._least_s)
        if seconds > ALIKE * self._least_s:
            self.tokens = max(1.0, self.tokens / 2)
        elif more and self.tokens < 2 * tokens:
            self.tokens *= GROWTH


class TextAndVectors:
    """An engine of text, and beside it one of vectors.

    While text is generated, a step of vectors takes at most the time that ``--max-prefill-delay`` leaves to
    prompts and LONGEST_S, or hardly more than that of a single input. The loop gives numbers to streams of
    both, none of them twice.
    """

    wakeups: Sequence[Wakeup] = ()

    def __init__(
        self,
        config: ServeConfig,
        text: Engine,
        pooling: PoolingEngine,
        free: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``free`` frees what vectors take of the device, when the engine sleeps."""
        self._text = text
        self._pooling = pooling
        self._free = free
        self._clock = clock
        self._cost = StepCost(config.max_prefill_delay, 1, LONGEST_S)
        self._free_tokens = FreeTokens()
        self._most = pooling.max_tokens
        self._text_is_next = True
        self.info = msgspec.structs.replace(text.info, pooling=pooling.info.pooling)
        self.adapters = text.adapters
        self.pages = text.pages
        self.can_sleep = text.can_sleep

    @property
    def weights(self) -> WeightLoader | None:
        return self._text.weights

    def close(self) -> None:
        self._text.close()

    # -- streams come and go

    def submit(self, server: int, request: Submit) -> None:
        (self._text if request.pooling is None else self._pooling).submit(server, request)

    def abort(self, server: int, streams: Sequence[int]) -> None:
        self._text.abort(server, streams)
        self._pooling.abort(server, streams)

    def drop_server(self, server: int) -> None:
        self._text.drop_server(server)
        self._pooling.drop_server(server)

    def take_admitted(self) -> Sequence[tuple[int, int]]:
        return [*self._text.take_admitted(), *self._pooling.take_admitted()]

    def take_preempted(self) -> Sequence[tuple[int, int]]:
        return self._text.take_preempted()

    def take_kv_events(self) -> Sequence[KVCacheEvent]:
        return self._text.take_kv_events()

    def on_resubmitted_start(self, notify: Callable[[int, int], None]) -> None:
        self._text.on_resubmitted_start(notify)
        self._pooling.on_resubmitted_start(notify)

    def fail_all(self, code: str, message: str) -> StepRows:
        return concat_rows([self._text.fail_all(code, message), self._pooling.fail_all(code, message)])

    # -- the step

    def has_work(self) -> bool:
        return self._text.has_work() or self._pooling.has_work()

    def can_step(self) -> bool:
        return self._text.can_step() or self._pooling.can_step()

    def hold(self, hold: Hold) -> None:
        self._text.hold(hold)
        self._pooling.hold(hold)

    def flush(self) -> StepRows:
        return self._text.flush()

    def step(self) -> StepRows:
        """A step of the one that did not have the last one, if it can take one: rows are of one kind."""
        text = self._text.can_step() and (self._text_is_next or not self._pooling.can_step())
        self._text_is_next = not text
        running, began = self._text.load().running, self._clock()
        if text:
            rows = self._text.step()
            self._cost.observe(self._clock() - began, 0, running)
            return rows
        before, most = self._pooling.computed_tokens, self._most
        if running:
            allowed = self._cost.allowed(most if before else FIRST_TOKENS, running)
            most = min(most, max(allowed, int(self._free_tokens.tokens)))
        self._pooling.max_tokens = most
        rows = self._pooling.step()
        seconds, tokens = self._clock() - began, self._pooling.computed_tokens - before
        self._cost.observe(seconds, tokens, 0)
        if tokens:
            self._free_tokens.observe(seconds, tokens, more=self._pooling.has_work())
        return rows

    def dummy_step(self) -> None:
        self._text.dummy_step()

    # -- reporting

    def load(self) -> Load:
        text, pooling = self._text.load(), self._pooling.load()
        return Load(
            waiting=text.waiting + pooling.waiting,
            running=text.running + pooling.running,
            kv_used=text.kv_used,
            deferred=text.deferred,
            generated=text.generated,
        )

    def metrics(self) -> dict[str, float]:
        return self._text.metrics()

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        made = self._text.call(method, arguments)
        if method == "sleep":
            self._free()
        return made
