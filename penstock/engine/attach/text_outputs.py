"""Reads the outputs of requests for text: what they have beside tokens, and whether both can be right."""

from __future__ import annotations

import msgspec
import numpy as np

from penstock.engine.attach.arrays import UnreadableArray, read_logprobs
from penstock.engine.attach.output_decoder import DecodedOutputs
from penstock.engine.attach.step_output import StepEvents, VllmCounters, error_of
from penstock.engine.batch.slots import SlotTable
from penstock.wire.arrays import I32
from penstock.wire.frames import FinishReason
from penstock.wire.vllm.messages import PREEMPTED, EngineCoreOutput, EngineLost, VllmFinishReason

FINISHED: dict[int, FinishReason] = {
    VllmFinishReason.LENGTH: FinishReason.LENGTH,
    VllmFinishReason.REPETITION: FinishReason.STOP_TOKEN,
}


class TextOutputs:
    """Of streams in ``table``. ``alternatives``: int32[slots], candidates per token that a slot's stream
    wants; -1: no logprobs."""

    def __init__(self, table: SlotTable, alternatives: I32, vocab_size: int) -> None:
        self._table = table
        self._alternatives = alternatives
        self._vocab_size = vocab_size

    def read(self, decoded: DecodedOutputs, frames: list[memoryview], counts: VllmCounters) -> StepEvents:
        """Raises EngineLost."""
        events = StepEvents()
        try:
            for entry, output in decoded.rare:
                self._read_rare(events, entry, int(decoded.slots[entry]), output, frames, counts)
        except UnreadableArray as error:
            raise EngineLost(f"it sent what cannot be understood: {error}") from None
        self._check_room(decoded)
        self._check_scored(decoded, events)
        return events

    def _read_rare(
        self,
        events: StepEvents,
        entry: int,
        slot: int,
        output: EngineCoreOutput,
        frames: list[memoryview],
        counts: VllmCounters,
    ) -> None:
        """Read the fields of an output beside its tokens. Raises UnreadableArray, EngineLost."""
        if output.finish_reason is not None:
            events.ended.append((entry, _finish(events, entry, output)))
            if output.kv_transfer_params:
                encoded = msgspec.json.encode(output.kv_transfer_params, enc_hook=str)
                events.transfers.append((entry, encoded))
        for event in output.events or ():
            if event.type == PREEMPTED:
                events.preempted.append(entry)
                counts.preemptions += 1
        if output.prefill_stats is not None:
            events.cached.append((entry, output.prefill_stats.num_cached_tokens))
            counts.external_prompt_tokens += output.prefill_stats.num_external_cached_tokens
        wants = self._alternatives[slot] >= 0
        if output.new_logprobs is not None and output.new_token_ids and wants:
            scores = read_logprobs(output.new_logprobs, frames)
            if len(scores.rank) < len(output.new_token_ids):
                raise UnreadableArray("logprobs of fewer tokens than there are")
            events.logprobs.append((entry, scores))
        if output.new_prompt_logprobs is not None:
            prompt = read_logprobs(output.new_prompt_logprobs, frames)
            if len(prompt.rank) >= self._table.prompt_len[slot]:
                raise UnreadableArray("logprobs of more tokens than the prompt has")
            events.prompts.append((entry, prompt))

    def _check_room(self, decoded: DecodedOutputs) -> None:
        """Raises EngineLost for more tokens than were asked for, or than the vocabulary has."""
        table, slots = self._table, decoded.slots
        added = 1 if decoded.count is None else decoded.count
        if np.count_nonzero(table.length[slots] + added > table.end[slots]):
            raise EngineLost("it sent more tokens than a request asked for")
        if np.count_nonzero(decoded.tokens.view(np.uint32) >= self._vocab_size):
            raise EngineLost(
                "it sent a token that the vocabulary does not have: is MODEL the engine's model?"
            )

    def _check_scored(self, decoded: DecodedOutputs, events: StepEvents) -> None:
        """Raises EngineLost for tokens without the logprobs that were asked for."""
        wanting = self._alternatives[decoded.slots] >= 0
        if decoded.count is not None:
            wanting &= decoded.count > 0
        if np.count_nonzero(wanting) != len(events.logprobs):
            raise EngineLost("it sent tokens without the logprobs that were asked for")


def _finish(events: StepEvents, entry: int, output: EngineCoreOutput) -> FinishReason | None:
    """Why an output is its request's last; None: an error. Raises EngineLost for an abort: this side has
    not asked for one, so the engine is shutting down."""
    reason = output.finish_reason
    if reason == VllmFinishReason.STOP:
        return FinishReason.EOS if output.stop_reason is None else FinishReason.STOP_TOKEN
    if reason == VllmFinishReason.ABORT:
        raise EngineLost("it has ended requests by itself: it is shutting down, or was paused")
    found = FINISHED.get(reason or 0)
    if found is None and isinstance(output.error, dict):
        events.errors[entry] = error_of(output.error)
    return found
