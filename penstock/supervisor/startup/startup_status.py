"""How far the first start is, as ``/ready`` tells it while the model loads."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from penstock.wire.control import Progress

PREPARING = "preparing the model"
STARTING = "starting processes"
STOPPING = "stopping"
SERVING = "serving"


@dataclass(frozen=True, slots=True)
class StartupReport:
    """A state of the start; its fields are those of ``/ready``."""

    phase: str
    progress: float | None
    """Completed share of the phase, 0 to 1; None if unknown."""
    engines_ready: int | None
    """None if unknown, as on a machine of a cluster, which knows its own process alone."""
    engines: int


class StartupStatus:
    """Collects the progress of the children; the main thread writes it, and any thread may read ``report``,
    which is replaced as a whole."""

    def __init__(
        self, engines: int, started_at: float | None = None, *, engines_ready: int | None = 0
    ) -> None:
        """``engines`` start on this host, or by this supervisor. ``started_at``: time.monotonic()."""
        self.started_at = time.monotonic() if started_at is None else started_at
        self._engines = engines
        self._progress: dict[str, Progress] = {}
        self.report = StartupReport(PREPARING, None, engines_ready, engines)

    def set_phase(self, phase: str) -> None:
        """The server as a whole is in this phase: before it starts processes, and when it stops."""
        self._progress.clear()
        self.report = replace(self.report, phase=phase, progress=None)

    def progress(self, process: str, progress: Progress) -> None:
        """A child, such as ``engine 0``, reports progress, with the text "ready" at last."""
        self._progress[process] = progress
        ready = {name for name, each in self._progress.items() if each.text == "ready"}
        loading = [name for name in self._progress if name not in ready]
        if not loading:
            return
        # Engines take longest; the phase is that of the one that is least far.
        least = min(loading, key=lambda name: (not _is_engine(name), self._progress[name].fraction or 0.0))
        self.report = StartupReport(
            phase=self._progress[least].text,
            progress=self._progress[least].fraction,
            engines_ready=sum(map(_is_engine, ready)),
            engines=self._engines,
        )


def _is_engine(process: str) -> bool:
    return process.startswith("engine ")
