"""From logits to tokens: the whole batch in one set of tensor operations."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...wire.frames import I32, Logprobs
from ..sampling import Edits, Need, SamplingColumns

Slots = NDArray[np.intp]


class Sampler:
    """Samples one token for each of S slots. A step pays only for what some row of it asked for.

    The order of operations is vLLM's: allowed tokens, bans and biases, penalties, temperature, min-p, top-k,
    top-p. Logprobs are those of the unmodified logits.
    """

    def __init__(self, columns: SamplingColumns) -> None:
        self._columns = columns

    @torch.inference_mode()
    def sample(self, logits: Tensor, slots: Slots) -> tuple[I32, Logprobs | None]:
        """logits float32[S, V], changed in place. Returns int32[S] and the logprobs that were asked for."""
        needs = self._columns.needs_of(slots)
        every = Need(int(np.bitwise_or.reduce(needs)))
        raw = self._raw_logprobs(logits, needs, every)
        self._edit(logits, slots, needs, every)
        self._penalize(logits, slots, needs, every)
        tokens = best(logits)
        if every & Need.RANDOM:
            rows = np.flatnonzero(needs & Need.RANDOM)
            tokens[_indexes(rows, logits)] = self._draw(logits, slots[rows], rows, needs[rows])
        sampled: I32 = tokens.to("cpu", torch.int32).numpy()
        if raw is None:
            return sampled, None
        return sampled, self._logprobs(raw, slots, needs, sampled)

    # -- changes to logits

    def _edit(self, logits: Tensor, slots: Slots, needs: NDArray[np.uint16], every: Need) -> None:
        if every & Need.ALLOWED:
            rows = np.flatnonzero(needs & Need.ALLOWED)
            allowed = torch.from_numpy(self._columns.allowed(slots[rows])).to(logits.device)
            at = _indexes(rows, logits)
            logits[at] = logits[at].masked_fill(~allowed, -torch.inf)
        if every & Need.BIAS:
            rows = np.flatnonzero(needs & Need.BIAS)
            _add(logits, rows, self._columns.biases(slots[rows]))
        if every & (Need.BAD_WORDS | Need.MIN_TOKENS):
            rows = np.flatnonzero(needs & (Need.BAD_WORDS | Need.MIN_TOKENS))
            _add(logits, rows, self._columns.bans(slots[rows]))

    def _penalize(self, logits: Tensor, slots: Slots, needs: NDArray[np.uint16], every: Need) -> None:
        """Repetition: tokens of prompt and output. Presence and frequency: tokens of the output."""
        columns, table = self._columns, self._columns.table
        if every & Need.REPETITION:
            rows = np.flatnonzero(needs & Need.REPETITION)
            seen = self._counts(rows, slots, np.zeros(table.size, np.int32), logits) > 0
            penalty = _column(columns.repetition[slots[rows]], logits)
            at = _indexes(rows, logits)
            chosen = logits[at]
            punished = torch.where(chosen > 0, chosen / penalty, chosen * penalty)
            logits[at] = torch.where(seen, punished, chosen)
        if every & Need.OCCURRENCE:
            rows = np.flatnonzero(needs & Need.OCCURRENCE)
            counts = self._counts(rows, slots, table.base, logits)
            at = _indexes(rows, logits)
            frequency = _column(columns.frequency[slots[rows]], logits)
            presence = _column(columns.presence[slots[rows]], logits)
            logits[at] -= frequency * counts + presence * (counts > 0)

    def _counts(self, rows: NDArray[np.intp], slots: Slots, start: I32, logits: Tensor) -> Tensor:
        """float32[n, V]: how often each token stands in the histories from ``start[slot]`` on."""
        table = self._columns.table
        pieces = [table.history[slot, start[slot] : table.length[slot]] for slot in slots[rows].tolist()]
        row = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
        flat = row * logits.shape[1] + np.concatenate(pieces)
        counts = np.bincount(flat, minlength=len(pieces) * logits.shape[1]).astype(np.float32)
        return torch.from_numpy(counts).to(logits.device).view(len(pieces), -1)

    # -- drawing

    def _draw(
        self, logits: Tensor, slots: Slots, rows: NDArray[np.intp], needs: NDArray[np.uint16]
    ) -> Tensor:
        """int64[n]: inverse of the cumulative distribution, in vocabulary order, at one uniform each."""
        columns = self._columns
        every = Need(int(np.bitwise_or.reduce(needs)))
        scaled = logits[_indexes(rows, logits)] / _column(columns.temperature[slots], logits)
        if every & Need.MIN_P:
            share = _column(np.where(needs & Need.MIN_P, columns.min_p[slots], 0), logits)
            probabilities = torch.softmax(scaled, -1)
            least = share * probabilities.amax(-1, keepdim=True)
            scaled = scaled.masked_fill(probabilities < least, -torch.inf)
        cut = np.flatnonzero(needs & (Need.TOP_K | Need.TOP_P))
        if len(cut):
            at = _indexes(cut, logits)
            scaled[at] = self._cut_tail(scaled[at], slots[cut], needs[cut])
        cumulative = torch.softmax(scaled, -1, dtype=torch.float64).cumsum(-1)
        uniforms = torch.from_numpy(columns.uniforms(slots)).to(logits.device)
        target = uniforms[:, None] * cumulative[:, -1:]
        return torch.searchsorted(cumulative, target, right=True)[:, 0]

    def _cut_tail(self, scaled: Tensor, slots: Slots, needs: NDArray[np.uint16]) -> Tensor:
        """Keep the top_k best tokens, and of those the fewest whose probabilities reach top_p."""
        columns, vocab = self._columns, scaled.shape[1]
        ordered, places = scaled.sort(stable=True, dim=-1, descending=True)
        top_k = np.where(needs & Need.TOP_K, columns.top_k[slots], vocab)
        rank = torch.arange(vocab, device=scaled.device)
        limit = torch.from_numpy(top_k.astype(np.int64)).to(scaled.device)[:, None]
        ordered = ordered.masked_fill(rank >= limit, -torch.inf)
        probabilities = torch.softmax(ordered, -1, dtype=torch.float64)
        before = probabilities.cumsum(-1) - probabilities
        top_p = _column(np.where(needs & Need.TOP_P, columns.top_p[slots], 2.0), scaled)
        ordered = ordered.masked_fill(before >= top_p, -torch.inf)
        return torch.full_like(scaled, -torch.inf).scatter(-1, places, ordered)

    # -- logprobs

    def _raw_logprobs(self, logits: Tensor, needs: NDArray[np.uint16], every: Need) -> Tensor | None:
        if not every & Need.LOGPROBS:
            return None
        return torch.log_softmax(logits[_indexes(np.flatnonzero(needs & Need.LOGPROBS), logits)], -1)

    def _logprobs(self, raw: Tensor, slots: Slots, needs: NDArray[np.uint16], sampled: I32) -> Logprobs:
        rows = np.flatnonzero(needs & Need.LOGPROBS)
        wanted = self._columns.logprobs[slots[rows]]
        most = int(wanted.max())
        chosen = torch.from_numpy(sampled[rows].astype(np.int64)).to(raw.device)[:, None]
        own = raw.gather(-1, chosen)
        rank = (raw > own).sum(-1) + 1
        values, ids = raw.topk(most, -1) if most else (raw[:, :0], chosen[:, :0])
        all_ids = torch.cat((chosen, ids), -1).cpu().numpy().astype(np.int32)
        all_values = torch.cat((own, values), -1).cpu().numpy().astype(np.float32)
        beyond = np.arange(most + 1) > wanted[:, None]
        all_ids[beyond] = -1
        all_values[beyond] = -np.inf
        return Logprobs(rows.astype(np.int32), all_ids, all_values, rank.cpu().numpy().astype(np.int32))


def best(logits: Tensor) -> Tensor:
    """int64[S]: the first of the largest. NumPy's arg max is vectorised, PyTorch's on a CPU is not (0.7 ms
    against 10 for 1,024 x 16,384)."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    return torch.from_numpy(logits.numpy().argmax(-1))


def _indexes(rows: NDArray[np.intp], like: Tensor) -> Tensor:
    return torch.from_numpy(rows).to(like.device)


def _column(values: NDArray[Any], like: Tensor) -> Tensor:
    """float32[n, 1] on the device of ``like``."""
    return torch.from_numpy(values.astype(np.float32)).to(like.device)[:, None]


def _add(logits: Tensor, rows: NDArray[np.intp], edits: Edits) -> None:
    row = torch.from_numpy(rows[edits.row]).to(logits.device)
    token = torch.from_numpy(edits.token).to(logits.device)
    value = torch.from_numpy(edits.value).to(logits.device)
    logits.index_put_((row, token), value, accumulate=True)
