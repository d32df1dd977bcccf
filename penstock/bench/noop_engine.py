"""An engine whose model computes nothing, to measure the host's work of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.config.serve import ServeConfig
from penstock.engine.base import Load, StepRows
from penstock.engine.batch.rows import concat_rows
from penstock.engine.batch.slots import SlotTable
from penstock.engine.lora.adapter_table import AdapterTable
from penstock.engine.sampling.metadata import SamplingMetadata
from penstock.engine.schedule.block_tables import BlockTables
from penstock.engine.schedule.scheduler import Scheduler
from penstock.engine.speculation.ngram import NgramProposer
from penstock.engine.speculation.speculation import Speculation
from penstock.wire.kv_events import KVCacheEvent
from penstock.wire.messages import EngineInfo, Submit
from penstock.wire.sockets import Wakeup

VOCAB_SIZE = 128_256
"""Tokens of Llama 3's vocabulary."""
TOKEN = 1000
EOS = 2
BLOCK_SIZE = 16
"""The default of ``--block-size``."""


class NoOpEngine:
    """The scheduler, slots, blocks and sampling metadata of the torch engine, without its model.

    Every token is TOKEN. Steps begin when the streams of all slots are submitted, so that all steps have the
    same batch size. The KV cache has room for every slot at full length, so nothing is preempted.
    """

    wakeups: Sequence[Wakeup] = ()

    adapters: AdapterTable | None = None
    can_sleep = False

    def __init__(self, slots: int, max_model_len: int, max_batched_tokens: int, drafts: int = 0) -> None:
        """``drafts``: tokens that each step drafts and accepts for each stream."""
        table = SlotTable(slots, max_model_len, [EOS])
        blocks = BlockTables(slots, slots * (max_model_len // BLOCK_SIZE + 2), BLOCK_SIZE, max_model_len)
        sampling = SamplingMetadata(table, VOCAB_SIZE)
        self._blocks = blocks
        config = ServeConfig(max_num_batched_tokens=max_batched_tokens)
        speculation = Speculation(table, sampling, NgramProposer(table), drafts) if drafts else None
        self._scheduler = Scheduler(table, sampling, blocks, config, speculation=speculation)
        self._sampled = np.full(slots * (1 + drafts), TOKEN, np.int32)
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

    def dummy_step(self) -> None:
        """Do nothing."""

    def step(self) -> StepRows:
        aborted = self._scheduler.take_aborted()
        batch = self._scheduler.schedule()
        if not len(batch):
            return aborted
        rows = self._scheduler.update_from_output(batch, self._sampled[: batch.count_sampled()], None)
        return concat_rows([aborted, rows])

    def load(self) -> Load:
        return Load(self._scheduler.waiting(), self._scheduler.running(), self._blocks.usage())

    def metrics(self) -> dict[str, float]:
        return self._scheduler.metrics()

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        raise ValueError(f"an engine without a model has no operation {method!r}")

    def close(self) -> None:
        """There is nothing to release."""
