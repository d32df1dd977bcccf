"""The engine process: its loop in a thread with real sockets, and the whole of it as a process."""

import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.config.errors import ConfigError
from penstock.config.options import ServeConfig
from penstock.engine.process import EngineLoop, ready_info, run
from penstock.engine.synthetic import EXIT_CODE_OF_FAULT, InjectedFault, SyntheticEngine
from penstock.metrics import families
from penstock.metrics.families import Family
from penstock.metrics.snapshot import Distribution, Labels, Value, decode_snapshot, totals, view_of
from penstock.wire.channel import ChildChannel, ControlChannel, SupervisorGone
from penstock.wire.control import Beat, Drain, Progress, Ready, Report, Stop
from penstock.wire.frames import Finish
from penstock.wire.messages import Abort, Bye, EngineInfo, Goodbye, Leaving
from penstock.wire.sockets import RouterSocket, engine_address

from .peers import DEADLINE_S, ApiServer, engine_launch, reports_until
from .support import submit

ENDLESS = 99_000
"""Tokens of a stream that does not end by itself within a test: more than a minute at 1 ms a step."""


@pytest.fixture
def run_dir() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        yield directory


class CountingSocket(RouterSocket):
    waits = 0

    def wait(self, timeout_s: float | None, also: int | None = None) -> bool:
        self.waits += 1
        return super().wait(timeout_s, also)


class Host:
    """An engine loop in a thread, with the supervisor's end of its control channel."""

    def __init__(self, model_dir: Path, run_dir: str, **options: Any) -> None:
        self.engine = SyntheticEngine(ServeConfig(engine="synthetic", **options), str(model_dir))
        self.socket = CountingSocket(engine_address(run_dir, 0))
        self.supervisor, theirs = ChildChannel.pair()
        self.control = ControlChannel(theirs.detach())
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            EngineLoop(self.engine, self.socket, 0, 0).run(self.control)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        finally:
            self.socket.close()

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        if self._thread.is_alive():
            self.supervisor.send(Stop())
            self.join()
        self.control.close()
        self.supervisor.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def host(model_dir: Path, run_dir: str, stack: ExitStack) -> Callable[..., Host]:
    def start(**options: Any) -> Host:
        host = Host(model_dir, run_dir, **{"synthetic_step_ms": 1, "max_model_len": 100_000, **options})
        stack.callback(host.close)
        return host

    return start


@pytest.fixture
def connect(run_dir: str, stack: ExitStack) -> Callable[..., ApiServer]:
    """API servers that have said Hello and were welcomed."""

    def connect(server: int = 0, epoch: int = 0) -> ApiServer:
        peer = ApiServer(run_dir, server, epoch)
        stack.callback(peer.close)
        peer.hello()
        return peer

    return connect


# -- streams


def test_every_token_in_order_and_one_end(
    host: Callable[..., Host], connect: Callable[..., ApiServer]
) -> None:
    host(max_num_seqs=16)
    peer = connect()
    peer.send(*(submit(stream, 5 + stream) for stream in range(40)))
    received = peer.read_ends(*range(40))
    assert {stream: len(tokens) for stream, tokens in received.tokens.items()} == {
        stream: 5 + stream for stream in range(40)
    }
    assert set(received.finish.values()) == {Finish.LENGTH}
    peer.send(submit(3, 8))
    received.tokens.pop(3)
    received.finish.pop(3)
    assert len(peer.read_ends(3).tokens[3]) == 8


def test_welcome(model_dir: Path, run_dir: str, host: Callable[..., Host], stack: ExitStack) -> None:
    served = host()
    peer = ApiServer(run_dir)
    stack.callback(peer.close)
    welcome = peer.hello()
    assert (welcome.rank, welcome.info) == (0, served.engine.info)


def test_interval(host: Callable[..., Host], connect: Callable[..., ApiServer]) -> None:
    host(synthetic_step_ms=0)
    peer = connect()
    peer.send(submit(1, 100, interval=10))
    received = peer.read_ends(1)
    assert len(received.tokens[1]) == 100
    assert received.rows == 1 + 9 + 1


def test_abort(host: Callable[..., Host], connect: Callable[..., ApiServer]) -> None:
    host()
    peer = connect()
    peer.send(submit(1, ENDLESS), submit(2, 20))
    peer.read(lambda: len(peer.received.tokens.get(1, [])) >= 3)
    peer.send(Abort([1, 7]))
    received = peer.read_ends(1, 2)
    assert received.finish == {1: Finish.ABORT, 2: Finish.LENGTH}
    assert len(received.tokens[1]) < ENDLESS
    peer.until_metric("requests_running", 0)


def test_rejected(host: Callable[..., Host], connect: Callable[..., ApiServer]) -> None:
    host()
    peer = connect()
    peer.send(submit(1, 0), submit(2, 3))
    received = peer.read_ends(1, 2)
    assert received.failed[1].code == "invalid_request"
    assert "max_tokens is 0" in received.failed[1].message
    assert len(received.tokens[2]) == 3


def test_two_api_servers_with_the_same_handles(
    model_dir: Path, host: Callable[..., Host], connect: Callable[..., ApiServer]
) -> None:
    host()
    zero, one = connect(0), connect(1)
    zero.send(*(submit(stream, 20, seed=stream) for stream in range(10)))
    one.send(*(submit(stream, 30, seed=100 + stream) for stream in range(10)))
    mine, theirs = zero.read_ends(*range(10)).tokens, one.read_ends(*range(10)).tokens
    assert {len(tokens) for tokens in mine.values()} == {20}
    assert {len(tokens) for tokens in theirs.values()} == {30}
    assert not {tuple(tokens) for tokens in mine.values()} & {
        tuple(tokens[:20]) for tokens in theirs.values()
    }


def test_calls(host: Callable[..., Host], connect: Callable[..., ApiServer]) -> None:
    host()
    peer = connect()
    assert peer.call("metrics").result["steps_total"] == 0
    assert "no operation 'fly'" in (peer.call("fly", high=True).error or "")


# -- metrics


def counted(peer: ApiServer, family: Family) -> dict[Labels, Value]:
    """What the engine's latest snapshot says."""
    snapshots = [decode_snapshot(message.snapshot) for message in peer.received.metrics]
    return totals(view_of(*snapshots)).get(family.name, {})


def test_metrics_come_by_themselves(host: Callable[..., Host], connect: Callable[..., ApiServer]) -> None:
    host()
    peer = connect()
    peer.send(*(submit(stream, 20) for stream in range(10)))
    peer.read_ends(*range(10))
    peer.read(lambda: counted(peer, families.GENERATION_TOKENS) == {("", "0"): 200})
    assert counted(peer, families.PROMPT_TOKENS) == {("", "0"): 30}
    assert counted(peer, families.SUCCESS)["", "0", "length"] == 10
    queue_time = counted(peer, families.QUEUE_TIME)["", "0"]
    assert isinstance(queue_time, Distribution)
    assert sum(queue_time.counts) == 10
    latest = peer.received.metrics[-1]
    assert (latest.waiting, latest.running) == (0, 0)


def test_an_api_server_that_comes_later_is_told_as_well(
    host: Callable[..., Host], connect: Callable[..., ApiServer]
) -> None:
    host()
    first = connect(0)
    first.send(submit(1, 7))
    first.read_ends(1)
    second = connect(1)
    second.read(lambda: counted(second, families.GENERATION_TOKENS) == {("", "0"): 7})


def test_a_running_engine_reports_again_and_again(
    host: Callable[..., Host], connect: Callable[..., ApiServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engine.reporter.REPORT_INTERVAL_S", 0.05)
    host()
    peer = connect()
    peer.send(submit(1, ENDLESS))
    peer.read(lambda: len(peer.received.metrics) >= 5)
    assert peer.received.metrics[-1].running == 1
    sequences = [decode_snapshot(message.snapshot).sequence for message in peer.received.metrics]
    assert sequences == sorted(set(sequences))


def test_the_last_metrics_come_before_the_goodbye(
    host: Callable[..., Host], connect: Callable[..., ApiServer]
) -> None:
    served = host()
    peer = connect()
    peer.send(submit(1, ENDLESS))
    peer.read(lambda: len(peer.received.tokens.get(1, [])) >= 10)
    served.supervisor.send(Stop())
    received = peer.read(lambda: bool(peer.received.others))
    assert counted(peer, families.GENERATION_TOKENS) == {("", "0"): len(received.tokens[1])}


# -- peers that misbehave, leave, or do not read


def test_invalid_bytes(host: Callable[..., Host], connect: Callable[..., ApiServer]) -> None:
    served = host()
    bad, good = connect(0), connect(1)
    bad.send(submit(1, ENDLESS))
    good.send(submit(1, 100))
    bad.read(lambda: bool(bad.received.tokens))
    bad.link.send([b"\xc1\xff", b""])
    bad.read(lambda: bool(bad.received.others))
    (goodbye,) = bad.received.others
    assert isinstance(goodbye, Goodbye)
    assert len(good.read_ends(1).tokens[1]) == 100
    good.until_metric("requests_running", 0)
    assert served.error is None


def test_an_api_server_that_dies_frees_its_slots(
    host: Callable[..., Host], connect: Callable[..., ApiServer]
) -> None:
    host(max_num_seqs=4)
    gone, left = connect(0), connect(1)
    gone.send(*(submit(stream, ENDLESS) for stream in range(8)))
    gone.read(lambda: len(gone.received.tokens) == 4)
    gone.close()
    left.until_metric("requests_running", 0)
    left.until_metric("requests_waiting", 0)
    left.send(submit(1, 5))
    assert len(left.read_ends(1).tokens[1]) == 5


def test_bye(host: Callable[..., Host], connect: Callable[..., ApiServer]) -> None:
    host()
    leaving, left = connect(0), connect(1)
    leaving.send(submit(1, ENDLESS))
    leaving.read(lambda: bool(leaving.received.tokens))
    leaving.send(Bye())
    left.until_metric("requests_running", 0)


def test_a_restarted_api_server(host: Callable[..., Host], connect: Callable[..., ApiServer]) -> None:
    host()
    before = connect(0, epoch=0)
    before.send(submit(1, ENDLESS), submit(2, ENDLESS))
    before.read(lambda: bool(before.received.tokens))
    after = connect(0, epoch=1)
    after.send(submit(2, 7))
    assert len(after.read_ends(2).tokens[2]) == 7
    assert list(after.received.tokens) == [2]
    after.until_metric("requests_running", 0)


def test_a_reader_that_was_stuck_gets_every_token_once(
    host: Callable[..., Host], connect: Callable[..., ApiServer]
) -> None:
    streams, tokens, brief = 100, 2000, 50
    host(synthetic_step_ms=0)
    stuck, reader = connect(0), connect(1)
    stuck.send(*(submit(stream, tokens) for stream in range(streams)))
    for stream in range(brief):  # its requests are served meanwhile
        reader.send(submit(stream, 10))
        reader.read_ends(stream)
    reader.until_metric("generated_tokens_total", streams * tokens + brief * 10)
    received = stuck.read_ends(*range(streams))
    assert {len(received.tokens[stream]) for stream in range(streams)} == {tokens}
    assert received.failed == {}
    assert received.frames < tokens / 2  # rows were merged, not queued


# -- the end


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
    assert received.others == [Goodbye("InjectedFault: injected by --synthetic-fault error@25")]
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
    assert received.others == [Goodbye("engine is shutting down")]
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
    peer.read(lambda: peer.received.others == [Leaving()])
    late = connect(1)
    late.read(lambda: late.received.others == [Leaving()])
    late.send(submit(7, 20))
    late.read_ends(7)
    peer.read_ends(2)
    peer.send(Abort([1]))
    peer.read_ends(1)
    peer.read(lambda: peer.received.others[-1] == Goodbye("engine is shutting down"))
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
    monkeypatch.setattr("penstock.engine.process.FAREWELL_S", 0.05)
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


@pytest.mark.parametrize("busy", [True, False])
def test_the_supervisor_hears_that_the_loop_turns(
    host: Callable[..., Host], connect: Callable[..., ApiServer], busy: bool
) -> None:
    served = host()
    peer = connect()
    if busy:
        peer.send(submit(1, ENDLESS))
        peer.read(lambda: bool(peer.received.tokens))
    reports: list[Report] = []
    while len(reports) < 2:
        assert select.select([served.supervisor], [], [], DEADLINE_S)[0]
        reports += served.supervisor.receive()
    assert set(reports) == {Beat()}


def test_an_idle_engine_waits(host: Callable[..., Host], connect: Callable[..., ApiServer]) -> None:
    served = host()
    peer = connect()
    before = served.socket.waits
    for _ in range(10):
        peer.call("metrics")
    # one wait per message, one more when a wake-up had nothing to say yet, and some to beat
    assert served.socket.waits - before <= 2 * 10 + 10


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
from penstock.engine.process import run
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
    assert peer.received.others == [Goodbye("engine is shutting down")]
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
