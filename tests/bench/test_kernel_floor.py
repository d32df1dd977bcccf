"""The C floor compiles, measures, ends."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock.bench import kernel_floor
from penstock.bench.errors import BenchError
from penstock.bench.kernel_floor import KernelFloor

pytestmark = pytest.mark.usefixtures("few_sends")
needs_compiler = pytest.mark.skipif(shutil.which(kernel_floor.COMPILER) is None, reason="no C compiler")


@needs_compiler
def test_it_reports_sends_per_cpu_second() -> None:
    with KernelFloor() as floor:
        assert floor.available
        results = floor.measure(20, 200, times=3, seconds=20.0)
    assert len(results) == 3
    # A send costs more than 0.1 and less than 1,000 microseconds on any machine.
    assert all(1_000 < result < 10_000_000 for result in results)


@needs_compiler
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
def test_it_does_the_sends_it_says_and_leaves_no_process() -> None:
    with KernelFloor() as floor:
        sends, cpu_us = map(int, floor._run(["20", "70000", "7", "3", "20"], 20.0).split())
    assert sends == 420
    assert cpu_us > 0
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(floor._directory.name.encode() in command for command in running)
    assert not Path(floor._directory.name).exists()


@needs_compiler
def test_it_ends_by_itself_in_time() -> None:
    with KernelFloor() as floor, pytest.raises(BenchError, match="failed with exit code -14"):  # SIGALRM
        floor._run(["2", "100000", "2000000000", "1", "1"], 20.0)


@needs_compiler
def test_a_failure_says_why() -> None:
    with KernelFloor() as floor, pytest.raises(BenchError, match="exit code 1: usage: "):
        floor._run(["1"], 20.0)


@needs_compiler
def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho no headers >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(kernel_floor, "COMPILER", str(compiler))
    with pytest.raises(BenchError, match="no headers"):
        KernelFloor().__enter__()


def test_no_compiler_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with KernelFloor() as floor:
        assert not floor.available
