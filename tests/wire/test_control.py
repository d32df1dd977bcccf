import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.options import ServeConfig
from penstock.wire.control import (
    MAX_LINE_BYTES,
    AgreedState,
    AgreedStates,
    Beat,
    ChildChannel,
    ChildGone,
    ControlChannel,
    ControlError,
    Drain,
    DrainEngine,
    EnginesDraining,
    Failed,
    Launch,
    LineBuffer,
    Order,
    Progress,
    ProposeState,
    Ready,
    Report,
    StatesAdopted,
    Stop,
    SupervisorGone,
    SupervisorMetrics,
    decode_for_child,
    decode_for_supervisor,
    encode,
)

LAUNCH = Launch(
    role="api-server",
    index=1,
    epoch=2,
    config=ServeConfig(model="m", api_key=["secret"], kv_cache_memory=1 << 40),
    run_dir="/run/p",
    model_dir="/models/m",
    tokenizer_dir="/models/t",
    served_model_names=["m"],
    api_server_count=2,
    engine_count=3,
    supervisor_pid=77,
    listen_fd=5,
)


@pytest.fixture
def ends() -> Iterator[tuple[ChildChannel, ControlChannel]]:
    supervisor, theirs = ChildChannel.pair()
    child = ControlChannel(theirs.detach())
    yield supervisor, child
    supervisor.close()
    child.close()


# -- messages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (Drain(), b'{"type":"drain","replaced":false}\n'),
        (Drain(replaced=True), b'{"type":"drain","replaced":true}\n'),
        (Beat(), b'{"type":"beat"}\n'),
        (DrainEngine(rank=1, draining=True), b'{"type":"drain-engine","rank":1,"draining":true}\n'),
        (SupervisorMetrics(snapshot=b"abc"), b'{"type":"supervisor-metrics","snapshot":"YWJj"}\n'),
        (EnginesDraining(ranks=[0, 2]), b'{"type":"engines-draining","ranks":[0,2]}\n'),
        (
            ProposeState(name="sleep", key="k", base=2, arguments={"level": 1}),
            b'{"type":"propose-state","name":"sleep","key":"k","base":2,"arguments":{"level":1}}\n',
        ),
        (
            AgreedStates(
                revision=3, adopted=2, states=[AgreedState(name="a", key="k", version=3, arguments={})]
            ),
            b'{"type":"agreed-states","revision":3,"adopted":2,'
            b'"states":[{"name":"a","key":"k","version":3,"arguments":{}}]}\n',
        ),
        (StatesAdopted(revision=3), b'{"type":"states-adopted","revision":3}\n'),
        (Stop(), b'{"type":"stop"}\n'),
        (Progress(text="weights", fraction=0.5), b'{"type":"progress","text":"weights","fraction":0.5}\n'),
        (Progress(text="a"), b'{"type":"progress","text":"a","fraction":null}\n'),
        (
            Ready(info={"device": "cpu", "blocks": 8, "gib": 1.5, "graphs": True}),
            b'{"type":"ready","info":{"device":"cpu","blocks":8,"gib":1.5,"graphs":true}}\n',
        ),
        (Failed(message="no", fatal=True), b'{"type":"failed","message":"no","fatal":true}\n'),
    ],
)
def test_bytes_of_each_message(message: Order | Report, line: bytes) -> None:
    assert encode(message) == line
    decode = decode_for_child if isinstance(message, Order) else decode_for_supervisor
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
    line = encode(LAUNCH).replace(b'"api-server"', b'"gateway"')
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
        assert isinstance(message, Launch | Drain | Stop | Progress | Ready | Failed)


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
        encode(Failed(message="x" * MAX_LINE_BYTES, fatal=False))


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


# -- both ends -----------------------------------------------------------------------------------------


def test_launch_is_read_first_and_kept(ends: tuple[ChildChannel, ControlChannel]) -> None:
    supervisor, child = ends
    supervisor.send(LAUNCH)
    supervisor.send(Drain())
    assert child.launch == LAUNCH
    assert child.launch is child.launch
    # The drain came in the same read as the launch.
    assert child.receive() == [Drain()]
    assert child.receive() == []


def test_launch_waits_for_the_whole_line() -> None:
    ours, theirs = socket.socketpair()
    child = ControlChannel(theirs.detach())
    line = encode(LAUNCH)
    ours.sendall(line[:100])
    found: list[Launch] = []
    reader = threading.Thread(target=lambda: found.append(child.launch))
    reader.start()
    ours.sendall(line[100:])
    reader.join(timeout=10)
    assert found == [LAUNCH]
    ours.close()
    child.close()


def test_something_else_than_launch_is_refused(ends: tuple[ChildChannel, ControlChannel]) -> None:
    supervisor, child = ends
    supervisor.send(Stop())
    with pytest.raises(ControlError, match="expected Launch, got Stop"):
        _ = child.launch


def test_a_second_launch_is_refused(ends: tuple[ChildChannel, ControlChannel]) -> None:
    supervisor, child = ends
    supervisor.send(LAUNCH)
    assert child.launch == LAUNCH
    supervisor.send(LAUNCH)
    with pytest.raises(ControlError, match="second Launch"):
        child.receive()


def test_reports_arrive_in_order(ends: tuple[ChildChannel, ControlChannel]) -> None:
    supervisor, child = ends
    assert supervisor.receive() == []
    child.progress("weights", 0.25)
    assert not child.reported_ready
    child.ready({"device": "cpu"})
    assert child.reported_ready
    child.failed("gone wrong", fatal=False)
    assert supervisor.receive() == [
        Progress(text="weights", fraction=0.25),
        Ready(info={"device": "cpu"}),
        Failed(message="gone wrong", fatal=False),
    ]


def test_orders_before_the_end_are_returned_before_it_is_raised(
    ends: tuple[ChildChannel, ControlChannel],
) -> None:
    supervisor, child = ends
    supervisor.send(LAUNCH)
    assert child.launch == LAUNCH
    supervisor.send(Drain())
    supervisor.send(Stop())
    supervisor.close()
    assert child.receive() == [Drain(), Stop()]
    for _ in range(2):
        with pytest.raises(SupervisorGone):
            child.receive()


def test_a_child_without_supervisor_learns_it_from_every_method() -> None:
    for use in (
        lambda child: child.launch,
        lambda child: child.progress("x"),
        lambda child: child.ready(),
        lambda child: child.failed("x", fatal=True),
    ):
        supervisor, theirs = ChildChannel.pair()
        child = ControlChannel(theirs.detach())
        supervisor.close()
        with pytest.raises(SupervisorGone):
            use(child)
        child.close()


def test_reports_before_the_end_of_a_child_are_read(ends: tuple[ChildChannel, ControlChannel]) -> None:
    supervisor, child = ends
    supervisor.send(LAUNCH)  # never read: the kernel tells that as a reset connection
    child.failed("why", fatal=True)
    child.close()
    assert supervisor.receive() == [Failed(message="why", fatal=True)]
    with pytest.raises(ChildGone):
        supervisor.receive()
    with pytest.raises(ChildGone):
        supervisor.send(Stop())


def test_beats_never_wait_for_the_supervisor(ends: tuple[ChildChannel, ControlChannel]) -> None:
    supervisor, child = ends
    for _ in range(20_000):  # far more than a socket's buffer holds
        child.beat()
    reports = supervisor.receive()
    assert 0 < len(reports) < 20_000
    assert set(reports) == {Beat()}
    child.ready()
    assert supervisor.receive() == [Ready()]


def test_rubbish_from_a_child_is_named() -> None:
    ours, theirs = socket.socketpair()
    supervisor = ChildChannel(ours)
    theirs.sendall(b"Loading weights...\n")
    with pytest.raises(ControlError, match="Loading weights"):
        supervisor.receive()
    supervisor.close()
    theirs.close()


def test_reports_of_several_threads_do_not_mix(ends: tuple[ChildChannel, ControlChannel]) -> None:
    supervisor, child = ends
    texts = [character * 3000 for character in "abcd"]

    def send(text: str) -> None:
        for _ in range(20):
            child.progress(text)

    threads = [threading.Thread(target=send, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    received: list[Progress | Ready | Failed] = []
    with socket.socket(fileno=socket.dup(supervisor.fileno())) as waiting:
        waiting.settimeout(10)
        while len(received) < 80:
            waiting.recv(1, socket.MSG_PEEK)
            received += supervisor.receive()
    for thread in threads:
        thread.join()
    assert {message.text for message in received if isinstance(message, Progress)} == set(texts)


def test_messages_are_immutable() -> None:
    message = Progress(text="a")
    with pytest.raises(AttributeError):
        message.text = "b"  # type: ignore[misc]
    assert msgspec.structs.replace(message, text="b") == Progress(text="b")
