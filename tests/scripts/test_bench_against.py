"""The comparison of two commits, without servers."""

from __future__ import annotations

import re
import sys

from scripts.bench_against import ROOT, WORKLOADS, log_line, python_of, ratios, shown


def test_turns_change_who_begins_and_give_ratios() -> None:
    calls = list[str]()

    def costing(name: str, seconds: list[float]) -> float:
        calls.append(name)
        return seconds.pop(0)

    ours, theirs = [9.0, 1.0, 2.0, 3.0], [9.0, 2.0, 2.0, 4.0]
    found = ratios(lambda: costing("here", ours), lambda: costing("there", theirs), 3)
    assert found == [0.5, 1.0, 0.75]
    assert calls[2:] == ["there", "here", "here", "there", "there", "here"], "after a turn each of warm-up"
    assert shown(found) == "0.75 (0.50–1.00)"


def test_the_line_of_the_log_has_its_four_columns() -> None:
    line = log_line("3f72652b", {"short requests": [0.5, 0.6, 0.7]}, 3)
    assert re.fullmatch(r"\| \d{4}-\d\d-\d\d \| .* \| .* \| Measured \|", line)
    assert "REF=3f72652b" in line
    assert "short requests 0.60 (0.50–0.70)" in line


def test_every_workload_is_one_that_the_bench_takes() -> None:
    for workload in WORKLOADS:
        assert workload.config(quick=False).requests_per_round == workload.requests
        assert workload.config(quick=True).requests_per_round < workload.requests


def test_a_tree_with_the_same_packages_runs_in_this_environment() -> None:
    assert python_of(ROOT) == sys.executable
