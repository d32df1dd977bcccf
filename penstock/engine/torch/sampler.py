"""The sampler: grammar masks, logit bias, penalties, temperature, min-p, top-k, top-p, and drawing a token.

The whole batch is sampled in one set of tensor operations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.sampling.metadata import (
    EXCLUDING,
    NO_TOKEN,
    PENALTIES,
    LogitEdits,
    SamplingFeature,
    SamplingMetadata,
    SharedEdits,
)
from penstock.engine.torch.grammar_mask import apply_token_mask, put_rows, row_indexes, select_rows
from penstock.engine.torch.penalties import TokenCounts, penalize
from penstock.engine.torch.sampler_output import SamplerOutput, TopLogprobs
from penstock.wire.arrays import I32

Slots = NDArray[np.intp]
Needs = NDArray[np.uint16]

FEW_CANDIDATES, SOME_CANDIDATES = 64, 1024
"""Numbers of best tokens in which top-k and top-p look for their cutoff, before the whole vocabulary is
sorted. Of 16,384 tokens the 64 best are found in 1/29 of the time of a sort, the 1,024 best in 1/6."""
EDITING = SamplingFeature.BIAS | SamplingFeature.BAD_WORDS | SamplingFeature.MIN_TOKENS
BLOCK = 128
"""Tokens whose weights are summed to choose a block, before a token in it is chosen: a third of the work of a
cumulative sum of all weights."""


class Sampler:
    """Samples one token for each of S slots. A step computes only what some row of it needs.

    The order of operations is vLLM's: allowed tokens and grammars, biases and bans, penalties, temperature,
    min-p, top-k, top-p. Logprobs are those of the unmodified logits.

    A row in which constraints exclude every token gets :data:`NO_TOKEN`, which ends its stream.
    """

    def __init__(self, metadata: SamplingMetadata) -> None:
        self._metadata = metadata
        self._token_counts = TokenCounts(metadata)

    @torch.inference_mode()
    def sample(self, logits: Tensor, slots: Slots) -> SamplerOutput:
        """A token for each row of ``logits``, float32[S, V], which is changed in place."""
        needs = self._metadata.needs_of(slots)
        every = int(np.bitwise_or.reduce(needs))
        raw = self._raw_logprobs(logits, needs, every)
        self._edit(logits, slots, needs, every)
        self._penalize(logits, slots, needs, every)
        stuck = self._without_tokens(logits, needs, every)
        tokens = self._choose(logits, slots, needs)
        candidates = None if raw is None else self._candidates(raw, slots, needs, tokens)
        if stuck is not None:
            tokens.masked_fill_(stuck, NO_TOKEN)
        return SamplerOutput(tokens, candidates)

    # -- changes to logits

    def _edit(self, logits: Tensor, slots: Slots, needs: Needs, every: int) -> None:
        if every & SamplingFeature.ALLOWED:
            rows = np.flatnonzero(needs & SamplingFeature.ALLOWED)
            apply_token_mask(logits, rows, self._metadata.allowed(slots[rows]))
        if every & SamplingFeature.GRAMMAR:
            rows = np.flatnonzero(needs & SamplingFeature.GRAMMAR)
            apply_token_mask(logits, rows, self._metadata.grammars.masks(slots[rows]))
        if every & EDITING:
            for edits in self._metadata.edits(slots, needs):
                _add(logits, edits)

    def _penalize(self, logits: Tensor, slots: Slots, needs: Needs, every: int) -> None:
        if not every & PENALTIES:
            return
        metadata = self._metadata
        rows = np.flatnonzero(needs & PENALTIES)
        penalized = slots[rows]
        chosen = select_rows(logits, rows)
        tokens, counts = self._token_counts.counts_of(penalized, logits.device)
        values = chosen if tokens is None else chosen.gather(-1, tokens)
        if every & SamplingFeature.REPETITION:
            penalize(values, counts, repetition=_column(metadata.repetition[penalized], logits))
        if every & SamplingFeature.OCCURRENCE:
            penalize(
                values,
                counts,
                presence=_column(metadata.presence[penalized], logits),
                frequency=_column(metadata.frequency[penalized], logits),
            )
        if tokens is not None:
            chosen.scatter_(-1, tokens, values)  # a token that is listed twice has the same value
        put_rows(logits, rows, chosen)

    def _without_tokens(self, logits: Tensor, needs: Needs, every: int) -> Tensor | None:
        """bool[S]: the rows in which constraints exclude every token, whose logits become finite; None: no
        row has a constraint."""
        if not every & EXCLUDING:
            return None
        rows = np.flatnonzero(needs & EXCLUDING)
        chosen = select_rows(logits, rows)
        stuck = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        stuck[row_indexes(rows, logits)] = chosen.amax(-1) == -torch.inf
        logits.masked_fill_(stuck[:, None], 0)
        return stuck

    # -- drawing

    def _choose(self, logits: Tensor, slots: Slots, needs: Needs) -> Tensor:
        """int64[S]: the likeliest token for greedy rows, a random one for the others."""
        rows = np.flatnonzero(needs & SamplingFeature.RANDOM)
        if not len(rows):
            return greedy_tokens(logits)
        drawn = self._draw(select_rows(logits, rows), slots[rows], needs[rows])
        if len(rows) == len(slots):
            return drawn
        tokens = greedy_tokens(logits)
        tokens[row_indexes(rows, logits)] = drawn
        return tokens

    def _draw(self, logits: Tensor, slots: Slots, needs: Needs) -> Tensor:
        """int64[n]: inverse transform sampling in vocabulary order, with one uniform number per row.

        ``logits`` become weights in place: 1 for the likeliest token, 0 for tokens that are cut off.
        """
        metadata = self._metadata
        every = int(np.bitwise_or.reduce(needs))
        logits.sub_(logits.amax(-1, keepdim=True)).div_(_column(metadata.temperature[slots], logits))
        weights = logits.exp_()
        if every & SamplingFeature.MIN_P:
            share = np.where(needs & SamplingFeature.MIN_P, metadata.min_p[slots], 0)
            weights.masked_fill_(weights < _column(share, logits), 0)
        if every & (SamplingFeature.TOP_K | SamplingFeature.TOP_P):
            rows = np.flatnonzero(needs & (SamplingFeature.TOP_K | SamplingFeature.TOP_P))
            chosen = select_rows(weights, rows)
            put_rows(weights, rows, self._cut_tail(chosen, slots[rows], needs[rows]))
        uniforms = torch.from_numpy(metadata.uniforms(slots)).to(logits.device)
        return sample_from_weights(weights, uniforms[:, None])

    def _cut_tail(self, weights: Tensor, slots: Slots, needs: Needs) -> Tensor:
        """Top-k, then top-p: set the weights of all tokens but the smallest set that reaches top_p of the
        top_k best to 0.

        For most rows the cutoff is among a few best tokens; for the others more are searched, finally all.
        """
        metadata, vocab = self._metadata, weights.shape[-1]
        top_k = np.where(needs & SamplingFeature.TOP_K, metadata.top_k[slots], vocab).astype(np.int64)
        top_p = np.where(needs & SamplingFeature.TOP_P, metadata.top_p[slots], 2.0)
        few = max(
            FEW_CANDIDATES if (top_k > SOME_CANDIDATES).any() else 1,
            int(top_k[top_k <= SOME_CANDIDATES].max(initial=1)),
        )
        least = torch.zeros_like(weights[:, :1])
        rest = np.arange(len(weights))
        for width in (few, SOME_CANDIDATES, vocab):
            value, found = smallest_kept_weight(
                select_rows(weights, rest), top_k[rest], top_p[rest], min(width, vocab)
            )
            least[row_indexes(rest, weights)] = value
            rest = rest[~found.cpu().numpy()]
            if not len(rest):
                break
        return weights.masked_fill_(weights < least, 0)

    # -- logprobs

    def _raw_logprobs(self, logits: Tensor, needs: Needs, every: int) -> Tensor | None:
        if not every & SamplingFeature.LOGPROBS:
            return None
        return torch.log_softmax(select_rows(logits, np.flatnonzero(needs & SamplingFeature.LOGPROBS)), -1)

    def _candidates(self, raw: Tensor, slots: Slots, needs: Needs, tokens: Tensor) -> TopLogprobs:
        rows = np.flatnonzero(needs & SamplingFeature.LOGPROBS)
        wanted = self._metadata.logprobs[slots[rows]]
        chosen = select_rows(tokens, rows)
        return top_logprobs(rows, raw, chosen, wanted)


def top_logprobs(row: NDArray[np.intp], raw: Tensor, chosen: Tensor, wanted: I32) -> TopLogprobs:
    """From logprobs ``raw`` float32[L, V]: those of each row's ``chosen`` token int64[L], with its rank, and
    of its ``wanted`` best tokens."""
    most = int(wanted.max())
    own = raw.gather(-1, chosen[:, None])
    rank = (raw > own).sum(-1) + 1
    values, ids = raw.topk(most, -1) if most else (raw[:, :0], chosen[:, None][:, :0])
    return TopLogprobs(
        row,
        wanted,
        ids=torch.cat((chosen[:, None], ids), -1),
        values=torch.cat((own, values), -1),
        rank=rank,
    )


def smallest_kept_weight(
    weights: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64], width: int
) -> tuple[Tensor, Tensor]:
    """The smallest weight that top-k and top-p keep, searched among the ``width`` greatest of float32[n, V].

    Kept are the ``top_k`` greatest weights, and of these the fewest whose sum reaches the share ``top_p``
    (above 1: all); ties with the last one are kept too. Returns float32[n, 1] and bool[n], whether the
    weight was found.
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
    """int64[n]: for each row the token at which the cumulative sum of ``weights`` float32[n, V] exceeds the
    fraction ``uniforms`` float64[n, 1] of the total. Never a token of weight 0, unless all are.
    """
    vocab = weights.shape[-1]
    blocks = torch.nn.functional.pad(weights, (0, -vocab % BLOCK)).view(len(weights), -1, BLOCK)
    totals = blocks.sum(-1).double().cumsum(-1)
    target = uniforms * totals[:, -1:]
    block = torch.searchsorted(totals, target, right=True).clamp(max=totals.shape[-1] - 1)
    before = totals.gather(-1, block) - blocks.sum(-1).double().gather(-1, block)
    inner = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK))[:, 0].double().cumsum(-1)
    # Sums in a different order differ in their last bits: keep the target within the block.
    end = torch.nextafter(inner[:, -1:], inner.new_zeros(()))
    within = torch.searchsorted(inner, torch.minimum((target - before).clamp(min=0), end), right=True)
    return (block * BLOCK + within).clamp(max=vocab - 1)[:, 0]


def greedy_tokens(logits: Tensor) -> Tensor:
    """int64[S]: the arg max, the first of equals. NumPy's is vectorised, PyTorch's on a CPU is not (0.7 ms
    against 10 for 1,024 x 16,384)."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    return torch.from_numpy(logits.numpy().argmax(-1))


def _column(values: NDArray[Any], like: Tensor) -> Tensor:
    """float32[n, 1] on the device of ``like``."""
    return torch.from_numpy(values.astype(np.float32)).to(like.device)[:, None]


def _add(logits: Tensor, edits: LogitEdits | SharedEdits) -> None:
    token = torch.from_numpy(edits.token).to(logits.device)
    value = torch.from_numpy(edits.value).to(logits.device)
    if isinstance(edits, SharedEdits):
        change = logits.new_zeros(logits.shape[-1]).index_put_((token,), value, accumulate=True)
        put_rows(logits, edits.rows, select_rows(logits, edits.rows).add_(change))
        return
    row = torch.from_numpy(edits.row).to(logits.device)
    logits.index_put_((row, token), value, accumulate=True)
