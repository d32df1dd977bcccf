"""What vLLM's core needs from the process around it; no model is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config.errors import ConfigError
from penstock.engine.vllm import internals, process_group
from penstock.engine.vllm.step_output import VllmCounters
from penstock.wire.sockets import ProcessGroupSpec


def test_ranks_learn_where_the_first_one_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in process_group.VARIABLES:
        monkeypatch.setenv(name, "")
    met = []
    for rank in range(2):
        process_group.set_process_group_environment(ProcessGroupSpec(rank, 2, str(tmp_path / "rendezvous")))
        met.append([os.environ[name] for name in process_group.VARIABLES])
    port = met[0][4]
    assert 0 < int(port) < 65536
    assert met == [["2", str(rank), str(rank), "127.0.0.1", port] for rank in range(2)]


@pytest.mark.parametrize(
    ("in_group", "executed", "dummies"),
    [(True, False, 1), (True, True, 0), (False, False, 0), (False, True, 0)],
)
def test_a_step_that_ran_nothing_is_a_dummy_step_for_the_other_ranks(
    in_group: bool, executed: bool, dummies: int
) -> None:
    made: list[str] = []
    alone: Any = internals.VllmCore.__new__(internals.VllmCore)
    alone._failed, alone._in_group, alone.counts = False, in_group, VllmCounters()
    alone._core = SimpleNamespace(
        step_fn=lambda: ({}, executed),
        post_step=lambda executed: None,
        execute_dummy_batch=lambda: made.append("dummy"),
    )
    assert alone.step().ids == []
    assert len(made) == dummies


def test_engines_that_share_experts_are_refused_on_cpus(tmp_path: Path) -> None:
    group = ProcessGroupSpec(0, 2, str(tmp_path / "rendezvous"))
    with pytest.raises(ConfigError, match="--enable-expert-parallel: vLLM's CPU build"):
        internals.VllmCore([], 0, group)


def test_a_lost_worker_ends_the_engine() -> None:
    alone: Any = internals.VllmCore.__new__(internals.VllmCore)
    alone._failed = False
    alone._on_failure()
    assert alone.has_work()
    with pytest.raises(RuntimeError, match="a worker process of vLLM's has ended"):
        alone.step()
