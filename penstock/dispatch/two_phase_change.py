"""A change that all engines make or none, as the API server sees it that was asked for it, without I/O.

    PREPARE ──every engine is prepared──► DECIDE ──the supervisor notes it──► COMMIT ──every engine has made
       │                                    │                                   │     it──► ADOPT ──every
       │ one is not                         │ another change was faster         │           API server acts by
       ▼                                    ▼                                   │           it──► DONE
    ABORTED                              CONFLICT                           one has not: PARTIAL

The decision is the supervisor's note: before it nothing has changed, whoever dies; after it every API server,
also one that is started later, has engines make the change until they have, also those that are started
later. So nothing is ever half-done for good, only for as long as an engine does not answer.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from penstock.dispatch.engine_rpc import Receipt
from penstock.wire.messages import CONFLICT


class Stage(enum.Enum):
    """What is waited for."""

    PREPARE = enum.auto()
    DECIDE = enum.auto()
    COMMIT = enum.auto()
    ADOPT = enum.auto()
    DONE = enum.auto()


class Outcome(enum.Enum):
    DONE = "done"
    ABORTED = "aborted"
    """Not decided, and undone."""
    CONFLICT = "conflict"
    """Not decided, as another change was on its way or its key had been used for something else."""
    UNDECIDED = "undecided"
    """The supervisor did not say in time; it is made or undone when it does."""
    PARTIAL = "partial"
    """Decided; some engines or API servers have not confirmed yet, and are asked until they do."""


class TwoPhaseChange:
    """Fed with receipts and decisions; says in ``stage`` what it waits for, and in the end the outcome."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.stage = Stage.PREPARE
        self.outcome: Outcome | None = None
        """With DONE."""
        self._ranks = tuple(ranks)
        self._receipts: dict[int, Receipt] = {}
        """Of PREPARE, then of COMMIT."""
        self._made_earlier = self._adopted = False

    @property
    def must_abort(self) -> bool:
        """It ended without a decision, and none can come: what engines hold for it is of no use."""
        return self._made_earlier or self.outcome in (Outcome.ABORTED, Outcome.CONFLICT)

    def receipts(self) -> list[Receipt]:
        """One of each engine, in order of rank; final with DONE."""
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
        """The supervisor has noted this change, also if another API server proposed it by the same key, or
        another one of the same state before it."""
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
        """Every API server acts by it."""
        self._adopted = True
        if self.stage is Stage.ADOPT:
            self._end(Outcome.DONE)

    def expired(self) -> None:
        """The time is up."""
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
