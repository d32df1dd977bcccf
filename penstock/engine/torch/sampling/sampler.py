"""The sampler: grammar masks, logit bias, penalties, temperature, min-p, top-k, top-p, and drawing a token.

The whole batch is sampled in one set of tensor operations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from penstock.engine.sampling.metadata import (
    EXCLUDING,
    NO_TOKEN,
    PENALTIES,
    LogitEdits,
    SamplingFeature,
    SamplingMetadata,
    SharedEdits,
)
from penstock.engine.torch.sampling.grammar_mask import TensorRows, apply_token_mask
from penstock.engine.torch.sampling.penalties import TokenCounts, penalize
from penstock.engine.torch.sampling.sampler_output import SamplerOutput, TopLogprobs
from penstock.engine.torch.transfer import to_device, to_device_together
from penstock.wire.arrays import I32

Slots = NDArray[np.intp]
Needs = NDArray[np.uint16]

FEW_CANDIDATES, SOME_CANDIDATES = 64, 1024
"""Numbers of best tokens in which top-k and top-p look for their cutoff, before the whole vocabulary is
sorted. Of 16,384 tokens the 64 best are found in 1/29 of the time of a sort, the 1,024 best in 1/6."""
CUT_LOGITS = 1 << 24
"""Logits that are sorted at once on a device other than a CPU, which takes 36 bytes for each."""
EDITING = SamplingFeature.BIAS | SamplingFeature.BAD_WORDS | SamplingFeature.MIN_TOKENS
BLOCK = 128
"""Tokens whose weights are summed to choose a block, before a token in it is chosen: a third of the work of a
cumulative sum of all weights."""


class Sampler:
    """Samples a token for each of S rows of logits. A step computes only what some row of it needs.

    A row is a slot and a length: its token follows that many tokens of the slot's history, and is the one
    that it would be if the history ended there. Several rows of a slot are those of a draft, whose tokens
    stand behind the history; a draft's rows may be sampled in several calls.

    The order of operations is vLLM's: allowed tokens and grammars, biases and bans, penalties, temperature,
    min-p, top-k, top-p. Logprobs are those of the unmodified logits.

    A row in which constraints exclude every token gets :data:`NO_TOKEN`, which ends its stream.
    """

    def __init__(self, metadata: SamplingMetadata, last: Tensor | None = None) -> None:
        """``last`` int64[slots], on the device: the tokens in flight, of slots that have one; None: no slot
        ever has."""
        self._metadata = metadata
        self._last = last
        self._token_counts = TokenCounts(metadata, last)

    def free(self) -> None:
        """Free what it keeps of streams on the device."""
        self._token_counts.free()

    @torch.inference_mode()
    def sample(self, logits: Tensor, slots: Slots, length: I32, without: int = 0) -> SamplerOutput:
        """A token for each row of ``logits``, float32[S, V], which is changed in place.

        ``length`` int32[S]: of the history that each row's token follows, at least the slot's own and its
        token in flight; a slot with one has one row. The rows of a slot stand next to each other, ``length``
        rising by one from row to row. ``without``: SamplingFeatures that are left out.
        """
        needs = self._metadata.needs_of(slots, length)
        if without:
            needs &= ~np.uint16(without)
        every = int(np.bitwise_or.reduce(needs))
        raw = self._raw_logprobs(logits, needs, every)
        self._edit(logits, slots, length, needs)
        self._penalize(logits, slots, length, needs)
        stuck = self._without_tokens(logits, needs, every)
        tokens = self._choose(logits, slots, length, needs)
        if every & SamplingFeature.THINKING:
            self._end_thinking(tokens, stuck, slots, length, needs)
        candidates = None if raw is None else self._candidates(raw, slots, needs, tokens)
        if stuck is not None:
            tokens.masked_fill_(stuck, NO_TOKEN)
        return SamplerOutput(tokens, candidates)

    # -- changes to logits

    def _edit(self, logits: Tensor, slots: Slots, length: I32, needs: Needs) -> None:
        every = int(np.bitwise_or.reduce(needs))
        if every & SamplingFeature.ALLOWED:
            rows = np.flatnonzero(needs & SamplingFeature.ALLOWED)
            apply_token_mask(logits, rows, self._metadata.allowed(slots[rows]))
        if every & SamplingFeature.GRAMMAR:
            rows = np.flatnonzero(needs & SamplingFeature.GRAMMAR)
            apply_token_mask(logits, rows, self._metadata.grammars.masks(slots[rows], length[rows]))
        if every & EDITING:
            for edits in self._metadata.edits(slots, length, needs):
                if len(edits.token):
                    _add(logits, edits)

    def _penalize(self, logits: Tensor, slots: Slots, length: I32, needs: Needs) -> None:
        every = int(np.bitwise_or.reduce(needs))
        if not every & PENALTIES:
            return
        metadata = self._metadata
        rows = np.flatnonzero(needs & PENALTIES)
        penalized, some = slots[rows], TensorRows(rows, logits)
        chosen = some.select(logits)
        tokens, counts = self._token_counts.counts_of(penalized, length[rows], logits.device)
        values = chosen if tokens is None else chosen.gather(-1, tokens)
        if every & SamplingFeature.REPETITION:
            (repetition,) = _columns(logits, metadata.repetition[penalized])
            penalize(values, counts, repetition=repetition)
        if every & SamplingFeature.OCCURRENCE:
            presence, frequency = _columns(
                logits, metadata.presence[penalized], metadata.frequency[penalized]
            )
            penalize(values, counts, presence=presence, frequency=frequency)
        if tokens is not None:
            chosen.scatter_(-1, tokens, values)  # a token that stands in a row twice has the same value
        some.write_back(logits, chosen)

    def _without_tokens(self, logits: Tensor, needs: Needs, every: int) -> Tensor | None:
        """bool[S]: the rows in which constraints exclude every token, whose logits become finite; None: no
        row has a constraint."""
        if not every & EXCLUDING:
            return None
        some = TensorRows(np.flatnonzero(needs & EXCLUDING), logits)
        stuck = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        some.write_back(stuck, some.select(logits).amax(-1) == -torch.inf)
        logits.masked_fill_(stuck[:, None], 0)
        return stuck

    # -- drawing

    def _choose(self, logits: Tensor, slots: Slots, length: I32, needs: Needs) -> Tensor:
        """int64[S]: the likeliest token for greedy rows, a random one for the others."""
        rows = np.flatnonzero(needs & SamplingFeature.RANDOM)
        if not len(rows):
            return greedy_tokens(logits)
        some = TensorRows(rows, logits)
        drawn = self._draw(some.select(logits), slots[rows], length[rows], needs[rows])
        if len(rows) == len(slots):
            return drawn
        tokens = greedy_tokens(logits)
        some.write_back(tokens, drawn)
        return tokens

    def _draw(self, logits: Tensor, slots: Slots, length: I32, needs: Needs) -> Tensor:
        """int64[n]: inverse transform sampling in vocabulary order, with one uniform number per row.

        ``logits`` become weights in place: 1 for the likeliest token, 0 for tokens that are cut off.
        """
        metadata = self._metadata
        every = int(np.bitwise_or.reduce(needs))
        min_p = np.where(needs & SamplingFeature.MIN_P, metadata.min_p[slots], np.float32(0))
        temperature, least, uniforms = _columns(
            logits, metadata.temperature[slots], min_p, metadata.uniforms(slots, length)
        )
        logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature)
        weights = logits.exp_()
        if every & SamplingFeature.MIN_P:
            weights.masked_fill_(weights < least, 0)
        if every & (SamplingFeature.TOP_K | SamplingFeature.TOP_P):
            rows = np.flatnonzero(needs & (SamplingFeature.TOP_K | SamplingFeature.TOP_P))
            some = TensorRows(rows, weights)
            some.write_back(weights, self._cut_tail(some.select(weights), slots[rows], needs[rows]))
        return sample_from_weights(weights, uniforms)

    def _cut_tail(self, weights: Tensor, slots: Slots, needs: Needs) -> Tensor:
        """Top-k, then top-p: set the weights of all tokens but the smallest set that reaches top_p of the
        top_k best to 0.
        """
        metadata, vocab = self._metadata, weights.shape[-1]
        top_k = np.where(needs & SamplingFeature.TOP_K, metadata.top_k[slots], vocab).astype(np.int64)
        top_p = np.where(needs & SamplingFeature.TOP_P, metadata.top_p[slots], 2.0)
        search = search_step_by_step if weights.device.type == "cpu" else search_at_once
        return weights.masked_fill_(weights < search(weights, top_k, top_p), 0)

    def _end_thinking(
        self, tokens: Tensor, stuck: Tensor | None, slots: Slots, length: I32, needs: Needs
    ) -> None:
        """Put the tokens that end reasoning in place of ``tokens`` where they are due, also in rows that are
        ``stuck``."""
        rows = np.flatnonzero(needs & SamplingFeature.THINKING)
        unread = rows[self._metadata.table.in_flight_tokens[slots[rows]] > 0]
        if len(unread):
            self._end_reopened(tokens, stuck, unread, slots[unread])
        forced = self._metadata.forced_tokens(slots[rows], length[rows])
        due = forced != NO_TOKEN
        if not np.count_nonzero(due):
            return
        at, ends = to_device_together((rows[due], forced[due]), tokens.device)
        tokens[at] = ends
        if stuck is not None:
            stuck[at] = False

    def _end_reopened(self, tokens: Tensor, stuck: Tensor | None, rows: Slots, slots: Slots) -> None:
        """The same for ``rows`` whose last token only the device knows: it may open reasoning anew."""
        openings, ends = self._metadata.thinking.after_openings(slots)
        if self._last is None or not np.count_nonzero(openings != NO_TOKEN):
            return
        arrays = to_device_together((rows, slots, openings, ends), tokens.device)
        at, owners, opening, end = arrays
        opened = (self._last[owners][:, None] == opening).any(-1)
        tokens[at] = torch.where(opened, end, tokens[at])
        if stuck is not None:
            stuck[at] &= ~opened

    # -- logprobs

    def _raw_logprobs(self, logits: Tensor, needs: Needs, every: int) -> Tensor | None:
        if not every & SamplingFeature.LOGPROBS:
            return None
        rows = np.flatnonzero(needs & SamplingFeature.LOGPROBS)
        return torch.log_softmax(TensorRows(rows, logits).select(logits), -1)

    def _candidates(self, raw: Tensor, slots: Slots, needs: Needs, tokens: Tensor) -> TopLogprobs:
        rows = np.flatnonzero(needs & SamplingFeature.LOGPROBS)
        wanted, chosen = self._metadata.logprobs[slots[rows]], TensorRows(rows, tokens).select(tokens)
        is_listed = needs[rows] & SamplingFeature.LISTED_LOGPROBS != 0
        if not np.count_nonzero(is_listed):
            return top_logprobs(rows, raw, chosen, wanted)
        best = top_logprobs(rows, raw, chosen, np.where(is_listed, 0, wanted))
        at = np.flatnonzero(is_listed)
        listed = to_device(self._metadata.listed_logprobs(slots[rows[at]]), raw.device)
        some = TensorRows(at, raw)
        values, ids = some.select(raw).gather(-1, listed), listed
        beyond = (0, max(0, 1 + ids.shape[1] - best.ids.shape[1]))
        all_ids, all_values = pad(best.ids, beyond), pad(best.values, beyond)
        columns = slice(1, 1 + ids.shape[1])
        some.write_back(all_ids[:, columns], ids)
        some.write_back(all_values[:, columns], values)
        return TopLogprobs(rows, wanted, ids=all_ids, values=all_values, rank=best.rank)


def top_logprobs(row: NDArray[np.intp], raw: Tensor, chosen: Tensor, wanted: I32) -> TopLogprobs:
    """From logprobs ``raw`` float32[L, V]: those of each row's ``chosen`` token int64[L], with its rank, and
    of its ``wanted`` best tokens."""
    own = raw.gather(-1, chosen[:, None])
    rank = (raw > own).sum(-1) + 1
    values, ids = _best_tokens(raw, wanted)
    return TopLogprobs(
        row,
        wanted,
        ids=torch.cat((chosen[:, None], ids), -1),
        values=torch.cat((own, values), -1),
        rank=rank,
    )


def _best_tokens(raw: Tensor, wanted: I32) -> tuple[Tensor, Tensor]:
    """float32[L, W] and int64[L, W]: at least the ``wanted`` greatest values of each row, and their tokens.

    Which of equal values are taken depends on their number: it is each row's own.
    """
    numbers = np.unique(wanted).tolist()
    if len(numbers) == 1:
        best = raw.topk(numbers[0], -1)
        return best.values, best.indices
    values = raw.new_zeros((len(raw), numbers[-1]))
    ids = torch.zeros_like(values, dtype=torch.int64)
    for number in numbers:
        rows = to_device(np.flatnonzero(wanted == number), raw.device)
        values[rows, :number], ids[rows, :number] = raw[rows].topk(number, -1)
    return values, ids


def search_step_by_step(weights: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]) -> Tensor:
    """float32[n, 1]: :func:`smallest_kept_weight`. For most rows it is among a few best tokens; for the
    others more are searched, finally all."""
    vocab = weights.shape[-1]
    few = max(
        FEW_CANDIDATES if (top_k > SOME_CANDIDATES).any() else 1,
        int(top_k[top_k <= SOME_CANDIDATES].max(initial=1)),
    )
    least = torch.zeros_like(weights[:, :1])
    rest = np.arange(len(weights))
    needs_all = (top_k > SOME_CANDIDATES) & (top_k < vocab)
    for width in (min(few, vocab), min(SOME_CANDIDATES, vocab), vocab):
        tried = rest[~needs_all[rest]] if width < vocab else rest
        if not len(tried):
            continue
        some = TensorRows(tried, weights)
        value, found = smallest_kept_weight(some.select(weights), top_k[tried], top_p[tried], width)
        some.write_back(least, value)
        if found is None:
            break
        rest = np.setdiff1d(rest, tried[found.numpy()], assume_unique=True)
    return least


def search_at_once(weights: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]) -> Tensor:
    """float32[n, 1]: :func:`smallest_kept_weight`, without waiting for the device to say what is found: among
    as many tokens as the rows with a small top_k need, and among all tokens for the others."""
    vocab = weights.shape[-1]
    least = torch.empty_like(weights[:, :1])
    small = top_k <= min(SOME_CANDIDATES, vocab - 1)
    height = max(1, CUT_LOGITS // vocab)
    for rows, width in (
        (np.flatnonzero(small), int(top_k[small].max(initial=1))),
        (np.flatnonzero(~small), vocab),
    ):
        for first in range(0, len(rows), height):
            part = rows[first : first + height]
            some = TensorRows(part, weights)
            some.write_back(
                least, smallest_kept_weight(some.select(weights), top_k[part], top_p[part], width)[0]
            )
    return least


def smallest_kept_weight(
    weights: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64], width: int
) -> tuple[Tensor, Tensor | None]:
    """The smallest weight that top-k and top-p keep, searched among the ``width`` greatest of float32[n, V].

    Kept are the ``top_k`` greatest weights (V: all), and of these the fewest whose sum reaches the share
    ``top_p`` (above 1: all); ties with the last one are kept too. Returns float32[n, 1] and bool[n], whether
    the weight was found; None: all were. A weight that is found does not depend on ``width``.
    """
    device, vocab = weights.device, weights.shape[-1]
    top = weights.topk(width, -1).values if width < vocab else weights.sort(-1, descending=True).values
    last, share, limited, unlimited = _columns(
        weights, np.minimum(top_k, width) - 1, top_p, (top_k <= width) & (top_k < vocab), top_k == vocab
    )
    least = torch.where(limited, top.gather(-1, last), 0)
    top = top.double()
    if (top_k < width).any():  # by place: of equal weights top_k has only some
        top.masked_fill_(torch.arange(width, device=device) > last, 0)
    reached = top.cumsum(-1)
    whole = reached[:, -1:]
    if (top_k == vocab).any():
        whole = torch.where(limited, whole, _row_sums(weights))
    within = (reached - top < share * whole).sum(-1, keepdim=True) - 1
    least = torch.maximum(least, top.gather(-1, within.clamp(min=0)).float())
    if width == vocab:
        return least, None
    return least, (limited | unlimited & (reached[:, -1:] >= share * whole))[:, 0]


def _row_sums(weights: Tensor) -> Tensor:
    """float64[n, 1]: sums of float32[n, V], each independent of the other rows."""
    return _blocks(weights).sum(-1).double().sum(-1, keepdim=True)


def _blocks(weights: Tensor) -> Tensor:
    """float32[n, blocks, BLOCK]: weights float32[n, V] and zeros."""
    missing = -weights.shape[-1] % BLOCK
    padded = pad(weights, (0, missing)) if missing else weights  # without padding it would copy them as well
    return padded.view(len(weights), -1, BLOCK)


def sample_from_weights(weights: Tensor, uniforms: Tensor) -> Tensor:
    """int64[n]: for each row the token at which the cumulative sum of ``weights`` float32[n, V] exceeds the
    fraction ``uniforms`` float64[n, 1] of the total. Never a token of weight 0, unless all are.
    """
    blocks = _blocks(weights)
    sums = blocks.sum(-1).double()
    totals = sums.cumsum(-1)
    target = uniforms * totals[:, -1:]
    block = torch.searchsorted(totals, target, right=True).clamp(max=totals.shape[-1] - 1)
    before = totals.gather(-1, block) - sums.gather(-1, block)
    inner = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK))[:, 0].double().cumsum(-1)
    # Sums in a different order differ in their last bits: keep the target within the block.
    end = torch.nextafter(inner[:, -1:], inner.new_zeros(()))
    within = torch.searchsorted(inner, torch.minimum((target - before).clamp(min=0), end), right=True)
    return (block * BLOCK + within).clamp(max=weights.shape[-1] - 1)[:, 0]


def greedy_tokens(logits: Tensor) -> Tensor:
    """int64[S]: the arg max, the first of equals. NumPy's is vectorised, PyTorch's on a CPU is not (0.7 ms
    against 10 for 1,024 x 16,384)."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    return torch.from_numpy(logits.numpy().argmax(-1))


def _columns(like: Tensor, *values: NDArray[Any]) -> list[Tensor]:
    """Arrays [n] as tensors [n, 1] on the device of ``like``."""
    return [column[:, None] for column in to_device_together(values, like.device)]


def _add(logits: Tensor, edits: LogitEdits | SharedEdits) -> None:
    # index_put_ would sort the indexes on a GPU, in some twenty kernels, to add up equal ones in order: there
    # are none but for tokens that are excluded twice
    device, vocab = logits.device, logits.shape[-1]
    if isinstance(edits, SharedEdits):
        at, value = to_device_together((edits.token, edits.value), device)
        some = TensorRows(edits.rows, logits)
        some.write_back(logits, some.select(logits).add_(logits.new_zeros(vocab).index_add_(0, at, value)))
        return
    at, value = to_device_together((edits.row * vocab + edits.token, edits.value), device)
    logits.view(-1).index_add_(0, at, value)
