from __future__ import annotations

from penstock.http.receive_budget import ReceiveBudget


class Connection:
    def __init__(self, budget: ReceiveBudget) -> None:
        self.receiving = True
        self.refused = False
        self._budget = budget

    def on_over_budget(self) -> None:
        self.refused = True

    def hold(self, size: int) -> None:
        self._budget.hold(self, size)


def test_the_largest_incomplete_request_makes_room() -> None:
    budget = ReceiveBudget(100)
    small, large, complete = [Connection(budget) for _ in range(3)]
    complete.receiving = False
    complete.hold(50)
    small.hold(10)
    large.hold(30)
    assert not budget.full
    small.hold(21)
    assert [each.refused for each in (small, large, complete)] == [False, True, False]
    assert budget.held == 71


def test_the_newcomer_is_refused_where_all_others_are_complete() -> None:
    budget = ReceiveBudget(100)
    complete, late = Connection(budget), Connection(budget)
    complete.receiving = False
    complete.hold(100)
    assert budget.full
    late.hold(1)
    assert (late.refused, complete.refused) == (True, False)
    complete.hold(0)
    assert (budget.held, budget.full) == (0, False)
