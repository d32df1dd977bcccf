"""A head that is killed and started again with another clock gets its engines of other hosts back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.hosts import Hosts, up
from tests.integration.server import wait_until

PATIENCE_S = 90.0
CLOCK = """
import time
real = time.time_ns
time.time_ns = lambda: real() + {shift_s} * 10**9
"""


@pytest.mark.slow
@pytest.mark.parametrize("shift_s", [-3600, 3600])
def test_an_idle_engine_joins_a_restarted_head_whatever_its_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift_s: int
) -> None:
    hosts = Hosts(tmp_path)
    head, other = hosts.head(local=0), hosts.host(1)
    with other:
        with head:
            wait_until(lambda: up(head) == [1], PATIENCE_S, "the engine being up")
            assert head.complete(max_tokens=5)["usage"]["completion_tokens"] == 5
            head.process.kill()
        (tmp_path / "sitecustomize.py").write_text(CLOCK.format(shift_s=shift_s))
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
        with hosts.head(local=0) as successor:
            wait_until(lambda: up(successor) == [1], PATIENCE_S, "the engine being up again")
            assert successor.complete(max_tokens=5)["usage"]["completion_tokens"] == 5
        assert other.process.poll() is None
