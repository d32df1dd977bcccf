"""When an engine process collects garbage: while it has nothing else to do.

A step makes no reference cycles, so reference counting frees what it made; a collection in the middle of
the steps would only walk over what is alive and delay every stream.
"""

import gc

BUSY_LIMIT = 100_000
"""Tracked objects made and not freed since the last collection that are too many even for a busy engine:
about 10 MB of small objects, 5 to 10 ms to walk."""


class IdleCollector:
    """Takes over from Python's own triggers, for the rest of the process's life, with :meth:`start`."""

    def __init__(self) -> None:
        self._clean = True

    def start(self) -> None:
        """Collect what starting up left, and exempt the rest from later collections."""
        gc.collect()
        gc.freeze()
        gc.disable()

    @property
    def due(self) -> bool:
        """Whether there was a step since the last collection."""
        return not self._clean

    def on_step(self) -> None:
        """A step has ended and others follow."""
        self._clean = False

    def on_control(self) -> None:
        """From time to time while steps follow one another: collects when too much has gathered."""
        if gc.get_count()[0] > BUSY_LIMIT:
            gc.collect(0)

    def on_idle(self) -> None:
        """Nothing runs and nothing came for a while."""
        gc.collect(1)
        self._clean = True
