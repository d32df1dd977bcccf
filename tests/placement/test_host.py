"""The actor without Ray: a child process, and its control channel passed on."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from launches import launch

from penstock.config.options import ServeConfig
from penstock.placement.host import EngineHost
from penstock.wire.control import (
    Failed,
    Launch,
    LineBuffer,
    Ready,
    Report,
    Stop,
    decode_for_supervisor,
    encode,
)

CHILD = """
import os, select, signal, sys
from penstock.wire.channel import ControlChannel
from penstock.wire.control import Stop
control = ControlChannel(int(sys.argv[1]))
launch = control.launch
assert launch.supervisor_pid == os.getppid() and os.path.isdir(launch.run_dir)
control.ready({"run_dir": launch.run_dir, "tokenizer": launch.tokenizer_dir})
select.select([control], [], [])
assert control.receive() == [Stop()]
%s
"""


def engine(model: str | None = None) -> Launch:
    config = ServeConfig(engine="synthetic", model=model)
    return launch("engine", "/of/another/machine", index=1, config=config, engine_count=2)


def started(message: Launch, end: str = "") -> EngineHost:
    host = EngineHost()
    host.start(encode(message), [sys.executable, "-c", CHILD % end])
    return host


def reports_until_the_end(host: EngineHost) -> tuple[list[Report], int]:
    lines, buffer = [], LineBuffer()
    while (said := host.read()).returncode is None:
        lines += buffer.feed(said.data)
    return [decode_for_supervisor(line) for line in lines], said.returncode


def first_report(host: EngineHost) -> Report:
    (line,) = LineBuffer().feed(host.read().data)
    return decode_for_supervisor(line)


@pytest.mark.parametrize(
    ("end", "returncode"),
    [("", 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)],
)
def test_an_engine_from_its_launch_to_its_end(end: str, returncode: int) -> None:
    host = started(engine(), end)
    ready = first_report(host)
    assert isinstance(ready, Ready)
    assert Path(str(ready.info["tokenizer"])).is_dir()
    host.write(encode(Stop()))
    assert reports_until_the_end(host) == ([], returncode)
    assert not Path(str(ready.info["run_dir"])).exists()
    host.write(encode(Stop()))  # to nobody


def test_a_machine_without_the_model_says_so() -> None:
    host = started(engine(model="/no/such/model"))
    reports, returncode = reports_until_the_end(host)
    assert returncode == 3
    (failed,) = reports
    assert isinstance(failed, Failed)
    assert failed.fatal
    assert "/no/such/model" in failed.message


def test_a_child_that_cannot_be_started() -> None:
    host = EngineHost()
    command: Sequence[str] = ["/no/such/interpreter"]
    host.start(encode(engine()), command)
    reports, _ = reports_until_the_end(host)
    assert isinstance(reports[0], Failed)
    assert "/no/such/interpreter" in reports[0].message
