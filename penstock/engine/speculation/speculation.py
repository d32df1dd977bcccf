"""Speculative decoding: drafts of several tokens per stream, which the model verifies in one step.

The sampler is a function of (logits, seed, position). Every position of a draft is sampled, and the draft is
accepted while it equals the samples, so the output is the output without speculation, token for token.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.engine.batch.slots import SlotTable
from penstock.engine.sampling.metadata import SamplingFeature, SamplingMetadata
from penstock.engine.speculation.draft_control import DraftControl
from penstock.engine.speculation.proposer import Proposer
from penstock.wire.arrays import I32

Slots = NDArray[np.intp]

MAX_FORCED = 32
"""Tokens of a draft that a grammar forces, unless a number of tokens is set. They are accepted whatever the
load: each saves a step."""
MAX_EMPTY_PROPOSALS = 4
"""Steps in a row without a draft after which one step of two looks for none, after twice as many two of
three, and so on."""
MAX_BACKOFF_STEPS = 7
"""Steps in a row that look for no draft. A stream that begins to repeat itself is noticed that much later."""


class Speculation:
    """Drafts of the running streams, and what became of them."""

    def __init__(
        self, table: SlotTable, sampling: SamplingMetadata, proposer: Proposer, tokens: int | None
    ) -> None:
        """``tokens``: the most draft tokens per stream and step; None: chosen by acceptance and load."""
        self._table = table
        self._sampling = sampling
        self._proposer = proposer
        self._control = DraftControl(table.size, tokens)
        self._most_forced = MAX_FORCED if tokens is None else tokens
        self.limit = np.zeros(table.size, np.int32)
        """int32[slots]: draft tokens that the next step may verify, as :meth:`plan` has set it."""
        self._free_limit = np.zeros(table.size, np.int32)
        """int32[slots]: draft tokens that the next step may verify where no grammar forces them."""
        self._forced = np.zeros(table.size, np.bool_)
        """Slots whose draft is what their grammar forces."""
        self._has_drafts = False
        """Whether the step that is being scheduled has drafts."""
        self._can_back_off = tokens is None
        self._empty_proposals = 0
        """Steps in a row that looked for drafts, and used none."""
        self._backoff_steps = 0
        """Steps that are still to look for none, except where a grammar forces one."""
        self._backs_off = False
        self.is_idle = False
        """Whether the next step has no draft."""

        # -- counters
        self.drafts = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.accepted_at = np.zeros(max(self._control.most, self._most_forced), np.int64)
        """int64[positions]: accepted tokens by their position in the draft."""

    # -- streams come and go

    def begin(self, slot: int, scope: int = 0) -> None:
        """A stream has been given the slot, with its sampling parameters and its history. ``scope``, int64:
        drafts come from streams of the same one alone."""
        self._control.begin(slot)
        self._empty_proposals //= 2
        self._backoff_steps = 0
        self._forced[slot] = False
        self._proposer.begin(slot, scope)

    def restart(self, slot: int) -> None:
        """The stream was given KV blocks, at its beginning or after a preemption."""
        self._proposer.restart(slot)

    def end(self, slot: int) -> None:
        """The stream leaves the slot."""
        self._proposer.end(slot)

    def reset(self) -> None:
        """Forget the outputs of earlier streams."""
        self._proposer.reset()

    # -- the step

    def plan(self, slots: Slots) -> None:
        """Set ``limit`` of slots that may decode, and ``is_idle``."""
        structured = self._has_grammar(slots)
        self._backs_off = self._backoff_steps > 0
        self.is_idle = self._backs_off and not np.count_nonzero(structured)
        self._control.on_scheduled(drafts=self._has_drafts)
        self._has_drafts = False
        if self._backs_off:
            self._backoff_steps -= 1
            self._free_limit[slots] = self.limit[slots] = 0
            if self.is_idle:
                return
        else:
            limits = self._free_limit[slots] = self.limit[slots] = self._control.limits(slots)
            if not np.count_nonzero(limits):
                self._note(False)
        self.limit[slots[structured]] = self._most_forced

    def propose(self, slots: Slots, most: I32) -> I32:
        """Write up to ``most`` int32[n] tokens behind each history, whose tokens are all on the host. Returns
        int32[n], how many."""
        structured = np.flatnonzero(self._has_grammar(slots) & (most > 0))
        if not len(structured):
            return self._if_worth(slots, self._ask(slots, most))
        limits = most.copy()
        limits[structured] = np.minimum(most[structured], self._free_limit[slots[structured]])
        counts = self._ask(slots, limits)
        grammars = self._sampling.grammars
        for row in structured.tolist():
            slot = int(slots[row])
            forced = grammars.forced_tokens(slot)[: int(most[row])]
            self._forced[slot] = bool(forced)
            start = int(self._table.length[slot])
            if forced:
                self._table.history[slot, start : start + len(forced)] = forced
                counts[row] = len(forced)
            elif counts[row]:
                draft = self._table.history[slot, start : start + int(counts[row])].tolist()
                counts[row] = grammars.count_valid(slot, draft)
        if not self._forced[slots].any():
            return self._if_worth(slots, counts)
        self._has_drafts = True
        return counts

    def _if_worth(self, slots: Slots, counts: I32) -> I32:
        """The part of ``counts`` that is worth a step with drafts."""
        counts = self._control.worthwhile(slots, counts)
        self._has_drafts = bool(np.count_nonzero(counts))
        if not self._backs_off:
            self._note(self._has_drafts)
        return counts

    def _note(self, found: bool) -> None:
        """The step that is being scheduled has drafts, or has none."""
        self._empty_proposals = 0 if found else self._empty_proposals + 1
        if self._can_back_off:
            self._backoff_steps = min(self._empty_proposals // MAX_EMPTY_PROPOSALS, MAX_BACKOFF_STEPS)

    def _ask(self, slots: Slots, most: I32) -> I32:
        """The proposer's drafts, for the slots that may have one."""
        asked = np.flatnonzero(most)
        if len(asked) == len(slots):
            return self._proposer.propose(slots, most)
        counts = np.zeros(len(slots), np.int32)
        if len(asked):
            counts[asked] = self._proposer.propose(slots[asked], most[asked])
        return counts

    def _has_grammar(self, slots: Slots) -> NDArray[np.bool_]:
        structured: NDArray[np.bool_] = self._sampling.needs[slots] & SamplingFeature.GRAMMAR != 0
        return structured

    def on_verified(self, slots: Slots, drafted: I32, accepted: I32) -> None:
        """Count a step's drafts: int32[n] tokens that were drafted, and how many of them were accepted."""
        if not np.count_nonzero(drafted):
            return
        forced = self._forced[slots]
        if np.count_nonzero(forced):
            self._forced[slots] = False
            self._control.on_verified(slots[~forced], drafted[~forced], accepted[~forced])
        else:
            self._control.on_verified(slots, drafted, accepted)
        self.drafts += int(np.count_nonzero(drafted))
        self.draft_tokens += int(drafted.sum())
        self.accepted_tokens += int(accepted.sum())
        reached = np.bincount(accepted, minlength=len(self.accepted_at) + 1)[::-1].cumsum()[::-1]
        self.accepted_at += reached[1:]

    def observe(self, seconds: float, tokens: int, generated: int, *, drafts: bool) -> None:
        """A step without prompts took ``seconds`` for ``tokens`` tokens, and ``generated`` of them stay.
        ``drafts``: it had some."""
        if self._backs_off and not drafts:
            return
        self._control.observe(seconds, tokens, generated, drafts=drafts)

    def metrics(self) -> dict[str, float]:
        """The counters, as :meth:`penstock.engine.base.Engine.metrics` names them."""
        counters: dict[str, float] = {
            "spec_decode_drafts_total": self.drafts,
            "spec_decode_draft_tokens_total": self.draft_tokens,
            "spec_decode_accepted_tokens_total": self.accepted_tokens,
        }
        used = np.flatnonzero(self.accepted_at)
        for position, count in enumerate(self.accepted_at[: used[-1] + 1 if len(used) else 0].tolist()):
            counters[f"spec_decode_accepted_tokens_per_pos_total/{position}"] = count
        return counters
