"""State machine of one two-phase commit over all engines, in the API server that coordinates it, without I/O.

    PREPARE ──all engines prepared──► DECIDE ──supervisor decided──► COMMIT ──all engines committed──► ADOPT
       │                                │                              │                                 │
       │ one has failed                 │ another change decided first │ one has failed  all API servers │
       ▼                                ▼                              ▼                 have adopted it ▼
    ABORTED                          CONFLICT                       PARTIAL                            DONE

The engines are the participants. The supervisor records the decision: before that nothing has changed,
whichever process dies; after that every API server, also one that starts later, asks every engine to commit
until it has, also engines that start later. So a change is partial only while an engine does not answer.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from penstock.dispatch.engine_rpc import Receipt
from penstock.wire.messages import CONFLICT


class Stage(enum.Enum):
    """The phase whose answers the change waits for."""

    PREPARE = enum.auto()
    DECIDE = enum.auto()
    COMMIT = enum.auto()
    ADOPT = enum.auto()
    DONE = enum.auto()


class Outcome(enum.Enum):
    """How a change ended."""

    DONE = "done"
    ABORTED = "aborted"
    """Not decided; preparations are undone."""
    CONFLICT = "conflict"
    """Not decided: another change was in progress, or the key was used for something else."""
    UNDECIDED = "undecided"
    """The supervisor has not answered in time; engines commit or abort when it does."""
    PARTIAL = "partial"
    """Decided; engines or API servers that have not confirmed it yet are asked until they do."""


class TwoPhaseChange:
    """Takes receipts and decisions as events; ``stage`` and ``outcome`` tell its state."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.stage = Stage.PREPARE
        self.outcome: Outcome | None = None
        """Set with DONE."""
        self._ranks = tuple(ranks)
        self._receipts: dict[int, Receipt] = {}
        """By rank: answers to PREPARE, then to COMMIT."""
        self._made_earlier = self._adopted = False

    @property
    def must_abort(self) -> bool:
        """Whether it ended without a decision and none can follow: engines must undo their preparations."""
        return self._made_earlier or self.outcome in (Outcome.ABORTED, Outcome.CONFLICT)

    def receipts(self) -> list[Receipt]:
        """One per engine, ordered by rank; final with DONE."""
        return [self._receipt(rank) for rank in self._ranks]

    # -- events

    def prepared(self, receipt: Receipt) -> None:
        """An engine's answer to PREPARE."""
        if self.stage is not Stage.PREPARE:
            return
        self._receipts[receipt.rank] = receipt
        if receipt.error is not None:
            self._end(Outcome.CONFLICT if receipt.code == CONFLICT else Outcome.ABORTED)
        elif len(self._receipts) == len(self._ranks):
            self._made_earlier = any(receipt.repeated for receipt in self._receipts.values())
            if self._made_earlier:
                self._end(Outcome.DONE)
            else:
                self.stage = Stage.DECIDE

    def decided(self, *, won: bool) -> None:
        """The supervisor decided. ``won``: for this change, maybe as another API server proposed it with the
        same key; otherwise for another change of the same state."""
        if self.stage not in (Stage.PREPARE, Stage.DECIDE):
            return
        if won:
            self.stage = Stage.COMMIT
            self._receipts.clear()
        else:
            self._end(Outcome.CONFLICT)

    def committed(self, receipt: Receipt) -> None:
        """An engine's answer to COMMIT."""
        if self.stage is not Stage.COMMIT:
            return
        self._receipts[receipt.rank] = receipt
        if len(self._receipts) == len(self._ranks):
            if any(receipt.error is not None for receipt in self._receipts.values()):
                self._end(Outcome.PARTIAL)
            elif self._adopted:
                self._end(Outcome.DONE)
            else:
                self.stage = Stage.ADOPT

    def adopted(self) -> None:
        """Every API server applies the change."""
        self._adopted = True
        if self.stage is Stage.ADOPT:
            self._end(Outcome.DONE)

    def expired(self) -> None:
        """The timeout is over."""
        match self.stage:
            case Stage.PREPARE:
                self._end(Outcome.ABORTED)
            case Stage.DECIDE:
                self._end(Outcome.UNDECIDED)
            case Stage.COMMIT | Stage.ADOPT:
                self._end(Outcome.PARTIAL)

    # -- the end

    def _end(self, outcome: Outcome) -> None:
        self.stage, self.outcome = Stage.DONE, outcome

    def _receipt(self, rank: int) -> Receipt:
        receipt = self._receipts.get(rank)
        if receipt is None:
            if self.outcome is Outcome.PARTIAL:
                return Receipt(rank, error="it has not made the change in time", code="timeout")
            return Receipt(rank, error="it was not waited for: the change was given up", code="aborted")
        if receipt.error is not None or receipt.repeated or self.outcome in (None, Outcome.DONE):
            if self._made_earlier and not receipt.repeated:
                return _without(receipt, "it was started again since the change was made", "restarted")
            return receipt
        if self.outcome is Outcome.UNDECIDED:
            return _without(receipt, "it is prepared, and the decision is not known", "undecided")
        if self.outcome is Outcome.PARTIAL:
            return receipt
        return _without(receipt, "it was prepared, but the change was given up", "aborted")


def _without(receipt: Receipt, error: str, code: str) -> Receipt:
    return msgspec.structs.replace(receipt, step=None, error=error, code=code)
