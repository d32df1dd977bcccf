from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.engine.loop.profiler import EngineProfiler
from tests.engine.loop.test_inbox import FakeEngine


class Recorded(FakeEngine):
    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        if method == "stop_profile":
            path = Path(f"{arguments['path']}.prof")
            path.touch()
            return str(path)
        return None


def test_files_do_not_collide(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "there"
    for expected in ("engine-3-1-0.prof", "engine-3-1-1.prof"):
        recording = EngineProfiler(Recorded(), str(directory), rank=3, epoch=1)
        recording.start()
        assert recording.stop() == {"path": str(directory / expected)}


def test_one_at_a_time(tmp_path: Path) -> None:
    recording = EngineProfiler(Recorded(), str(tmp_path), rank=0, epoch=0)
    with pytest.raises(ValueError, match="no profile is being recorded"):
        recording.stop()
    recording.start()
    with pytest.raises(ValueError, match="engine-0-0-0"):
        recording.start()
