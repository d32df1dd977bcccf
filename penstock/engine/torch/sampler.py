"""From logits to tokens: the whole batch in one set of tensor operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.sampling.metadata import PENALTIES, LogitEdits, SamplingFeature, SamplingMetadata
from penstock.engine.torch.penalties import TokenCounts, penalize
from penstock.engine.torch.sampler_output import SamplerOutput, TopLogprobs
from penstock.wire.arrays import I32

Slots = NDArray[np.intp]
Needs = NDArray[np.uint16]

FEW_CANDIDATES, SOME_CANDIDATES = 64, 1024
"""Tokens among which top-k and top-p look for their tail before they sort the whole vocabulary. Of 16,384
tokens the 64 best are found in 1/29 of the time that sorting takes, the 1,024 best in 1/6."""
BLOCK = 128
"""Tokens whose weights are summed before one of the sums is chosen, then a token in it: a third of the
work of the cumulative sum of all weights."""


class Sampler:
    """Samples one token for each of S slots. A step pays only for what some row of it asked for.

    The order of operations is vLLM's: allowed tokens and grammars, biases and bans, penalties, temperature,
    min-p, top-k, top-p. Logprobs are those of the unmodified logits.
    """

    def __init__(self, columns: SamplingMetadata) -> None:
        self._columns = columns
        self._occurrences = TokenCounts(columns)

    @torch.inference_mode()
    def sample(self, logits: Tensor, slots: Slots) -> SamplerOutput:
        """A token for each of float32[S, V] ``logits``, which are changed in place."""
        needs = self._columns.needs_of(slots)
        every = SamplingFeature(int(np.bitwise_or.reduce(needs)))
        raw = self._raw_logprobs(logits, needs, every)
        self._edit(logits, slots, needs, every)
        self._penalize(logits, slots, needs, every)
        tokens = self._choose(logits, slots, needs)
        return SamplerOutput(tokens, None if raw is None else self._candidates(raw, slots, needs, tokens))

    # -- changes to logits

    def _edit(self, logits: Tensor, slots: Slots, needs: Needs, every: SamplingFeature) -> None:
        if every & SamplingFeature.ALLOWED:
            rows = np.flatnonzero(needs & SamplingFeature.ALLOWED)
            _keep(logits, rows, self._columns.allowed(slots[rows]))
        if every & SamplingFeature.GRAMMAR:
            rows = np.flatnonzero(needs & SamplingFeature.GRAMMAR)
            _keep(logits, rows, self._columns.grammars.masks(slots[rows]))
        if every & SamplingFeature.BIAS:
            rows = np.flatnonzero(needs & SamplingFeature.BIAS)
            _add(logits, rows, self._columns.logit_biases(slots[rows]))
        if every & (SamplingFeature.BAD_WORDS | SamplingFeature.MIN_TOKENS):
            rows = np.flatnonzero(needs & (SamplingFeature.BAD_WORDS | SamplingFeature.MIN_TOKENS))
            _add(logits, rows, self._columns.banned_tokens(slots[rows]))

    def _penalize(self, logits: Tensor, slots: Slots, needs: Needs, every: SamplingFeature) -> None:
        if not every & PENALTIES:
            return
        columns = self._columns
        rows = np.flatnonzero(needs & PENALTIES)
        punished = slots[rows]
        chosen = _rows(logits, rows)
        penalize(
            chosen,
            *self._occurrences.counts_of(punished, logits.device),
            _column(columns.repetition[punished], logits),
            _column(columns.presence[punished], logits),
            _column(columns.frequency[punished], logits),
        )
        _put(logits, rows, chosen)

    # -- drawing

    def _choose(self, logits: Tensor, slots: Slots, needs: Needs) -> Tensor:
        """int64[S]: the likeliest token of greedy rows, a drawn one of the others."""
        rows = np.flatnonzero(needs & SamplingFeature.RANDOM)
        if not len(rows):
            return greedy_tokens(logits)
        drawn = self._draw(_rows(logits, rows), slots[rows], needs[rows])
        if len(rows) == len(slots):
            return drawn
        tokens = greedy_tokens(logits)
        tokens[_indexes(rows, logits)] = drawn
        return tokens

    def _draw(self, logits: Tensor, slots: Slots, needs: Needs) -> Tensor:
        """int64[n]: inverse of the cumulative distribution, in vocabulary order, at one uniform each.

        ``logits`` become weights in place: 1 for the likeliest token, 0 for what the parameters cut off.
        """
        columns = self._columns
        every = SamplingFeature(int(np.bitwise_or.reduce(needs)))
        logits.sub_(logits.amax(-1, keepdim=True)).div_(_column(columns.temperature[slots], logits))
        weights = logits.exp_()
        if every & SamplingFeature.MIN_P:
            share = np.where(needs & SamplingFeature.MIN_P, columns.min_p[slots], 0)
            weights.masked_fill_(weights < _column(share, logits), 0)
        if every & (SamplingFeature.TOP_K | SamplingFeature.TOP_P):
            rows = np.flatnonzero(needs & (SamplingFeature.TOP_K | SamplingFeature.TOP_P))
            chosen = _rows(weights, rows)
            _put(weights, rows, self._cut_tail(chosen, slots[rows], needs[rows]))
        return sample_from_weights(
            weights, torch.from_numpy(columns.uniforms(slots)).to(logits.device)[:, None]
        )

    def _cut_tail(self, weights: Tensor, slots: Slots, needs: Needs) -> Tensor:
        """Weights of the top_k best tokens, and of those the fewest that reach top_p; 0 for the others.

        Most rows end among a few candidates; for the others more are looked at, at last all.
        """
        columns, vocab = self._columns, weights.shape[-1]
        top_k = np.where(needs & SamplingFeature.TOP_K, columns.top_k[slots], vocab).astype(np.int64)
        top_p = np.where(needs & SamplingFeature.TOP_P, columns.top_p[slots], 2.0)
        few = max(
            FEW_CANDIDATES if (top_k > SOME_CANDIDATES).any() else 1,
            int(top_k[top_k <= SOME_CANDIDATES].max(initial=1)),
        )
        least = torch.zeros_like(weights[:, :1])
        rest = np.arange(len(weights))
        for width in (few, SOME_CANDIDATES, vocab):
            value, found = smallest_kept_weight(
                _rows(weights, rest), top_k[rest], top_p[rest], min(width, vocab)
            )
            least[_indexes(rest, weights)] = value
            rest = rest[~found.cpu().numpy()]
            if not len(rest):
                break
        return weights.masked_fill_(weights < least, 0)

    # -- logprobs

    def _raw_logprobs(self, logits: Tensor, needs: Needs, every: SamplingFeature) -> Tensor | None:
        if not every & SamplingFeature.LOGPROBS:
            return None
        return torch.log_softmax(_rows(logits, np.flatnonzero(needs & SamplingFeature.LOGPROBS)), -1)

    def _candidates(self, raw: Tensor, slots: Slots, needs: Needs, tokens: Tensor) -> TopLogprobs:
        rows = np.flatnonzero(needs & SamplingFeature.LOGPROBS)
        wanted = self._columns.logprobs[slots[rows]]
        chosen = _rows(tokens, rows)
        return top_logprobs(rows, raw, chosen, wanted)


def top_logprobs(row: NDArray[np.intp], raw: Tensor, chosen: Tensor, wanted: I32) -> TopLogprobs:
    """Of logprobs float32[L, V] ``raw``: each row's ``chosen`` token int64[L], and ``wanted`` best ones."""
    most = int(wanted.max())
    own = raw.gather(-1, chosen[:, None])
    rank = (raw > own).sum(-1) + 1
    values, ids = raw.topk(most, -1) if most else (raw[:, :0], chosen[:, None][:, :0])
    return TopLogprobs(row, wanted, torch.cat((chosen[:, None], ids), -1), torch.cat((own, values), -1), rank)


def smallest_kept_weight(
    weights: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64], width: int
) -> tuple[Tensor, Tensor]:
    """float32[n, 1]: the least weight among the ``top_k`` greatest, and of these the fewest with a share
    of ``top_p`` (above 1: all), looked for among the ``width`` greatest of float32[n, V]; and bool[n],
    whether it was found there. Tokens as likely as the last one kept are kept, too.
    """
    device, vocab = weights.device, weights.shape[-1]
    top = weights.topk(width, -1).values if width < vocab else weights.sort(-1, descending=True).values
    last = torch.from_numpy(np.minimum(top_k, width) - 1).to(device)[:, None]
    least = top.gather(-1, last)
    limited = torch.from_numpy(top_k <= width).to(device)[:, None]
    share = torch.from_numpy(top_p).to(device)[:, None]
    top = top.double().masked_fill_(limited & (top < least), 0)
    reached = top.cumsum(-1)
    whole = torch.where(limited, reached[:, -1:], weights.sum(-1, keepdim=True).double())
    within = (reached - top < share * whole).sum(-1, keepdim=True) - 1
    least = torch.maximum(torch.where(limited, least, 0), top.gather(-1, within.clamp(min=0)).float())
    return least, (limited | (reached[:, -1:] >= share * whole))[:, 0]


def sample_from_weights(weights: Tensor, uniforms: Tensor) -> Tensor:
    """int64[n]: for each row the token at which the cumulative sum of float32[n, V] ``weights`` passes
    ``uniforms`` float64[n, 1] of the whole; a token without weight never is, where another has some.
    """
    vocab = weights.shape[-1]
    blocks = torch.nn.functional.pad(weights, (0, -vocab % BLOCK)).view(len(weights), -1, BLOCK)
    totals = blocks.sum(-1).double().cumsum(-1)
    target = uniforms * totals[:, -1:]
    block = torch.searchsorted(totals, target, right=True).clamp(max=totals.shape[-1] - 1)
    before = totals.gather(-1, block) - blocks.sum(-1).double().gather(-1, block)
    inner = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK))[:, 0].double().cumsum(-1)
    # Sums made in another order differ in their last bits: the target stays within the block.
    end = torch.nextafter(inner[:, -1:], inner.new_zeros(()))
    within = torch.searchsorted(inner, torch.minimum((target - before).clamp(min=0), end), right=True)
    return (block * BLOCK + within).clamp(max=vocab - 1)[:, 0]


def greedy_tokens(logits: Tensor) -> Tensor:
    """int64[S]: the first of the largest. NumPy's arg max is vectorised, PyTorch's on a CPU is not (0.7 ms
    against 10 for 1,024 x 16,384)."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    return torch.from_numpy(logits.numpy().argmax(-1))


def _indexes(rows: NDArray[np.intp], like: Tensor) -> Tensor:
    return torch.from_numpy(rows).to(like.device)


def _rows(logits: Tensor, rows: NDArray[np.intp]) -> Tensor:
    """The rows, ascending; ``logits`` itself when these are all."""
    return logits if len(rows) == len(logits) else logits[_indexes(rows, logits)]


def _put(logits: Tensor, rows: NDArray[np.intp], changed: Tensor) -> None:
    """Write back what :func:`_rows` gave."""
    if changed is not logits:
        logits[_indexes(rows, logits)] = changed


def _column(values: NDArray[Any], like: Tensor) -> Tensor:
    """float32[n, 1] on the device of ``like``."""
    return torch.from_numpy(values.astype(np.float32)).to(like.device)[:, None]


def _add(logits: Tensor, rows: NDArray[np.intp], edits: LogitEdits) -> None:
    row = torch.from_numpy(rows[edits.row]).to(logits.device)
    token = torch.from_numpy(edits.token).to(logits.device)
    value = torch.from_numpy(edits.value).to(logits.device)
    logits.index_put_((row, token), value, accumulate=True)


def _keep(logits: Tensor, rows: NDArray[np.intp], masks: NDArray[np.uint8]) -> None:
    """Only tokens whose bit is set stay possible; ``masks`` uint8[n, ceil(V/8)]."""
    packed = torch.from_numpy(masks).to(logits.device)
    bit = torch.tensor([1 << place for place in range(8)], dtype=torch.uint8, device=logits.device)
    closed = (packed[:, :, None] & bit == 0).view(len(packed), -1)[:, : logits.shape[-1]]
    chosen = _rows(logits, rows)
    _put(logits, rows, chosen.masked_fill_(closed, -torch.inf))
