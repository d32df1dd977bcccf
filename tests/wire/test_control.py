from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.serve import ServeConfig
from penstock.wire.control import (
    MAX_LINE_BYTES,
    ApiKeys,
    ChangeRecord,
    ChangeState,
    ChildReport,
    ControlError,
    DesiredStates,
    Drain,
    DrainEngine,
    EnginesDraining,
    Heartbeat,
    Launch,
    LineBuffer,
    ProcessFailed,
    Progress,
    Ready,
    StateReport,
    StatesReport,
    Stop,
    SupervisorCommand,
    SupervisorMetrics,
    decode_for_child,
    decode_for_supervisor,
    encode,
)
from penstock.wire.messages import DesiredState
from tests.launches import launch

LAUNCH = launch(
    "api-server",
    index=1,
    epoch=2,
    config=ServeConfig(model="m", api_key=["secret"], kv_cache_memory=1 << 40),
    listen_fd=5,
)


# -- messages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (Drain(), b'{"type":"drain","replaced":false}\n'),
        (Drain(replaced=True), b'{"type":"drain","replaced":true}\n'),
        (Heartbeat(), b'{"type":"beat"}\n'),
        (DrainEngine(rank=1, draining=True), b'{"type":"drain-engine","rank":1,"draining":true}\n'),
        (SupervisorMetrics(snapshot=b"abc"), b'{"type":"supervisor-metrics","snapshot":"YWJj"}\n'),
        (
            ApiKeys(api_key=["a"], admin_api_key=[]),
            b'{"type":"api-keys","api_key":["a"],"admin_api_key":[]}\n',
        ),
        (EnginesDraining(ranks=[0, 2]), b'{"type":"engines-draining","ranks":[0,2]}\n'),
        (
            ChangeState(name="sleep", key="k", asked="sleep", base=2, stages=[{"level": 1}]),
            b'{"type":"change-state","name":"sleep","key":"k","asked":"sleep","base":2,"stages":[{"level":1}],'
            b'"initial":[],"call":""}\n',
        ),
        (
            DesiredStates(
                states=[DesiredState("a", 3, {"x": 1}, rollback=True)],
                changes={"a": [ChangeRecord("k", "load", 2, error="no room", rank=1)]},
            ),
            b'{"type":"desired-states","states":[["a",3,{"x":1},true,false]],'
            b'"changes":{"a":[["k","load",2,false,"no room",1,""]]}}\n',
        ),
        (
            StatesReport(states={"a": StateReport(3), "b": StateReport(2, "no room", 1)}),
            b'{"type":"states-report","states":{"a":[3,"",null],"b":[2,"no room",1]}}\n',
        ),
        (Stop(), b'{"type":"stop"}\n'),
        (Progress(text="weights", fraction=0.5), b'{"type":"progress","text":"weights","fraction":0.5}\n'),
        (Progress(text="a"), b'{"type":"progress","text":"a","fraction":null}\n'),
        (
            Ready(info={"device": "cpu", "blocks": 8, "gib": 1.5, "graphs": True}),
            b'{"type":"ready","info":{"device":"cpu","blocks":8,"gib":1.5,"graphs":true}}\n',
        ),
        (
            ProcessFailed(message="no", fatal=True),
            b'{"type":"failed","message":"no","fatal":true,"usage":false}\n',
        ),
    ],
)
def test_bytes_of_each_message(message: SupervisorCommand | ChildReport, line: bytes) -> None:
    assert encode(message) == line
    decode = decode_for_child if isinstance(message, SupervisorCommand) else decode_for_supervisor
    assert decode(line[:-1]) == message


def test_launch_carries_the_whole_config() -> None:
    line = encode(LAUNCH)
    assert line.count(b"\n") == 1
    decoded = decode_for_child(line)
    assert decoded == LAUNCH
    assert isinstance(decoded, Launch)
    assert decoded.config.kv_cache_memory == 1 << 40


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[]",
        b'{"type":"start"}',
        b'{"type":"stop","now":true}',
        b'{"type":"progress","text":"for the supervisor"}',
        b'{"type":"st\xff"}',
        b'{"type":"launch","role":"engine"}',
    ],
)
def test_a_line_that_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(ControlError):
        decode_for_child(line)


def test_a_role_that_does_not_exist_is_refused() -> None:
    for role in (b'"gateway"', b'"proxy"'):  # a worker of a gateway has a launch of its own
        line = encode(LAUNCH).replace(b'"api-server"', role)
        with pytest.raises(ControlError, match="role"):
            decode_for_child(line)


def test_an_option_out_of_its_bounds_is_refused() -> None:
    line = encode(LAUNCH).replace(b'"port":8000', b'"port":80000')
    with pytest.raises(ControlError, match="port"):
        decode_for_child(line)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_control_error(line: bytes) -> None:
    for decode in (decode_for_child, decode_for_supervisor):
        try:
            message = decode(line)
        except ControlError:
            continue
        assert isinstance(message, Launch | Drain | Stop | Progress | Ready | ProcessFailed)


@given(st.text(max_size=200), st.one_of(st.none(), st.floats(0, 1)))
def test_any_text_survives(text: str, fraction: float | None) -> None:
    line = encode(Progress(text=text, fraction=fraction)) if _encodable(text) else None
    if line is not None:
        assert line.index(b"\n") == len(line) - 1
        assert decode_for_supervisor(line[:-1]) == Progress(text=text, fraction=fraction)


def _encodable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def test_a_message_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(ControlError, match="at most"):
        encode(ProcessFailed(message="x" * MAX_LINE_BYTES, fatal=False))


def test_messages_are_immutable() -> None:
    message = Progress(text="a")
    with pytest.raises(AttributeError):
        message.text = "b"  # type: ignore[misc]
    assert msgspec.structs.replace(message, text="b") == Progress(text="b")


# -- lines ---------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line), max_size=8), st.data())
def test_lines_do_not_depend_on_how_they_are_cut(lines: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(line + b"\n" for line in lines)
    buffer, found, at = LineBuffer(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, len(stream) - at))
        found += buffer.feed(stream[at : at + size])
        at += size
    assert found == lines


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_without_end_is_refused(end: bytes) -> None:
    buffer = LineBuffer()
    assert buffer.feed(b"x" * (MAX_LINE_BYTES - 1)) == []
    with pytest.raises(ControlError, match="more than"):
        buffer.feed(b"x" + end)
