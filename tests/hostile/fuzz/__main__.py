"""``python -m tests.hostile.fuzz TARGET [--seconds S] [--corpus DIR]``, run from a checkout.

Guided by coverage where the package ``atheris`` is installed (it is no dependency), otherwise with random
inputs. An input that fails is written to the directory ``--findings`` and ends the run with a traceback; once
the fault is repaired, it goes to ``tests/hostile/fuzz/findings/TARGET/``, which the tests run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import itertools
import logging
import sys
import tempfile
import time
from pathlib import Path

from tests.hostile.fuzz.mutation import MAX_BYTES, mutated

try:
    import atheris  # type: ignore[import-not-found]
except ImportError:
    atheris = None


def _guided(name: str, seconds: float, corpus: Path, findings: Path) -> None:
    with atheris.instrument_imports(include=["penstock"]):
        targets = importlib.import_module("tests.hostile.fuzz.targets")
    target = targets.TARGETS[name]
    for at, seed in enumerate([*target.seeds, *(path.read_bytes() for path in target.findings(name))]):
        (corpus / f"seed-{at}").write_bytes(seed)
    options = [
        f"-max_total_time={seconds:.0f}",
        f"-max_len={MAX_BYTES}",
        "-timeout=20",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={findings}/", str(corpus)], target.run)
    atheris.Fuzz()  # ends the process


def _random(name: str, seconds: float, findings: Path) -> None:
    targets = importlib.import_module("tests.hostile.fuzz.targets")
    target = targets.TARGETS[name]
    end = time.monotonic() + seconds
    for count, data in zip(itertools.count(1), mutated(target.seeds, time.time_ns()), strict=False):
        try:
            target.run(data)
        except Exception:
            path = findings / hashlib.sha256(data).hexdigest()[:16]
            path.write_bytes(data)
            print(f"{name}: the input in {path} fails", file=sys.stderr)
            raise
        if time.monotonic() > end:
            print(f"{name}: {count:,} inputs, no failure; install atheris for a search guided by coverage")
            return


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.fuzz", description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--corpus", type=Path, help="directory of inputs that is kept between runs")
    parser.add_argument("--findings", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    options.findings.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        corpus = options.corpus or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        corpus.mkdir(parents=True, exist_ok=True)
        if atheris is None:
            _random(options.target, options.seconds, options.findings)
        else:
            _guided(options.target, options.seconds, corpus, options.findings)


if __name__ == "__main__":
    main()
