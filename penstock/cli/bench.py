"""``penstock bench host``: measures and prints."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Never

from penstock.cli.command import Command
from penstock.config.bench import OF_STARTED_SERVER, BenchHostConfig
from penstock.config.errors import ConfigError
from penstock.config.origins import Origins


def run(config: BenchHostConfig, origins: Origins) -> int:
    """Measure, print the report, write it to ``--json``. 1 when requests failed or nothing could be measured.

    Raises ConfigError for options of a server that is not started here.
    """
    from penstock.bench import report
    from penstock.bench.errors import BenchError
    from penstock.bench.host import measure

    _check(config, origins)
    try:
        with _terminated_as_interrupted():
            result = measure(config, lambda line: print(line, file=sys.stderr, flush=True))
        print(report.render(result))
        if config.json is not None:
            Path(config.json).write_bytes(result.to_json())
    except (BenchError, OSError) as error:
        print(f"penstock: error: {error}", file=sys.stderr)
        return 1
    return 1 if result.errors else 0


def _check(config: BenchHostConfig, origins: Origins) -> None:
    if config.url is None:
        return
    for name in OF_STARTED_SERVER:
        if name in origins and origins[name].source == "command line":
            raise ConfigError(f"{origins[name]} is for a server that is started, it has no effect with --url")


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


COMMAND = Command(("bench", "host"), "Measure what an API server costs the host.", BenchHostConfig, run)
