"""What the ``penstock bench`` commands have in common: they measure, print, and write a report."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Never, Protocol, TypeVar


class JsonReport(Protocol):
    """A report."""

    def to_json(self) -> bytes: ...


F = TypeVar("F", bound=JsonReport)


def run_measurement(
    measure: Callable[[Callable[[str], None]], F], render: Callable[[F], str], path: str | None
) -> F | None:
    """Measure with a function to say what goes on, print the findings, write them to ``path`` as JSON.

    None, with the reason on standard error, when nothing could be measured or written.
    """
    from penstock.bench.errors import BenchError

    try:
        with _terminated_as_interrupted():
            findings = measure(lambda line: print(line, file=sys.stderr, flush=True))
        print(render(findings))
        if path is not None:
            Path(path).write_bytes(findings.to_json())
    except (BenchError, OSError) as error:
        print(f"penstock: error: {error}", file=sys.stderr)
        return None
    return findings


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends the measurement as Ctrl-C does: with everything cleaned up."""

    def interrupt(signum: int, frame: FrameType | None) -> Never:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
