"""Signals from the first moment on: a quiet end with the documented exit code, and nothing left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from penstock.exit_codes import EXIT_OK
from tests.integration.server import SYNTHETIC, wait_until
from tests.supervisor.harness import PATIENCE_S

COMMAND = [sys.executable, "-m", "penstock.cli.main"]
SERVE = ["serve", "--port", "0", *SYNTHETIC, "--api-server-count", "2"]

# Runs the command line, and sends itself a signal when it imports a module.
AT_IMPORT = """
import os, runpy, sys
module, signum = sys.argv[1], int(sys.argv[2])

class Trap:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signum)

sys.argv[:3] = ["-m"]
sys.meta_path.insert(0, Trap())
runpy.run_module("penstock.cli.main", run_name="__main__", alter_sys=True)
"""


def environ(temporary: Path) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TMPDIR": str(temporary),
    }


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "module",
    ["penstock.cli.main", "msgspec", "penstock.supervisor.main", "zmq", "penstock.http.tls", "select"],
)
def test_a_signal_while_modules_are_imported(module: str, signum: signal.Signals, short_dir: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", AT_IMPORT, module, str(int(signum)), *SERVE],
        env=environ(short_dir),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    if module == "select" and ended.returncode == EXIT_OK:
        pytest.skip("imported by the interpreter already")
    assert (ended.returncode, ended.stderr) == (128 + signum, f"penstock: ended by {signum.name}\n")


def test_a_client_command_is_interrupted_without_a_traceback(short_dir: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", AT_IMPORT, "penstock.client", str(int(signal.SIGINT)), "complete", "hello"],
        env=environ(short_dir),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 128 + signal.SIGINT
    assert "Traceback" not in ended.stderr


def catches(pid: int, signum: int) -> bool:
    """Whether the process has a handler for the signal; True once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    mask = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(mask.split()[1], 16) >> (signum - 1) & 1) or "State:\tZ" in status


def run_and_signal(delay_s: float, signums: list[int], temporary: Path) -> tuple[int, str]:
    """Starts a server, sends it signals this long after it has handlers; returns its end and its log."""
    server = subprocess.Popen(
        [*COMMAND, *SERVE],
        env=environ(temporary),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until(lambda: catches(server.pid, signal.SIGTERM), PATIENCE_S, "having handlers")
    threading.Event().wait(delay_s)  # where it then is, is left to chance
    try:
        children = psutil.Process(server.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    for signum in signums:
        if server.poll() is None:
            server.send_signal(signum)
    try:
        _, log = server.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        server.kill()
        raise
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert alive == []
    return server.returncode, log


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_signals_at_any_time_of_a_start(seed: int, short_dir: Path) -> None:
    """One signal, or fifty, a moment after the first import or seconds later."""
    chance = random.Random(seed)
    signums = [chance.choice([signal.SIGINT, signal.SIGTERM])] * chance.choice([1, 50])
    code, log = run_and_signal(chance.uniform(0.0, 1.0) ** 2 * 3.0, signums, short_dir)
    assert code in (EXIT_OK, 128 + signums[0]), log
    assert "Traceback" not in log
    assert list(short_dir.iterdir()) == [], "the run directory"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_storm_of_sighup_hides_no_sigterm(seed: int, short_dir: Path) -> None:
    delay_s = random.Random(seed).uniform(0.5, 5.0)
    code, log = run_and_signal(delay_s, [signal.SIGHUP] * 500 + [signal.SIGTERM], short_dir)
    assert code in (EXIT_OK, 128 + signal.SIGTERM, 128 + signal.SIGHUP, -signal.SIGHUP), log
    assert "Traceback" not in log
    assert log.count("SIGHUP while") <= 1
