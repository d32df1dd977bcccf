"""The actor without Ray: a child process, and its control channel passed on."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

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
import os, signal, sys
from penstock.wire.control import ControlChannel, Stop
control = ControlChannel(int(sys.argv[1]))
launch = control.launch
assert launch.supervisor_pid == os.getppid() and os.path.isdir(launch.run_dir)
control.ready({"run_dir": launch.run_dir, "tokenizer": launch.tokenizer_dir})
while not (orders := control.receive()):
    pass
assert orders == [Stop()]
%s
"""


def launch(model: str | None = None) -> Launch:
    return Launch(
        role="engine",
        index=1,
        epoch=0,
        config=ServeConfig(engine="synthetic", model=model),
        run_dir="/of/another/machine",
        model_dir="/of/another/machine",
        tokenizer_dir="/of/another/machine",
        served_model_names=["m"],
        api_server_count=1,
        engine_count=2,
        supervisor_pid=1,
    )


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
    host = started(launch(), end)
    ready = first_report(host)
    assert isinstance(ready, Ready)
    assert Path(str(ready.info["tokenizer"])).is_dir()
    host.write(encode(Stop()))
    assert reports_until_the_end(host) == ([], returncode)
    assert not Path(str(ready.info["run_dir"])).exists()
    host.write(encode(Stop()))  # to nobody


def test_a_machine_without_the_model_says_so() -> None:
    host = started(launch(model="/no/such/model"))
    reports, returncode = reports_until_the_end(host)
    assert returncode == 3
    (failed,) = reports
    assert isinstance(failed, Failed)
    assert failed.fatal
    assert "/no/such/model" in failed.message


def test_a_child_that_cannot_be_started() -> None:
    host = EngineHost()
    command: Sequence[str] = ["/no/such/interpreter"]
    host.start(encode(launch()), command)
    reports, _ = reports_until_the_end(host)
    assert isinstance(reports[0], Failed)
    assert "/no/such/interpreter" in reports[0].message
