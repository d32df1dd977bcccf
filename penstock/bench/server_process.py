"""Starts a server for one measurement."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

from penstock.bench.errors import BenchError
from penstock.config.bench import BenchHostConfig
from penstock.config.introspect import PREFIX
from penstock.supervisor.startup.model_resolution import DEMO_DIR

SHOWN_LINES = 20
"""Last lines of the server's output that an error shows."""
END_SECONDS = 10.0
"""Time for the server to exit before it is killed, in seconds."""
BASE_MODEL_LEN = 2048
SLOW_MODEL_LEN = 32768
"""With slow readers, whose streams must outlast the measurement."""
BASE_SLOTS = 1024
ATTACH = "127.0.0.1:0"
"""Where attached engines connect: a free port, which the server's log tells."""

_URL = re.compile(r"^\s*URL\s+(https?://\S+?)/v1\b")
_READY = re.compile(r"^ready in ")


class ServerProcess:
    """``penstock serve`` or ``penstock gateway`` with all its processes; use it as a context.

    ``url`` is the address of the ready server. ``PENSTOCK_`` and ``VLLM_`` variables are removed from its
    environment, so that the results depend on the options of the measurement only.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        seconds: float,
        *,
        on_line: Callable[[str], None] = lambda line: None,
        python: str = sys.executable,
        tree: Path | None = None,
    ) -> None:
        """Start ``penstock`` with ``arguments`` and wait at most ``seconds`` until it is ready. ``on_line``
        is called with every line of its output, in a thread. ``python``: the interpreter; ``tree``: a working
        tree whose code runs in place of this one's.

        Raises BenchError.
        """
        self._on_line = on_line
        self._lines: collections.deque[str] = collections.deque(maxlen=SHOWN_LINES)
        self._ready = threading.Event()
        self.url = ""
        environ = {key: value for key, value in os.environ.items() if not key.startswith((PREFIX, "VLLM_"))}
        self._process = subprocess.Popen(
            [python, "-m", "penstock.cli.main", *arguments],
            cwd=tree,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environ if tree is None else environ | {"PYTHONPATH": str(tree)},
            start_new_session=True,  # Ctrl-C must not kill it: it is shut down in order
        )
        self._reader = threading.Thread(target=self._read, name="server-output", daemon=True)
        self._reader.start()
        try:
            if not self._ready.wait(seconds):
                raise BenchError(f"the server was not ready in {seconds:.0f} s:\n{self.output}")
            if not self.url:
                raise BenchError(f"the server did not start:\n{self.output}")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative after a signal."""
        return self._process.poll()

    @property
    def output(self) -> str:
        """The last lines of its output."""
        return "\n".join(self._lines)

    def close(self) -> None:
        """End all its processes."""
        family: list[psutil.Process | subprocess.Popen[str]] = [self._process]
        with contextlib.suppress(psutil.NoSuchProcess):
            family += psutil.Process(self._process.pid).children(recursive=True)
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait()
        self._reader.join(END_SECONDS)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        """Read the output; finds the URL, then the ready line."""
        url = ""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.rstrip())
            self._on_line(line)
            if match := _URL.match(line):
                url = match.group(1)
            if _READY.match(line):
                self.url = url
                self._ready.set()
        self._ready.set()  # it has exited


def serve_arguments(config: BenchHostConfig, api_servers: int = 1) -> list[str]:
    """The command line of a server with the synthetic engine. ``--server-args`` come last and override."""
    engine: dict[str, object] = {"--attach": ATTACH}
    model = [str(DEMO_DIR)] if config.attach else []
    if not config.attach:
        engine = {
            "--engine": "synthetic",
            "--synthetic-step-ms": config.step_ms,
            "--synthetic-tokens-per-step": config.tokens_per_step,
        }
    options = {
        **engine,
        "--port": 0,
        "--stream-interval": config.stream_interval,
        "--api-server-count": api_servers,
        "--data-parallel-size": config.engines,
        "--max-num-seqs": slots(config),
        "--max-model-len": model_len(config),
        "--drain-timeout": 1,
    }
    command, *arguments = serve_command(options, config.server_args)
    return [command, *model, *arguments]


def slots(config: BenchHostConfig) -> int:
    """Streams that an engine runs at the same time."""
    return max(BASE_SLOTS, config.in_flight + config.slow_readers)


def model_len(config: BenchHostConfig) -> int:
    """Tokens of a request and its reply, at most."""
    longest = config.prompt_tokens + config.prompt_tokens // 16 + config.tokens + 256  # text lengths vary
    return max(SLOW_MODEL_LEN if config.slow_readers else BASE_MODEL_LEN, longest)


def serve_command(options: Mapping[str, object], further: str | None) -> list[str]:
    """``serve`` with ``options``, then the arguments in ``further``, which is parsed as by a shell."""
    given = [f"{name}={value}" for name, value in options.items()]
    return ["serve", *given, *shlex.split(further or "")]
