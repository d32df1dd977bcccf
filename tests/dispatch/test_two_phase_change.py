"""Every way that a change of two engines can go."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations, product

from penstock.dispatch.engine_rpc import Receipt
from penstock.dispatch.two_phase_change import Outcome, Stage, TwoPhaseChange

Event = tuple[str, Callable[[TwoPhaseChange], None]]

PREPARED: list[list[Event]] = [
    [
        (f"prepared {rank}", lambda change, rank=rank: change.prepared(Receipt(rank, 0, 1))),  # type: ignore[misc]
        (f"earlier {rank}", lambda change, rank=rank: change.prepared(Receipt(rank, 0, 1, True))),  # type: ignore[misc]
        (f"fails {rank}", lambda change, rank=rank: change.prepared(Receipt(rank, 0, error="no"))),  # type: ignore[misc]
        (
            f"conflicts {rank}",
            lambda change, rank=rank: change.prepared(Receipt(rank, 0, error="no", code="conflict")),  # type: ignore[misc]
        ),
    ]
    for rank in (0, 1)
]
COMMITTED: list[list[Event]] = [
    [
        (f"made {rank}", lambda change, rank=rank: change.committed(Receipt(rank, 0, 2))),  # type: ignore[misc]
        (f"not made {rank}", lambda change, rank=rank: change.committed(Receipt(rank, 0, error="no"))),  # type: ignore[misc]
    ]
    for rank in (0, 1)
]
DECIDED: list[Event] = [
    ("won", lambda change: change.decided(won=True)),
    ("lost", lambda change: change.decided(won=False)),
]
ADOPTED: Event = ("adopted", lambda change: change.adopted())
EXPIRED: Event = ("expired", lambda change: change.expired())


def runs() -> set[tuple[Event, ...]]:
    """Each thing happens once at most, in any order, whole or in part; then the time is up."""
    found = set()
    for one, two, decided, first, second in product(*PREPARED, DECIDED, *COMMITTED):
        for order in permutations((one, two, decided, first, second, ADOPTED)):
            names = [name for name, _ in order]
            # an engine is asked to commit after the decision, and answers no question before it is asked
            if min(names.index(first[0]), names.index(second[0])) > names.index(decided[0]):
                found |= {(*order[:length], EXPIRED) for length in range(7)}
    return found


def test_every_run_ends_with_an_outcome_that_is_true() -> None:
    outcomes = set()
    for run in runs():
        change = TwoPhaseChange([0, 1])
        happened: set[str] = set()
        for name, event in run:
            if change.stage is Stage.DONE:
                break
            event(change)
            happened.add(name)
        assert change.stage is Stage.DONE, happened
        check(change, happened)
        outcomes.add(change.outcome)
    assert outcomes == set(Outcome)


def check(change: TwoPhaseChange, happened: set[str]) -> None:
    receipts = change.receipts()
    assert [receipt.rank for receipt in receipts] == [0, 1]
    failed = [receipt for receipt in receipts if receipt.error is not None]
    earlier = any(receipt.repeated for receipt in receipts)
    match change.outcome:
        case Outcome.DONE if earlier:
            assert change.must_abort  # what an engine that does not remember has prepared
        case Outcome.DONE:
            assert {"won", "made 0", "made 1", "adopted"} <= happened
            assert not failed
        case Outcome.PARTIAL:
            assert "won" in happened
            assert failed or "adopted" not in happened
        case Outcome.ABORTED | Outcome.CONFLICT:
            assert "won" not in happened
            assert all(receipt.error is not None or receipt.repeated for receipt in receipts)
        case Outcome.UNDECIDED:
            assert {"prepared 0", "prepared 1", "expired"} <= happened
            assert not {"won", "lost"} & happened
            assert len(failed) == 2
    if change.must_abort:
        assert "won" not in happened


def test_receipts_of_a_change_that_was_given_up() -> None:
    change = TwoPhaseChange([0, 1, 2])
    change.prepared(Receipt(0, 0, 5))
    change.prepared(Receipt(2, 0, error="no room"))
    assert change.outcome is Outcome.ABORTED
    assert [(receipt.step, receipt.code, receipt.error) for receipt in change.receipts()] == [
        (None, "aborted", "it was prepared, but the change was given up"),
        (None, "aborted", "it was not waited for: the change was given up"),
        (None, "", "no room"),
    ]


def test_an_engine_that_does_not_remember() -> None:
    change = TwoPhaseChange([0, 1])
    change.prepared(Receipt(0, 0, 5, True))
    change.prepared(Receipt(1, 1, 0))
    assert (change.outcome, change.must_abort) == (Outcome.DONE, True)
    assert [(receipt.repeated, receipt.code) for receipt in change.receipts()] == [
        (True, ""),
        (False, "restarted"),
    ]
