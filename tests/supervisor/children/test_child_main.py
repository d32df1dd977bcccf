from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from penstock.exit_codes import EXIT_FAILED, EXIT_FATAL, EXIT_OK, EXIT_ORPHANED
from penstock.supervisor.children.parent_death import child_command
from penstock.supervisor.signals import STRAY_SIGNALS, TERMINATION_SIGNALS
from penstock.wire.channel import ChildChannel
from penstock.wire.control import ChildReport, Heartbeat, ProcessFailed, Ready, Stop
from tests.launches import launch
from tests.supervisor.harness import PATIENCE_S

LAUNCH = launch("engine", index=3, engine_count=4)


class Child:
    """A child of this process, and the supervisor's end of its channel."""

    def __init__(self, behaviour: str, module: str = "tests.supervisor.fake_child") -> None:
        self.channel, theirs = ChildChannel.pair()
        with theirs:
            self.process = subprocess.Popen(
                [*child_command(module), f'{{"engine": ["{behaviour}"]}}', str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stderr=subprocess.PIPE,
                text=True,
            )

    def report(self) -> ChildReport:
        """The next one but heartbeats; it comes alone."""
        while True:
            with socket.socket(fileno=os.dup(self.channel.fileno())) as waiting:
                waiting.settimeout(PATIENCE_S)
                waiting.recv(1, socket.MSG_PEEK)
            reports = [each for each in self.channel.receive() if not isinstance(each, Heartbeat)]
            if reports:
                [report] = reports
                return report

    def end(self) -> tuple[int, str]:
        """Exit code and standard error."""
        _, stderr = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, stderr

    def close(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def make_child() -> Iterator[type[Child]]:
    made: list[Child] = []

    class Kept(Child):
        def __init__(self, behaviour: str, module: str = "tests.supervisor.fake_child") -> None:
            super().__init__(behaviour, module)
            made.append(self)

    yield Kept
    for child in made:
        child.close()


# -- what it runs as -----------------------------------------------------------------------------------


def test_takes_title_and_log_prefix_and_stops_when_told(make_child: type[Child]) -> None:
    child = make_child("serve")
    child.channel.send(LAUNCH)
    assert isinstance(child.report(), Ready)
    assert psutil.Process(child.process.pid).cmdline()[0] == "penstock: engine 3"
    child.channel.send(Stop())
    code, stderr = child.end()
    assert code == EXIT_OK
    assert " INFO    engine 3     got Stop\n" in stderr


def send_to_main_thread(pid: int, signum: int) -> None:
    """Linux; elsewhere any thread takes it."""
    if sys.platform != "linux":
        os.kill(pid, signum)
    elif ctypes.CDLL(None, use_errno=True).tgkill(pid, pid, signum) != 0:
        raise OSError(ctypes.get_errno(), "tgkill")


def test_all_signals_at_once_do_not_end_it(make_child: type[Child]) -> None:
    child = make_child("serve")
    child.channel.send(LAUNCH)
    assert isinstance(child.report(), Ready)
    child.process.send_signal(signal.SIGSTOP)
    for signum in (*TERMINATION_SIGNALS, *STRAY_SIGNALS):
        send_to_main_thread(child.process.pid, signum)
    child.process.send_signal(signal.SIGCONT)
    child.channel.send(Stop())
    code, errors = child.end()
    assert (code, "got Stop" in errors) == (EXIT_OK, True)


def test_a_crash_is_told_with_its_traceback(make_child: type[Child]) -> None:
    child = make_child("serve")
    child.channel.send(LAUNCH)
    assert isinstance(child.report(), Ready)
    child.process.send_signal(signal.SIGSEGV)
    code, errors = child.end()
    assert code == -signal.SIGSEGV
    assert "Segmentation fault" in errors
    assert "fake_child.py" in errors


@pytest.mark.parametrize(
    ("epoch", "fatal", "code"),
    [(0, True, EXIT_FATAL), (1, False, EXIT_FAILED)],
    ids=["first", "again"],
)
def test_an_exception_is_reported_with_its_traceback_in_the_log(
    make_child: type[Child], epoch: int, fatal: bool, code: int
) -> None:
    child = make_child("raise")
    child.channel.send(msgspec.structs.replace(LAUNCH, epoch=epoch))
    assert child.report() == ProcessFailed(message="ValueError: the weights are cursed", fatal=fatal)
    found, stderr = child.end()
    assert found == code
    assert "ERROR   engine 3     Traceback" in stderr


def test_options_that_it_refuses_are_a_line_of_the_supervisor_alone(make_child: type[Child]) -> None:
    child = make_child("refuse")
    child.channel.send(LAUNCH)
    assert child.report() == ProcessFailed(message="ConfigError: --threads 9: too many", fatal=True)
    code, stderr = child.end()
    assert code == EXIT_FATAL
    assert "ERROR" not in stderr


def test_what_failed_after_it_was_ready_may_work_again(make_child: type[Child]) -> None:
    child = make_child("ready then raise")
    child.channel.send(LAUNCH)
    assert isinstance(child.report(), Ready)
    child.channel.send(Stop())
    report = child.report()
    assert isinstance(report, ProcessFailed)
    assert not report.fatal
    assert child.end()[0] == EXIT_FAILED


# -- its supervisor's end ------------------------------------------------------------------------------


def test_a_supervisor_that_is_gone_before_the_launch(make_child: type[Child]) -> None:
    child = make_child("serve")
    child.channel.close()
    assert child.end() == (EXIT_ORPHANED, "")


@pytest.mark.parametrize("behaviour", ["serve", "hang"])
def test_a_channel_that_closes_ends_it_even_while_it_is_busy(make_child: type[Child], behaviour: str) -> None:
    """The parent process, this one, lives on: the channel alone says it."""
    child = make_child(behaviour)
    child.channel.send(LAUNCH)
    child.report()
    child.channel.close()
    assert child.end()[0] == EXIT_ORPHANED


@pytest.fixture
def never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module whose import tells its process, and takes forever."""
    code = "import os, signal\nos.write(2, b'%d\\n' % os.getpid())\nsignal.pause()\n"
    (tmp_path / "never_imported.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return "never_imported"


def test_a_channel_that_closes_ends_it_even_while_it_imports(
    make_child: type[Child], never_imported: str
) -> None:
    child = make_child("", never_imported)
    assert child.process.stderr is not None
    assert int(child.process.stderr.readline()) == child.process.pid
    child.channel.close()
    assert child.end() == (EXIT_ORPHANED, "")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_the_kernel_ends_it_with_its_parent_though_the_channel_stays_open(never_imported: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [*child_command(never_imported), str(theirs.fileno())]
        code = (
            "import signal, subprocess; "
            f"subprocess.Popen({command!r}, pass_fds=[{theirs.fileno()}]); "
            "signal.pause()"
        )
        parent = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True
        )
        assert parent.stderr is not None
        child = psutil.Process(int(parent.stderr.readline()))
        parent.send_signal(signal.SIGKILL)
        assert parent.wait(timeout=PATIENCE_S) == -signal.SIGKILL
        parent.stderr.close()
        _, alive = psutil.wait_procs([child], timeout=PATIENCE_S)
        assert alive == []


# -- what it imports -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        (
            "from penstock.supervisor.children import child_main; child_main.import_role_main('api-server')",
            {"torch", "transformers", "huggingface_hub", "httpx", "rich", "psutil", "opentelemetry"}
            | {"llguidance", "wsproto", "h11", "prometheus_client", "cryptography", "yaml"},
        ),
        (
            "from penstock.supervisor.children import child_main; child_main.import_role_main('engine'); "
            "import penstock.engine.synthetic.engine",
            {"torch", "transformers", "huggingface_hub", "llguidance", "jinja2", "uvloop", "httpx"},
        ),
        (
            "from penstock.config.serve import ServeConfig; from penstock.supervisor.main import *; "
            "check_prompt_files(ServeConfig(), ResolvedModel('', '', []))",
            {"torch", "transformers", "huggingface_hub", "uvloop", "numpy", "rich", "psutil", "httpx"}
            | {"jinja2", "tokenizers", "llguidance", "penstock.api.process", "cryptography"},
        ),
    ],
    ids=["api-server", "engine", "supervisor"],
)
def test_processes_do_not_load_what_is_not_theirs(code: str, unwanted: set[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert not unwanted & set(result.stdout.split())


def test_the_end_waits_for_no_clean_up_of_the_interpreter() -> None:
    late = "import atexit; atexit.register(print, 'late')"
    imported = "from penstock.supervisor.children.child_main import exit_process"
    code = f"{late}; {imported}; print('said'); exit_process(3)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (3, "said\n")
