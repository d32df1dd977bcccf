"""An engine whose model computes nothing, to measure the host's work of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.config.serve import ServeConfig
from penstock.engine.base import Hold, Load, StepRows
from penstock.engine.batch.logprobs import read_candidates
from penstock.engine.batch.rows import concat_rows
from penstock.engine.batch.slots import SlotTable
from penstock.engine.lora.adapter_table import AdapterTable
from penstock.engine.sampling.metadata import SamplingMetadata
from penstock.engine.schedule.block_tables import BlockTables
from penstock.engine.schedule.scheduler import Scheduler
from penstock.engine.speculation.ngram import NgramProposer
from penstock.engine.speculation.speculation import Speculation
from penstock.engine.weights.weight_loader import WeightLoader
from penstock.wire.kv_events import KVCacheEvent
from penstock.wire.logprobs import Logprobs
from penstock.wire.messages import EngineInfo, Submit
from penstock.wire.sockets import Wakeup

VOCAB_SIZE = 128_256
"""Tokens of Llama 3's vocabulary."""
TOKEN = 1000
EOS = 2
MANY_TOKENS = 1 << 14
"""Tokens per row of streams that have none yet."""
BLOCK_SIZE = 16
"""The default of ``--block-size``."""


class NoOpEngine:
    """The scheduler, slots, blocks and sampling metadata of the torch engine, without its model.

    Every token is TOKEN. Steps begin when the streams of all slots are submitted, so that all steps have the
    same batch size. The KV cache has room for every slot at full length, so nothing is preempted.
    """

    wakeups: Sequence[Wakeup] = ()

    adapters: AdapterTable | None = None
    weights: WeightLoader | None = None
    can_sleep = False
    pages = None

    def __init__(
        self,
        slots: int,
        max_model_len: int,
        max_batched_tokens: int,
        drafts: int = 0,
        logprobs: int | None = None,
    ) -> None:
        """``drafts``: tokens that each step drafts and accepts for each stream. ``logprobs``: candidates that
        the device computes beside each token; None: no logprobs."""
        table = SlotTable(slots, max_model_len, [EOS])
        blocks = BlockTables(slots, slots * (max_model_len // BLOCK_SIZE + 2), BLOCK_SIZE, max_model_len)
        sampling = SamplingMetadata(table, VOCAB_SIZE)
        self._blocks = blocks
        config = ServeConfig(max_num_batched_tokens=max_batched_tokens)
        speculation = Speculation(table, sampling, NgramProposer(table), drafts) if drafts else None
        self._scheduler = Scheduler(table, sampling, blocks, config, speculation=speculation)
        self._sampled = np.full(slots * (1 + drafts), TOKEN, np.int32)
        self._candidates: NDArray[np.int64] | None = None
        """int64[rows, W], on the device as it were; None: no logprobs."""
        if logprobs is not None:
            self._candidates = np.tile(np.arange(TOKEN, TOKEN + 1 + logprobs), (len(self._sampled), 1))
            self._values = -np.arange(1, 2 + logprobs, dtype=np.float32) + np.zeros_like(
                self._candidates, np.float32
            )
        self._missing = slots
        self.info = EngineInfo(
            engine="noop",
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            max_num_seqs=slots,
            eos_token_ids=(EOS,),
        )

    def submit(self, server: int, request: Submit) -> None:
        self._scheduler.submit(server, request)
        self._missing -= 1

    def take_turns(self, interval: int) -> Iterator[None]:
        """Let each step have the rows of as many streams: the caller makes a step for each item. With an
        interval of 1 there is nothing to do."""
        column = self._scheduler.table.interval
        if interval == 1:
            return
        yield  # the first tokens, all at once
        for turn in range(interval):
            column[:] = MANY_TOKENS
            column[turn::interval] = 1
            yield
        column[:] = interval

    def abort(self, server: int, streams: Sequence[int]) -> None:
        self._scheduler.abort(server, streams)

    def drop_server(self, server: int) -> None:
        self._scheduler.drop_server(server)

    def take_admitted(self) -> Sequence[tuple[int, int]]:
        return self._scheduler.table.take_admitted()

    def take_preempted(self) -> Sequence[tuple[int, int]]:
        return self._scheduler.table.take_preempted()

    def take_kv_events(self) -> Sequence[KVCacheEvent]:
        return ()

    def on_resubmitted_start(self, notify: Callable[[int, int], None]) -> None:
        self._scheduler.table.notify_start = notify

    def fail_all(self, code: str, message: str) -> StepRows:
        return self._scheduler.fail_all(code, message)

    def has_work(self) -> bool:
        return self._missing <= 0 and self._scheduler.has_work()

    can_step = has_work

    def hold(self, hold: Hold) -> None:
        self._scheduler.hold(hold)

    def flush(self) -> StepRows:
        return self._scheduler.flush()

    def dummy_step(self) -> None:
        """Do nothing."""

    def step(self) -> StepRows:
        aborted = self._scheduler.take_aborted()
        batch = self._scheduler.schedule()
        if not len(batch):
            return aborted
        sampled = batch.count_sampled()
        logprobs = self._read_logprobs(sampled)
        rows = self._scheduler.update_from_output(batch, self._sampled[:sampled], logprobs)
        return concat_rows([aborted, rows])

    def _read_logprobs(self, sampled: int) -> Logprobs | None:
        """The logprobs of as many tokens, as the torch engine reads them."""
        if self._candidates is None:
            return None
        wanted = np.full(sampled, self._candidates.shape[1] - 1, np.int32)
        rank = np.ones(sampled, np.int64)
        ids, values = self._candidates[:sampled], self._values[:sampled]
        return read_candidates(np.arange(sampled), wanted, ids, values, rank)

    def load(self) -> Load:
        return Load(self._scheduler.waiting(), self._scheduler.running(), self._blocks.usage())

    def metrics(self) -> dict[str, float]:
        return self._scheduler.metrics()

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        raise ValueError(f"an engine without a model has no operation {method!r}")

    def close(self) -> None:
        """There is nothing to release."""
