"""How the engine process ends, in a thread and as a process."""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.config.errors import ConfigError
from penstock.engine.loop.process import ready_info, run
from penstock.engine.synthetic.faults import InjectedFault
from penstock.engine.synthetic.script_player import EXIT_CODE_OF_FAULT
from penstock.wire.channel import ChildChannel, ControlChannel, SupervisorGone
from penstock.wire.control import Drain, Progress, Ready, Stop
from penstock.wire.messages import Abort, Draining, EngineInfo, GoAway
from tests.engine.loops import ENDLESS, Host
from tests.engine.peers import DEADLINE_S, ApiServer, engine_launch, reports_until
from tests.engine.support import submit


def test_a_broken_engine_gives_out_what_it_has(
    host: Callable[..., Host], connect: Callable[..., ApiServer]
) -> None:
    served = host(synthetic_fault="error@25", max_num_seqs=2)
    peer = connect()
    peer.send(submit(1, 100), submit(2, 100, interval=10), submit(3, 100))
    peer.read(lambda: bool(peer.received.others))
    received = peer.received
    assert [len(received.tokens.get(stream, [])) for stream in (1, 2, 3)] == [25, 25, 0]
    assert received.failed == {}
    assert received.others == [GoAway("it failed")]
    served.join()
    assert isinstance(served.error, InjectedFault)


def test_stop(host: Callable[..., Host], connect: Callable[..., ApiServer]) -> None:
    served = host()
    peer, idle = connect(0), connect(1)
    peer.send(*(submit(stream, ENDLESS) for stream in range(300)))
    peer.read(lambda: len(peer.received.tokens) == 300)
    served.supervisor.send(Stop())
    received = peer.read(lambda: bool(peer.received.others))
    assert received.failed == {}
    assert received.others == [GoAway("engine is shutting down")]
    assert idle.read(lambda: bool(idle.received.others)).others == received.others
    served.join()
    assert served.error is None


def test_an_engine_that_is_to_leave_finishes_what_it_runs(
    host: Callable[..., Host], connect: Callable[..., ApiServer]
) -> None:
    served = host()
    peer = connect(0)
    peer.send(submit(1, ENDLESS), submit(2, 500))
    peer.read(lambda: len(peer.received.tokens) == 2)
    served.supervisor.send(Drain())
    peer.read(lambda: peer.received.others == [Draining()])
    late = connect(1)
    late.read(lambda: late.received.others == [Draining()])
    late.send(submit(7, 20))
    late.read_ends(7)
    peer.read_ends(2)
    peer.send(Abort([1]))
    peer.read_ends(1)
    peer.read(lambda: peer.received.others[-1] == GoAway("engine is shutting down"))
    served.join()
    assert served.error is None


def test_stop_of_an_idle_engine(host: Callable[..., Host]) -> None:
    served = host()
    served.supervisor.send(Stop())
    served.join()
    assert served.error is None


def test_stop_does_not_wait_for_a_stuck_reader(
    host: Callable[..., Host], connect: Callable[..., ApiServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engine.loop.process.SHUTDOWN_FLUSH_TIMEOUT_S", 0.05)
    served = host(synthetic_step_ms=0)
    stuck, other = connect(0), connect(1)
    stuck.send(*(submit(stream, ENDLESS) for stream in range(200)))
    other.send(submit(1, 2000))
    other.read_ends(1)
    served.supervisor.send(Stop())
    served.join()
    assert served.error is None


def test_drain_changes_nothing(host: Callable[..., Host], connect: Callable[..., ApiServer]) -> None:
    served = host()
    peer = connect()
    served.supervisor.send(Drain())
    peer.send(submit(1, 50))
    assert len(peer.read_ends(1).tokens[1]) == 50
    assert served.error is None


@pytest.mark.parametrize("busy", [True, False])
def test_a_lost_supervisor_ends_it(
    host: Callable[..., Host], connect: Callable[..., ApiServer], busy: bool
) -> None:
    served = host()
    peer = connect()
    if busy:
        peer.send(submit(1, ENDLESS))
        peer.read(lambda: bool(peer.received.tokens))
    served.supervisor.close()
    served.join()
    assert isinstance(served.error, SupervisorGone)


# -- as a process


def test_what_the_operator_is_shown() -> None:
    info = EngineInfo("torch", 4096, 32000, 256, (1,), "cuda:0", "bfloat16", 65536)
    assert ready_info(info) == {
        "device": "cuda:0",
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_seqs": 256,
        "kv_cache_tokens": 65536,
    }
    assert "kv_cache_tokens" not in ready_info(EngineInfo("synthetic", 4096, 32000, 256))


def test_a_start_that_fails(tmp_path: Path, run_dir: str) -> None:
    supervisor, theirs = ChildChannel.pair()
    control = ControlChannel(theirs.detach())
    try:
        supervisor.send(engine_launch(tmp_path, run_dir))
        with pytest.raises(ConfigError, match=r"tokenizer\.json"):
            run(control)
        assert not any(isinstance(report, Ready) for report in supervisor.receive())
    finally:
        control.close()
        supervisor.close()


_CHILD = """
import sys
from penstock.engine.loop.process import run
from penstock.wire.channel import ControlChannel
code = run(ControlChannel(int(sys.argv[1])))
assert not {"torch", "transformers"} & sys.modules.keys()
sys.exit(code)
"""


class Child:
    """A real engine process that has reported Ready."""

    def __init__(self, model_dir: Path, run_dir: str, stack: ExitStack, **options: Any) -> None:
        self.channel, theirs = ChildChannel.pair()
        stack.callback(self.channel.close)
        with theirs:
            theirs.set_inheritable(True)
            self.process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stderr=subprocess.PIPE,
                text=True,
            )
        stack.enter_context(self.process)
        stack.callback(self.process.kill)
        self.channel.send(engine_launch(model_dir, run_dir, **options))
        self.reports = reports_until(self.channel, Ready)

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, errors


def test_a_process_serves_and_stops(
    model_dir: Path, run_dir: str, stack: ExitStack, connect: Callable[..., ApiServer]
) -> None:
    child = Child(model_dir, run_dir, stack, synthetic_step_ms=1, max_model_len=100_000)
    ready = Ready(info={"device": "cpu", "max_model_len": 100_000, "max_num_seqs": 1024})
    assert child.reports[:2] == [Progress(text="reading the tokenizer"), ready]
    peer = connect()
    peer.send(*(submit(stream, 20) for stream in range(10)))
    peer.read_ends(*range(10))
    peer.send(submit(99, ENDLESS))
    peer.read(lambda: bool(peer.received.tokens.get(99)))
    child.channel.send(Stop())
    peer.read(lambda: bool(peer.received.others))
    assert peer.received.others == [GoAway("engine is shutting down")]
    assert child.end() == (0, "")


def test_a_process_that_breaks(
    model_dir: Path, run_dir: str, stack: ExitStack, connect: Callable[..., ApiServer]
) -> None:
    child = Child(model_dir, run_dir, stack, synthetic_fault="error@5")
    peer = connect()
    peer.send(submit(1, 50))
    received = peer.read(lambda: bool(peer.received.others))
    assert len(received.tokens[1]) == 5
    code, errors = child.end()
    assert code == 1
    assert "InjectedFault: injected by --synthetic-fault error@5" in errors
    assert errors.startswith("Traceback")


def test_a_process_that_exits_is_noticed(
    model_dir: Path, run_dir: str, stack: ExitStack, connect: Callable[..., ApiServer]
) -> None:
    child = Child(model_dir, run_dir, stack, synthetic_fault="exit@5")
    peer = connect()
    peer.send(submit(1, 50))
    deadline = time.monotonic() + DEADLINE_S
    while not peer.link.lost():
        assert time.monotonic() < deadline
        select.select([peer.link.monitor_fd], [], [], 0.05)
    peer.close()
    assert child.end()[0] == EXIT_CODE_OF_FAULT
    successor = Child(model_dir, run_dir, stack)
    after = connect(0)
    after.send(submit(1, 5))
    assert len(after.read_ends(1).tokens[1]) == 5
    successor.channel.send(Stop())
    assert successor.end()[0] == 0
