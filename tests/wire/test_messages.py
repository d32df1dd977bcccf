"""The wire format of control messages, byte by byte, and how it may grow."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.decoding import decode_from_engine, decode_from_server
from penstock.wire.media.items import MediaInfo, MediaItem, PagePiece, PagesWanted
from penstock.wire.messages import (
    Abort,
    Admitted,
    ApplyStates,
    CacheHints,
    DesiredState,
    Disconnect,
    Draining,
    EngineInfo,
    EngineMetrics,
    EngineMetricsQuery,
    FrameHeader,
    FromEngine,
    FromServer,
    GoAway,
    Hello,
    KeptPrefix,
    LoraInfo,
    ObservedState,
    RoutedExperts,
    RpcCall,
    RpcReply,
    SamplingParams,
    Started,
    StatesObserved,
    StreamFailed,
    Submit,
    SubmitChoice,
    ThinkingLimit,
    Welcome,
    WireError,
    encode,
)
from penstock.wire.pooling import PoolingInfo, PoolingParams, PoolingTask

PROMPT = b"\x01\x00\x00\x00\xff\x7f\x00\x00"
GREEDY = SamplingParams(16, 7)
EVERYTHING = SamplingParams(
    max_tokens=16,
    seed=(1 << 63) - 1,
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=0.25,
    frequency_penalty=-0.25,
    min_tokens=2,
    ignore_eos=True,
    stop_token_ids=(3, 4),
    logprobs=5,
    prompt_logprobs=0,
    logit_bias={7: -1.5},
    allowed_token_ids=(8, 9),
    bad_words=((1, 2), (3,)),
    grammar="g",
    seeded=True,
    logprob_token_ids=(6, 4),
    routed_experts=True,
    thinking=ThinkingLimit(9, ((1,), (2, 3)), ((4,),), (4, 5), (6,), True),
)
GREEDY_HEX = (
    "dc00161007cb3ff0000000000000cb3ff000000000000000cb0000000000000000cb3ff0000000000000"
    "cb0000000000000000cb000000000000000000c290ffffc0c090c0c290c2c0"
)
EVERYTHING_HEX = (
    "dc001610cf7fffffffffffffffcb3fe0000000000000cb3feccccccccccccd28cb3fa999999999999acb3ff199999999999a"
    "cb3fd0000000000000cbbfd000000000000002c392030405008107cbbff8000000000000920809929201029103a167c3920604c396099291019202039191049204059106c3"
)

POOLING = PoolingParams(PoolingTask.CLASSIFY, b"\2\0\0\0", 9, False, False, b"\1\0\0\0", 5)
KEY = b"k" * 16
POOLING_HEX = "9702c4040200000009c2c2c4040100000005"

FROM_SERVER: list[tuple[FromServer, str]] = [
    (Hello(1, 2, 3, 4, 5, "6"), "97010102030405a136"),
    (
        Submit(5, PROMPT, GREEDY),
        "dc00150205c40801000000ff7f0000" + GREEDY_HEX + "0100c00000c0c090c2a0a090c000c0c090",
    ),
    (
        Submit(
            5,
            PROMPT,
            EVERYTHING,
            10,
            -1,
            "s",
            2,
            250,
            "a",
            b"{}",
            resubmitted=True,
            adapter_digest="d",
            ids=("x", "cmpl-x"),
            hints=CacheHints(300, "s", b"{}"),
        ),
        "dc00150205c40801000000ff7f0000"
        + EVERYTHING_HEX
        + "0affa17302ccfaa161c4027b7d90c3a0a16492a178a6636d706c2d78c00093cd012ca173c4027b7dc090",
    ),
    (
        Submit(
            5, PROMPT, GREEDY, choices=(SubmitChoice(6, 8, 15), SubmitChoice(7, 9, 14, 2, PROMPT, PROMPT))
        ),
        "dc00150205c40801000000ff7f0000"
        + GREEDY_HEX
        + "0100c00000c0c0929606080fffc0c40096070 90e02c40801000000ff7f0000c40801000000ff7f0000"
        "c2a0a090c000c0c090".replace(" ", ""),
    ),
    (
        Submit(5, PROMPT, GREEDY, prefix=KeptPrefix(3, 1000, True), keep=4),
        "dc00150205c40801000000ff7f0000" + GREEDY_HEX + "0100c00000c0c090c2a0a0909303cd03e8c304c0c090",
    ),
    (
        Submit(5, PROMPT, msgspec.structs.replace(GREEDY, max_tokens=1), pooling=POOLING),
        "dc00150205c40801000000ff7f0000"
        + GREEDY_HEX.replace("dc00161007", "dc00160107")
        + "0100c00000c0c090c2a0a090c000c0"
        + POOLING_HEX
        + "90",
    ),
    (
        Submit(5, PROMPT, GREEDY, media=(MediaItem(KEY, 0, 2, 9, (1, 2)),)),
        "dc00150205c40801000000ff7f0000"
        + GREEDY_HEX
        + "0100c00000c0c090c2a0a090c000c0c09195c4106b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b000209920102",
    ),
    (PagePiece(KEY, 5, b"p", b"d"), "9508c4106b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b05c40170c40164"),
    (Abort([1, 70000]), "93039201ce00011170c2"),
    (Abort([1], stopped=True), "93039101c3"),
    (Disconnect(), "9104"),
    (EngineMetricsQuery(7), "920607"),
    (RpcCall(9, "profile", {"on": True}), "950509a770726f66696c6581a26f6ec3a0"),
    (
        ApplyStates([DesiredState("sleep", 3, {"level": 1}), DesiredState("a", 4, {}, True, True)]),
        "92079295a5736c6565700381a56c6576656c01c2c295a1610480c3c3",
    ),
]
POOLING_INFO = PoolingInfo((0, 2), 8, 3, True)
LORA = LoraInfo(4, 16, 64, {"m.q": (8, 16)})
INFO = EngineInfo(
    "torch",
    4096,
    32000,
    256,
    (1, 2),
    "cuda:0",
    "bfloat16",
    65536,
    True,
    {"block_size": "16"},
    LORA,
    POOLING_INFO,
    MediaInfo(7, 9),
)
FROM_ENGINE: list[tuple[FromEngine, str]] = [
    (Draining(), "9116"),
    (
        Welcome(1, 2, 3, INFO, 4, 5),
        "97100102039da5746f726368cd1000cd7d00cd0100920102a6637564613a30a862666c6f61743136ce00010000"
        "c381aa626c6f636b5f73697a65a231369404104081a36d2e71920810959200020803c3009207090405",
    ),
    (FrameHeader(12, [0, 3, 1, 3, 3, 3], 4, 5, 0.5, 70), "99110c960003010303030405cb3fe000000000000046c000"),
    (
        FrameHeader(12, [0, 1, 1, 1, 3, 1], 4, 5, 0.5, 70, {3: b"{}"}, 9),
        "99110c960001010103010405cb3fe0000000000000468103c4027b7d09",
    ),
    (
        StreamFailed(5, 17, "engine_error", "it broke"),
        "96120511ac656e67696e655f6572726f72a869742062726f6b6500",
    ),
    (Started(5), "921705"),
    (Admitted(5, 0.5, 0.25), "941a05cb3fe0000000000000cb3fd0000000000000"),
    (RpcReply(9, None, {"a": 1.0}), "971309c081a161cb3ff000000000000000c2a0"),
    (RpcReply(9, "no", None, 300, True, "conflict"), "971309a26e6fc0cd012cc3a8636f6e666c696374"),
    (GoAway("stopping"), "9214a873746f7070696e67"),
    (
        StatesObserved([ObservedState("sleep", 3, None, {"level": 1}, 9), ObservedState("a", 4, "no")]),
        "92189295a5736c65657003c081a56c6576656c010995a16104a26e6f8000",
    ),
    (RoutedExperts(5, 2, 1, 1, b"\x03\x04"), "961905020101c4020304"),
    (PagesWanted(KEY), "921bc4106b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b"),
    (EngineMetrics(b"\x01\x02", 4, 5, 0.5, 2, 9), "9715c40201020405cb3fe00000000000000209"),
]


def decoder_of(message: object) -> Any:
    return decode_from_server if isinstance(message, get_args(FromServer)) else decode_from_engine


def test_every_message_has_golden_bytes() -> None:
    assert {type(message) for message, _ in FROM_SERVER} == set(get_args(FromServer))
    assert {type(message) for message, _ in FROM_ENGINE} == set(get_args(FromEngine))


@pytest.mark.parametrize(("message", "golden"), [*FROM_SERVER, *FROM_ENGINE])
def test_golden_bytes(message: FromServer | FromEngine, golden: str) -> None:
    assert encode(message).hex() == golden
    assert decoder_of(message)(bytes.fromhex(golden)) == message
    assert decoder_of(message)(memoryview(bytes.fromhex(golden))) == message


# -- growth


def _required(message: Any) -> int:
    """Array elements that a peer must send: the tag and the fields without a default."""
    return 1 + sum(field.required for field in msgspec.structs.fields(message))


@pytest.mark.parametrize(
    ("message", "defaults"),
    [
        (
            Submit(
                5, PROMPT, GREEDY, 10, -1, "s", 2, 250, "a", b"{}", (SubmitChoice(6, 8, 15),), True, "", "d"
            ),
            Submit(5, PROMPT, GREEDY),
        ),
        (RpcCall(9, "profile", {"on": True}, "k"), RpcCall(9, "profile")),
        (FrameHeader(12, [], 4, 5, 0.5, 7, {3: b"{}"}, 9), FrameHeader(12, [])),
        (RpcReply(9, "error", 1, 2, True, "code"), RpcReply(9)),
        (Abort([1], stopped=True), Abort([1])),
        (EngineMetrics(b"\x01", 4, 5, 0.5), EngineMetrics(b"\x01")),
    ],
)
def test_a_peer_that_knows_fewer_fields_is_understood(message: Any, defaults: Any) -> None:
    array = msgspec.msgpack.decode(encode(message))
    assert len(array) > _required(message)
    short = msgspec.msgpack.encode(array[: _required(message)])
    assert decoder_of(message)(short) == defaults


def test_a_peer_that_knows_fewer_sampling_fields_is_understood() -> None:
    array = msgspec.msgpack.decode(encode(Submit(5, PROMPT, EVERYTHING)))
    array[3] = array[3][:3]
    submit = decode_from_server(msgspec.msgpack.encode(array))
    assert isinstance(submit, Submit)
    assert submit.sampling == SamplingParams(16, (1 << 63) - 1, 0.5)


def test_a_peer_that_knows_more_fields_is_understood() -> None:
    for message, _ in [*FROM_SERVER, *FROM_ENGINE]:
        array = [*msgspec.msgpack.decode(encode(message)), "a later field", {"x": 1}]
        assert decoder_of(message)(msgspec.msgpack.encode(array)) == message
    array = msgspec.msgpack.decode(encode(Submit(5, PROMPT, GREEDY)))
    array[3].append("a later field")
    assert decode_from_server(msgspec.msgpack.encode(array)) == Submit(5, PROMPT, GREEDY)


@pytest.mark.parametrize(("message", "golden"), [*FROM_SERVER, *FROM_ENGINE])
def test_a_required_field_left_out_is_refused(message: Any, golden: str) -> None:
    array = msgspec.msgpack.decode(bytes.fromhex(golden))
    with pytest.raises(WireError):
        decoder_of(message)(msgspec.msgpack.encode(array[: _required(message) - 1]))


# -- what is refused


@pytest.mark.parametrize(
    "message",
    [
        Submit(-1, PROMPT, GREEDY),
        Submit(1 << 31, PROMPT, GREEDY),
        Submit(0, b"", GREEDY),
        Submit(0, PROMPT[:7], GREEDY),
        Submit(0, PROMPT, GREEDY, choices=(SubmitChoice(-1, 0, 1),)),
        Submit(0, PROMPT, GREEDY, choices=(SubmitChoice(1, 0, 1, -1, b""),)),
        Submit(0, PROMPT, GREEDY, choices=(SubmitChoice(1, 0, 1, -1, None, PROMPT[:7]),)),
        Submit(0, PROMPT, GREEDY, 0),
        Submit(0, PROMPT, GREEDY, 1 << 15),
        Submit(0, PROMPT, GREEDY, prefix=KeptPrefix(0, 1)),
        Submit(0, PROMPT, GREEDY, prefix=KeptPrefix(1, 0)),
        Submit(0, b"", GREEDY, prefix=KeptPrefix(1, 1)),
        Submit(0, PROMPT, SamplingParams(1, -1)),
        Submit(0, PROMPT, SamplingParams(1, 1 << 63)),
        Submit(0, PROMPT, SamplingParams(1, 0, logprobs=(1 << 20) + 1)),
        Submit(0, PROMPT, SamplingParams(1, 0, stop_token_ids=(-1,))),
        Abort([-1]),
        GoAway("not from an API server"),
        5,
        [],
        [99],
        ["Hello", 1, 2, 3],
        [1, "1", 2, 3],
        {"protocol": 1},
    ],
)
def test_refused_from_a_server(message: Any) -> None:
    with pytest.raises(WireError):
        decode_from_server(msgspec.msgpack.encode(message))


def nested(depth: int) -> bytes:
    """RpcCall(0, "m", {"a": [[[…]]]})"""
    return bytes.fromhex("940500a16d81a161") + b"\x91" * depth + b"\xc0"


@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"\x94",
        encode(Hello(1, 2, 3)) + b"\x00",
        nested(100_000),
        bytes.fromhex("940500a16d81a161819180c0"),  # a map with [{}] as its key
        bytes.fromhex("940500a16d81a1618181a16101c0"),  # a map with a map as its key
        bytes.fromhex("940500a1ff80"),  # a string that is not UTF-8
        bytes.fromhex("940500a16d81a161d7ff" + "ff" * 8),  # a timestamp that is none
    ],
)
def test_refused_bytes(part: bytes) -> None:
    with pytest.raises(WireError):
        decode_from_server(part)


def test_nesting_that_is_taken() -> None:
    assert isinstance(decode_from_server(nested(20)), RpcCall)


ANY_GOLDEN = st.sampled_from([bytes.fromhex(golden) for _, golden in [*FROM_SERVER, *FROM_ENGINE]])


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """A valid encoding with a few bytes replaced, inserted, or cut off."""
    part = bytearray(draw(ANY_GOLDEN))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(part)))
        match draw(st.sampled_from(["replace", "insert", "cut", "drop"])):
            case "replace":
                part[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case "insert":
                part[at:at] = draw(st.binary(min_size=1, max_size=4))
            case "cut":
                del part[at:]
            case "drop":
                del part[at : at + 1]
    return bytes(part)


@given(st.one_of(st.binary(max_size=200), mutations()))
def test_any_bytes_are_a_message_or_a_wire_error(part: bytes) -> None:
    for decode, allowed in (
        (decode_from_server, get_args(FromServer)),
        (decode_from_engine, get_args(FromEngine)),
    ):
        try:
            message = decode(part)
        except WireError:
            continue
        assert isinstance(message, allowed)
        assert decode(encode(message)) == message or "nan" in repr(message)
