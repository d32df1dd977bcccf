"""The model runner: runs a batch's forward pass and sampling, and reads the result from the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.base import StepRows
from penstock.engine.batch.prompt_logprobs import PromptLogprobsState
from penstock.engine.media.engine_media import EngineMedia
from penstock.engine.sampling.metadata import SamplingFeature, SamplingMetadata
from penstock.engine.schedule.adapter_room import NO_PLACE
from penstock.engine.schedule.batch import Batch, SampledRows
from penstock.engine.schedule.block_tables import BlockTables
from penstock.engine.torch.attention_metadata import token_positions
from penstock.engine.torch.experts import PendingRoutes
from penstock.engine.torch.lora.lora_plan import LoraPlan, plan_lora
from penstock.engine.torch.media.features import Features
from penstock.engine.torch.model import PagedModel
from penstock.engine.torch.sampling.sampler import Sampler, top_logprobs
from penstock.engine.torch.sampling.sampler_output import SamplerOutput, TopLogprobs
from penstock.engine.torch.transfer import to_device, to_device_together
from penstock.wire.arrays import I32
from penstock.wire.logprobs import Logprobs, concat_logprobs


@dataclass(slots=True, frozen=True)
class PendingPromptLogprobs:
    """Prompt logprobs of a launched batch."""

    slots: NDArray[np.intp]
    positions: NDArray[np.int64]
    """Positions of the scored tokens in their slots' prompts."""
    parts: Sequence[TopLogprobs]

    def read_rows(self, state: PromptLogprobsState) -> StepRows:
        """Rows with the logprobs; no stream may have left its slot since the launch."""
        read, tokens = [], 0
        for part in self.parts:
            read.append(part.read_logprobs().moved_by(tokens))
            tokens += len(part.row)
        whole = concat_logprobs(read)
        assert whole is not None
        return state.rows(self.slots, self.positions, whole)


@dataclass(slots=True, frozen=True)
class PendingOutput:
    """The output of a launched batch, which the device may not have finished."""

    sampled: Sequence[SamplerOutput]
    """Samples of consecutive rows, on the host once ``done``."""
    scored: PendingPromptLogprobs | None
    """To be read in the step that launched the batch."""
    done: torch.cuda.Event | None
    """None: the output is finished."""
    routes: PendingRoutes | None = None
    """Experts of its tokens; None: no stream asks. To be read after the tokens."""

    def read_tokens(self) -> tuple[I32, Logprobs | None]:
        """The tokens int32[R] of the batch's sampled rows, and logprobs whose ``token`` indexes them. Waits
        for the device."""
        if self.done is not None:
            self.done.synchronize()
        tokens, parts = [np.zeros(0, np.int32)], []
        for rows in self.sampled:
            read, logprobs = rows.read_tokens()
            if logprobs is not None:
                logprobs.token += np.int32(sum(map(len, tokens)))
                parts.append(logprobs)
            tokens.append(read)
        return np.concatenate(tokens), concat_logprobs(parts)


class ModelRunner:
    """One forward pass per step; the device runs them in the order of their launch.

    A batch may be launched before the previous one's tokens are read: they are kept on the device for it.
    """

    def __init__(
        self,
        model: PagedModel,
        blocks: BlockTables,
        sampling: SamplingMetadata,
        device: torch.device,
        adapter_places: I32 | None = None,
        media: EngineMedia | None = None,
    ) -> None:
        """``adapter_places`` int32[slots]: the place of each slot's adapter; None: the engine runs none.
        ``media``: its pictures; None: it takes text alone."""
        self._model = model
        self._blocks = blocks
        self._table = sampling.table
        self._sampling = sampling
        self._device = device
        self._adapter_places = adapter_places
        self._media = media
        self._last_lora: tuple[I32, LoraPlan | None] = np.zeros(0, np.int32), None
        """Places of the latest batch with adapters, and its plan: decodes have the same step after step."""
        self._last = torch.zeros(self._table.size, dtype=torch.int64, device=device)
        """int64[slots], on the device: the last sampled token of each slot."""
        self.sampler = Sampler(sampling, self._last)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingOutput:
        """Enqueue the forward pass and the sampling of a batch on the device."""
        positions = token_positions(batch)
        owners = np.repeat(batch.slots, batch.count)
        rows = batch.sampled_rows()
        scored = (
            self._sampling.prompt_logprobs.tokens_to_score(owners, positions)
            if self._sampling.prompt_logprobs.active_slots
            else rows.slots[:0]
        )
        self._sampling.prepare(batch.slots[batch.samples], batch.drafts)
        read = np.concatenate((rows.token, scored))
        tokens, at, slots = self._inputs(owners, positions, read, rows.slots)
        inputs = self._lora_plan(batch, owners), self._features(batch)
        hidden, routes = self._run(batch, tokens, at, inputs, owners, positions)
        kept = len(rows.token)
        sampled = [part.to_host() for part in self._sample(hidden[:kept], rows, slots)]
        prompts = None
        if len(scored):
            prompts = self._score(hidden[kept:], owners[scored], positions[scored] + 1)
        done = None
        if self._device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return PendingOutput(sampled, prompts, done, routes)

    def _run(
        self,
        batch: Batch,
        tokens: Tensor,
        rows: Tensor,
        inputs: tuple[LoraPlan | None, Features | None],
        owners: NDArray[np.intp],
        positions: NDArray[np.int64],
    ) -> tuple[Tensor, PendingRoutes | None]:
        """Hidden states at ``rows``, and the experts of the batch's tokens if a stream asks for them."""
        rope = None if self._media is None else self._media.rope
        rotary = None if rope is None else rope.of(batch, positions)
        if not np.count_nonzero(self._sampling.needs[batch.slots] & SamplingFeature.ROUTED_EXPERTS):
            return self._model.run(batch, tokens, self._blocks, rows, *inputs, rotary=rotary), None
        with self._model.recorder.recording() as recorded:
            hidden = self._model.run(batch, tokens, self._blocks, rows, *inputs, rotary=rotary, eager=True)
        generations = self._table.generation[owners]
        return hidden, PendingRoutes.of(owners, generations, positions, recorded)

    @torch.inference_mode()
    def dummy_run(self) -> None:
        """Enqueue a forward pass with one unused token."""
        self._model.dummy_run()

    def check_device(self) -> None:
        """Raises if the model cannot compute even an unused token: the device or the weights are broken."""
        self.dummy_run()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _lora_plan(self, batch: Batch, owners: NDArray[np.intp]) -> LoraPlan | None:
        """The adapters of the batch, whose tokens belong to the slots ``owners``."""
        places = self._adapter_places
        if places is None or not (places[batch.slots] != NO_PLACE).any():
            return None
        wanted = places[owners]
        known, plan = self._last_lora
        if not np.array_equal(known, wanted):
            plan = plan_lora(wanted, self._device)
            self._last_lora = wanted, plan
        return plan

    def _features(self, batch: Batch) -> Features | None:
        """Those of pictures that the batch computes with; pictures are encoded for it."""
        return None if self._media is None else Features.of(self._media.features(batch), self._device)

    def _inputs(
        self, owners: NDArray[np.intp], positions: NDArray[np.int64], *more: NDArray[np.intp]
    ) -> list[Tensor]:
        """int64[T], the batch's tokens: from the histories or, if the host has not read them yet, from the
        device; and ``more`` arrays, all on the device."""
        table = self._table
        history = table.history[owners, positions].astype(np.int64)
        unread = np.flatnonzero((table.in_flight_tokens[owners] > 0) & (positions >= table.length[owners]))
        arrays = history, unread, owners[unread], *more
        tokens, at, senders, *sent = to_device_together(arrays, self._device)
        if len(unread):
            tokens[at] = self._last[senders]
        return [tokens, *sent]

    def _sample(self, hidden: Tensor, sampled: SampledRows, slots: Tensor) -> list[SamplerOutput]:
        """Project and sample a few rows at a time, as logits are large; rows do not depend on each other.
        ``slots``: of the rows, on the device."""
        parts = []
        for first in range(0, len(sampled.slots), self._model.head.rows):
            rows = slice(first, first + self._model.head.rows)
            logits = self._model.head(hidden[rows])
            parts.append(self.sampler.sample(logits, sampled.slots[rows], sampled.length[rows]))
            # streams that got no token end when the batch is settled; until then another one may be launched
            self._last[slots[rows]] = parts[-1].tokens.clamp(min=0)
        return parts

    def _score(
        self, hidden: Tensor, slots: NDArray[np.intp], positions: NDArray[np.int64]
    ) -> PendingPromptLogprobs:
        """Logprobs of the prompt tokens at ``positions``, a few rows at a time like sampled tokens."""
        chosen = self._table.history[slots, positions].astype(np.int64)
        wanted = self._sampling.prompt_logprobs.alternatives[slots]
        parts = []
        for first in range(0, len(slots), self._model.head.rows):
            rows = slice(first, first + self._model.head.rows)
            raw = torch.log_softmax(self._model.head(hidden[rows]), -1)
            own = to_device(chosen[rows], self._device)
            parts.append(top_logprobs(np.arange(len(raw)), raw, own, wanted[rows]).to_host())
        return PendingPromptLogprobs(slots, positions, parts)
