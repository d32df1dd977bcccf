"""Budgets of the keeper in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.errors import ConfigError
from penstock.gateway.admission.budget_store import Charge, MemoryBudgetStore
from penstock.gateway.requests.caller import Budget
from penstock.gateway.workers.budget_state import BudgetState, read_budget_state

DAY, MONTH = Budget.named("tokens-per-day", 100), Budget.named("cost-per-month", 100)


def debts(store: MemoryBudgetStore, month: str = "2026-11") -> list[float]:
    return list(store.reserve_now("a", "r", [Charge(DAY, 0), Charge(MONTH, 0, month)], None).debts)


def test_the_next_gateway_goes_on(tmp_path: Path) -> None:
    """Its clocks are others, and budgets have refilled meanwhile."""
    path = str(tmp_path / "budgets")
    store = MemoryBudgetStore(lambda: 5.0)
    state = BudgetState(path, store, lambda: 1_000_000.0)
    state.save()
    assert not Path(path).exists(), "nothing has changed"
    assert store.reserve_now("a", "r", [Charge(DAY, 50), Charge(MONTH, 30, "2026-11")], None).granted
    state.save()
    following = MemoryBudgetStore(lambda: 77.0)
    BudgetState(path, following, lambda: 1_000_000.0 + 3600.0)
    assert debts(following) == [pytest.approx(86_400 / 2 - 3600), 30]
    assert debts(following, "2026-12")[1] == 0
    assert Path(path).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("text", ["", "{}", '{"full_at":[],"used":[["a","b","c","d"]]}'])
def test_what_is_no_state(tmp_path: Path, text: str) -> None:
    path = tmp_path / "budgets"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"--budget-state-file {path}: it was not written by a gateway"):
        read_budget_state(str(path))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its folder cannot be written"):
        read_budget_state(str(tmp_path / "no" / "budgets"))


def test_a_file_that_cannot_be_written_is_told_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, store = tmp_path / "budgets", MemoryBudgetStore(lambda: 0.0)
    state = BudgetState(str(path), store, lambda: 0.0)
    store.settle("a", "r", [Charge(MONTH, 3, "2026-11")], counted=False)
    path.mkdir()
    state.save()
    assert f"--budget-state-file {path} cannot be written" in caplog.text
    assert [each.name for each in tmp_path.iterdir()] == ["budgets"]
    path.rmdir()
    state.save()
    assert read_budget_state(str(path)).used == [("a", "cost-per-month", "2026-11", 3)]
