"""``make test-all``: which targets it runs, and what it says of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.packaging.conftest import ROOT

MAKEFILE = r"""
good:
	@echo '...... [100%]'; echo '40 passed, 2 skipped, 1 warning in 3.20s'
twice:
	@echo '1 failed, 2 passed in 0.11s'; echo '===== 3 passed, 1 error in 62.00s (0:01:02) ====='; exit 1
broken:
	@echo 'no such package'; exit 3
"""


def run(tmp_path: Path, *targets: str) -> tuple[int, list[list[str]]]:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    ended = subprocess.run(
        [sys.executable, ROOT / "scripts" / "test_all.py", *targets],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "==> make good" in ended.stdout
    table = ended.stdout.partition("\ntarget ")[2].splitlines()
    return ended.returncode, [line.split() for line in table[1:]]


def test_a_target_that_fails_does_not_keep_the_others_from_running(tmp_path: Path) -> None:
    status, rows = run(tmp_path, "twice", "broken", "good")
    assert status == 1
    assert [[*row[:4], row[5]] for row in rows] == [
        ["twice", "5", "2", "0", "2"],
        ["broken", "0", "0", "0", "2"],
        ["good", "40", "0", "2", "0"],
    ]


def test_all_is_well(tmp_path: Path) -> None:
    assert run(tmp_path, "good")[0] == 0


def test_every_target_with_tests_is_among_them() -> None:
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^(test(?:-\w+)?):", text, re.MULTILINE)) - {"test-slow", "test-all"}
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg")):
        targets -= {"test-gpu"}
    command = ["make", "--no-print-directory", "-n", "test-all"]  # this may run within make
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    listed = told.stdout.partition("test_all.py ")[2].split()
    assert sorted(listed) == sorted(targets)
    assert "test" in listed
