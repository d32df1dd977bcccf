"""Starts and stops an engine's profiler (``--profile-dir``), and names the profile files."""

from __future__ import annotations

from pathlib import Path

from penstock.engine.base import Engine


class EngineProfiler:
    """Files are ``engine-RANK-EPOCH-NUMBER``; the engine records the profile and adds the suffix."""

    def __init__(self, engine: Engine, directory: str, rank: int, epoch: int) -> None:
        self._engine = engine
        self._directory = Path(directory)
        self._stem = f"engine-{rank}-{epoch}"
        self._path: Path | None = None

    def start(self) -> None:
        """Raises ValueError while a profile is being recorded, OSError when the directory cannot be made."""
        if self._path is not None:
            raise ValueError(f"a profile is being recorded for {self._path}")
        self._directory.mkdir(parents=True, exist_ok=True)
        taken = {path.stem for path in self._directory.glob(f"{self._stem}-*")}
        number = next(number for number in range(len(taken) + 1) if f"{self._stem}-{number}" not in taken)
        self._engine.call("start_profile", {})
        self._path = self._directory / f"{self._stem}-{number}"

    def stop(self) -> dict[str, str]:
        """Write the file; returns its path. Raises ValueError when no profile is being recorded."""
        if self._path is None:
            raise ValueError("no profile is being recorded")
        path, self._path = self._path, None
        return {"path": str(self._engine.call("stop_profile", {"path": str(path)}))}
