"""The synthetic engine: tokens on a clock, no model; for tests, benchmarks and capacity planning.

With a script (:mod:`penstock.engine.synthetic.script`) it answers prompts by rules. Without one:

The token at position p of a stream is a function of (seed, p) alone (:mod:`penstock.engine.sampling.rng`), at
temperature 0 of the prompt and p: the same request then gets the same text, on every engine and at any time.
Other sampling parameters that shape a model's distribution (top-p, penalties and so on) are ignored. An
adapter's tokens are others than the model's. Reasoning ends where its budget does (:mod:`.draws`).
"""

from __future__ import annotations

import cProfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from penstock.config.serve import ServeConfig
from penstock.engine.base import Hold, Load, RequestRejected, StepRows, StreamFailure
from penstock.engine.batch.rows import concat_rows
from penstock.engine.batch.slots import SlotTable
from penstock.engine.lora.adapter_table import AdapterTable, adapter_of
from penstock.engine.media.page_supply import PageSupply
from penstock.engine.schedule.submit_checks import check_request
from penstock.engine.schedule.waiting_queue import WaitingQueue
from penstock.engine.synthetic.adapters import SyntheticAdapterLoader, lora_info
from penstock.engine.synthetic.draws import TokenDraws
from penstock.engine.synthetic.faults import Faults
from penstock.engine.synthetic.made_up_logprobs import MadeUpLogprobs
from penstock.engine.synthetic.pictures import SyntheticPictures
from penstock.engine.synthetic.prefill_credit import PrefillCredit
from penstock.engine.synthetic.script import CompiledScript
from penstock.engine.synthetic.script_player import ScriptPlayer
from penstock.engine.synthetic.speculation import SyntheticSpeculation
from penstock.engine.synthetic.weights import SyntheticWeights
from penstock.engine.vocabulary import read_eos_token_ids, read_max_model_len, read_vocabulary
from penstock.media.synthetic_processor import image_token
from penstock.wire.arrays import I8
from penstock.wire.frames import FinishReason
from penstock.wire.kv_events import KVCacheEvent
from penstock.wire.messages import EngineInfo, Submit, WireError
from penstock.wire.scripted import ScriptedRule
from penstock.wire.sockets import Wakeup

MAX_PREFILL_STEP_S = 0.01
"""Maximum duration of a step that only prefills, so that requests and commands are handled in between."""
IDLE_STEP_S = 0.001
"""Minimum duration of a script's step, for its streams may wait."""


def _no_progress(text: str, fraction: float | None = None) -> None:
    """The default ``progress``: discards it."""


class SyntheticEngine:
    """Every running stream gets one token per step of ``synthetic_step_ms``, or up to
    ``synthetic_tokens_per_step``.

    ``synthetic_step_ms`` is the minimum duration of a step. Prompts are prefilled before the step that
    returns their stream's first token: at once, or one after another at ``synthetic_prefill_tokens_per_s``,
    with at most ``max_num_batched_tokens`` per step. EOS is never drawn. Logprobs are made up
    (:mod:`.made_up_logprobs`).

    A fault (``synthetic_fault``, KIND@N) is injected in the N-th step with work, counted from 0.
    """

    wakeups: Sequence[Wakeup] = ()

    can_sleep = True

    # -- lifetime: process

    def __init__(
        self,
        config: ServeConfig,
        model_dir: str,
        progress: Callable[[str, float | None], None] = _no_progress,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        *,
        tokenizer_dir: str | None = None,
        script: Sequence[ScriptedRule] | None = None,
        pages: PageSupply | None = None,
    ) -> None:
        """``tokenizer_dir`` contains tokenizer.json; None: ``model_dir`` does. ``script``: rules to answer
        by; None: tokens are random. ``pages``: of pictures; None: text alone is taken. Raises ConfigError."""
        progress("reading the tokenizer", None)
        directory, tokenizer = Path(model_dir), Path(tokenizer_dir or model_dir)
        vocabulary = read_vocabulary(tokenizer)
        max_model_len = config.max_model_len or read_max_model_len(directory)
        self.info = EngineInfo(
            engine="synthetic",
            max_model_len=max_model_len,
            vocab_size=vocabulary.size,
            max_num_seqs=config.max_num_seqs,
            eos_token_ids=read_eos_token_ids(directory),
            lora=lora_info(config),
        )
        self._pictures: SyntheticPictures | None = None
        self.adapters: AdapterTable | None = None
        if self.info.lora is not None:
            self.adapters = AdapterTable(SyntheticAdapterLoader(self.info.lora), config.max_cpu_loras)
        self.weights = SyntheticWeights()
        self._step_s = config.synthetic_step_ms / 1000
        self._credit = PrefillCredit(config.synthetic_prefill_tokens_per_s, config.max_num_batched_tokens)
        self._faults = Faults(config.synthetic_fault, sleep)
        self._clock = clock
        self._sleep = sleep

        self._waiting = WaitingQueue(config)
        self._table = SlotTable(
            config.max_num_seqs, max_model_len, self.info.eos_token_ids, clock, vocab_size=vocabulary.size
        )
        if pages is not None:
            self._pictures = SyntheticPictures(self._table, image_token(str(tokenizer))[1], pages, config)
            self.info = replace(self.info, media=self._pictures.media.info)
        self._player = None
        if script is not None:
            rules = CompiledScript(script, tokenizer, vocabulary.size, self.info.eos_token_ids)
            self._player = ScriptPlayer(rules, self._table, clock, sleep)
        self._draws = TokenDraws(self._table, vocabulary.ordinary, self.weights)
        self._speculation = self._make_speculation(config)
        self._logprobs = MadeUpLogprobs(config.max_num_seqs, vocabulary.ordinary)
        self._prefilling: deque[int] = deque()
        self._decoding: NDArray[np.intp] = np.zeros(0, np.intp)
        """Slots in order of their first token."""
        self._aborted: set[int] = set()
        """Slots to be released with a row in the next step."""
        self._profile: cProfile.Profile | None = None
        self._hold = Hold.NOTHING

    def _make_speculation(self, config: ServeConfig) -> SyntheticSpeculation | None:
        if config.synthetic_tokens_per_step == 1:
            return None
        return SyntheticSpeculation(
            self._table,
            self._draws.state,
            self._draws.draw,
            tokens_per_step=config.synthetic_tokens_per_step,
            acceptance_rate=config.synthetic_acceptance_rate,
        )

    @property
    def pages(self) -> PageSupply | None:
        return None if self._pictures is None else self._pictures.media.pages

    def close(self) -> None:
        """Finish writing pages."""
        if self.pages is not None:
            self.pages.close()

    # -- streams come and go

    def submit(self, server: int, request: Submit) -> None:
        if self._table.find_slot(server, request.stream) is not None:
            raise WireError(f"Submit.stream {request.stream} is running already")
        self._check(request)
        if not self.has_work():
            self._credit.begin(self._clock())
        self._waiting.push(server, request, self._table.free_count(), adapter_of(request, self.adapters))

    def _check(self, request: Submit) -> None:
        sampling = request.sampling
        for name, value in (
            ("logit_bias", sampling.logit_bias),
            ("allowed_token_ids", sampling.allowed_token_ids),
            ("bad_words", sampling.bad_words or None),
            ("structured output (response_format, structured_outputs, tool_choice)", sampling.grammar),
            ("prompt_logprobs", None if sampling.prompt_logprobs < 0 else sampling.prompt_logprobs),
        ):
            if value is not None and (self._player is None or name == "prompt_logprobs"):
                raise RequestRejected(f"{name}: the synthetic engine does not support it")
        check_request(request, self.info.max_model_len, self.info.vocab_size)
        if self._pictures is not None:
            self._pictures.media.check(request)
        if self._player is not None:
            self._player.check(request)

    def abort(self, server: int, streams: Sequence[int]) -> None:
        for stream in streams:
            if self._waiting.abort(server, stream):
                continue
            slot = self._table.find_slot(server, stream)
            if slot is not None:
                self._aborted.add(slot)

    def drop_server(self, server: int) -> None:
        self._waiting.drop_server(server)
        dropped = set(self._table.slots_of(server))
        self._withdraw(dropped)
        self._aborted -= dropped
        for slot in dropped:
            self._release(slot)
        if self.pages is not None:
            self.pages.drop_server(server)

    def take_admitted(self) -> Sequence[tuple[int, int]]:
        return self._table.take_admitted()

    def take_preempted(self) -> Sequence[tuple[int, int]]:
        return self._table.take_preempted()

    def take_kv_events(self) -> Sequence[KVCacheEvent]:
        return ()

    def on_resubmitted_start(self, notify: Callable[[int, int], None]) -> None:
        self._table.notify_start = notify

    def fail_all(self, code: str, message: str) -> StepRows:
        held: list[NDArray[np.intp]] = []
        rows = self._table.fail_all(code, message, held.append)
        if self._logprobs:
            rows.logprobs = self._logprobs.of_rows(rows, held[0])
        rows.failed = [*rows.failed, *self._waiting.fail_all(code, message)]
        self._aborted.clear()
        self._prefilling.clear()
        self._decoding = self._decoding[:0]
        self._logprobs.clear_all()
        if self._pictures is not None:
            self._pictures.clear()
        return rows

    def _withdraw(self, slots: set[int]) -> None:
        """Take slots out of prefill and decode."""
        if self._pictures is not None:
            self._pictures.withdraw(slots)
        self._prefilling = deque(slot for slot in self._prefilling if slot not in slots)
        gone = np.fromiter(slots, np.intp, len(slots))
        self._decoding = self._decoding[~np.isin(self._decoding, gone)]

    def _release(self, slot: int) -> None:
        self._draws.clear(slot)
        self._table.release(slot)
        self._logprobs.clear(slot)
        if self._pictures is not None:
            self._pictures.release(slot)

    # -- the step

    def has_work(self) -> bool:
        return bool(
            len(self._decoding)
            or self._prefilling
            or self._waiting
            or self._aborted
            or self._waiting.has_finished()
            or (self._pictures is not None and self._pictures.pending)
        )

    def can_step(self) -> bool:
        if self._aborted or self._waiting.has_finished() or self._hold is Hold.NOTHING:
            return self.has_work()
        return self._hold is Hold.NEWCOMERS and bool(len(self._decoding) or self._prefilling)

    def hold(self, hold: Hold) -> None:
        self._hold = hold

    def flush(self) -> StepRows:
        held: list[NDArray[np.intp]] = []
        slots = np.array(self._table.running_slots(), np.intp)
        rows = self._table.flush(slots, held.append)
        if self._logprobs:
            rows.logprobs = self._logprobs.of_rows(rows, held[0])
        return rows

    def step(self) -> StepRows:
        """Admit, prefill, and draw tokens for every decoding stream. Raises InjectedFault."""
        began = self._clock()
        if self._aborted:
            self._withdraw(self._aborted)
        if self._hold is Hold.ALL:
            return self._rows(self._decoding[:0], np.zeros(0, np.int8), self._decoding, {})
        lost = [] if self._pictures is None else self._pictures.settle(self._waiting, self._fail)
        if self._hold is Hold.NOTHING:
            self._admit()
        if self._pictures is not None:
            self._prefilling += self._pictures.advance(len(self._decoding), self._draws.see)
        self._prefill_prompts(began)
        failing = self._inject_fault()
        slots, resting = self._decoding, None
        if self._player is not None:
            slots, finish, resting, broken = self._player.step(slots, began)
            failing |= broken
        elif self._speculation is not None:
            finish = self._speculation.append(slots)
        else:
            finish = self._table.append_and_check_stop(slots, self._draws.draw(slots))
        rows = self._rows(slots, finish, resting, failing)
        if lost:
            rows.failed = [*rows.failed, *lost]
        self._sleep_until(began + self._duration())
        return rows

    def dummy_step(self) -> None:
        """Take a step's time."""
        if self._step_s:
            self._sleep(self._step_s)

    def _admit(self) -> None:
        while self._waiting and self._table.free_count():
            pictures = self._pictures
            first = self._waiting.pop() if pictures is None else pictures.pop_ready(self._waiting)
            if first is None:
                return
            request = first.request
            slot = self._table.allocate(first.server, request, first.adapter)
            if self._player is not None:
                self._player.begin(slot, request)
            else:
                self._draws.begin(slot, request, first.adapter)
            self._logprobs.set(slot, request.sampling)
            if self._pictures is None or not self._pictures.begin(slot, request):
                self._prefilling.append(slot)

    def _prefill_prompts(self, now: float) -> None:
        """Move streams whose prompt is prefilled by ``now`` from prefill to decode."""
        self._credit.earn(now, keep=bool(self._prefilling))
        prefilled = []
        while self._prefilling and self._credit.pay(int(self._table.prompt_len[self._prefilling[0]])):
            prefilled.append(self._prefilling.popleft())
        if prefilled:
            self._decoding = np.concatenate([self._decoding, np.array(prefilled, np.intp)])
        if not self._prefilling:
            self._credit.clear()

    def _rows(
        self,
        slots: NDArray[np.intp],
        finish: I8,
        resting: NDArray[np.intp] | None,
        failing: dict[int, str],
    ) -> StepRows:
        """The step's rows; frees the slots of streams that end. ``resting``: slots that get no row;
        ``failing``: messages of streams to fail, by slot."""
        table = self._table
        if self._aborted:
            aborted = np.fromiter(self._aborted, np.intp, len(self._aborted))
            slots = np.concatenate([slots, aborted])
            finish = np.concatenate([finish, np.full(len(aborted), FinishReason.ABORT, np.int8)])
            self._aborted.clear()
        for slot in failing:
            table.flush_next(slot)
        due = table.due(slots, finish) if self._logprobs else None
        rows = table.rows(slots, finish)
        if due is not None:
            rows.logprobs = self._logprobs.of_rows(rows, slots[due])
        if rows.finish is not None:
            for slot in slots[finish != 0].tolist():
                self._release(slot)
            self._decoding = slots = slots[finish == 0]
        if resting is not None:
            self._decoding = np.concatenate([slots, resting])
        if self._waiting.has_finished():
            rows = concat_rows([rows, self._waiting.take_finished()])
        for slot, message in failing.items():
            if slot in self._decoding:
                rows.failed = [*rows.failed, self._fail(slot, "engine_error", message)]
        return rows

    def _duration(self) -> float:
        """Seconds that the step takes: in a prefill-only step, until the first prompt is prefilled."""
        busy_s = 0.0 if self._pictures is None else self._pictures.take_busy_s()
        if len(self._decoding) or not self._prefilling:
            if self._step_s:
                return self._step_s + busy_s
            waits = self._player is not None or (self._pictures is not None and not len(self._decoding))
            return waits * IDLE_STEP_S + busy_s
        missing_s = self._credit.seconds_until(int(self._table.prompt_len[self._prefilling[0]]))
        return max(self._step_s, min(missing_s, MAX_PREFILL_STEP_S)) + busy_s

    def _sleep_until(self, when: float) -> None:
        rest = when - self._clock()
        if rest > 0:
            self._sleep(rest)

    # -- faults

    def _inject_fault(self) -> dict[int, str]:
        """Inject the fault in its step; return the slot of a stream to fail, for ``stream-error``."""
        message = self._faults.inject()
        return dict.fromkeys(self._decoding[:1].tolist(), message) if message else {}

    def _fail(self, slot: int, code: str, message: str) -> StreamFailure:
        failure = self._table.failure(slot, code, message)
        self._withdraw({slot})
        self._release(slot)
        return failure

    # -- reporting

    def load(self) -> Load:
        return Load(len(self._waiting), self._table.running(), generated=self._table.generated)

    def metrics(self) -> dict[str, float]:
        counters = {} if self._speculation is None else self._speculation.metrics()
        return counters if self._pictures is None else counters | self._pictures.media.metrics()

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        match method:
            case "reset_prefix_cache" | "sleep" | "wake_up":
                if self._pictures is not None:
                    self._pictures.media.clear()
                return None
            case "start_profile":
                self._profile = cProfile.Profile()
                self._profile.enable()
                return None
            case "stop_profile" if self._profile is not None:
                self._profile.disable()
                path = f"{arguments['path']}.prof"
                self._profile.dump_stats(path)
                self._profile = None
                return path
        raise ValueError(f"the synthetic engine has no operation {method!r}")
