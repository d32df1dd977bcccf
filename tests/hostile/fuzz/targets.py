"""The targets by name, each with the inputs that a run starts from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.http.http2 import frames
from penstock.http.http2.header_blocks import encode_fields
from penstock.metrics.snapshot import Distribution, Series, Snapshot
from penstock.wire import control, coordination, waves
from penstock.wire.frames import TokenFrame, encode_frame
from penstock.wire.logprobs import Logprobs, PromptLogprobs
from penstock.wire.messages import (
    Abort,
    ApplyStates,
    DesiredState,
    Disconnect,
    EngineMetrics,
    ObservedState,
    RpcCall,
    SamplingParams,
    StatesObserved,
    Submit,
    encode,
)
from tests.gateway.foreign_streams import STREAMS
from tests.hostile.fuzz import event_targets, http2_targets, http_targets, text_targets, wire_targets

FINDINGS = Path(__file__).parent / "findings"
"""One folder per target: inputs that once failed."""

NO_CUTS = bytes(14)


@dataclass(frozen=True)
class Target:
    """``run`` raises for an input that shows a fault."""

    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]

    def findings(self, name: str) -> list[Path]:
        folder = FINDINGS / name
        return sorted(folder.iterdir()) if folder.is_dir() else []


def _int32(*values: int) -> Any:
    return np.array(values, np.int32)


def _frame_seeds() -> tuple[bytes, ...]:
    plain = TokenFrame(step=1, stream=_int32(0, 1), position=_int32(0, 5), tokens=_int32(7, 8))
    wide = TokenFrame(
        step=2,
        stream=_int32(3, 4),
        position=_int32(0, 0),
        tokens=_int32(1, 2, 3),
        count=_int32(2, 1),
        finish=np.array([0, 1], np.int8),
        cached=_int32(4, 0),
        logprobs=Logprobs(
            _int32(0, 2), np.ones((2, 2), np.int32), np.zeros((2, 2), np.float32), _int32(1, 1)
        ),
        prompt=PromptLogprobs(
            _int32(1), _int32(0), np.ones((1, 1), np.int32), np.zeros((1, 1), np.float32), _int32(1)
        ),
        kv_transfer_params={4: b"{}"},
    )
    pairs = [encode_frame(frame) for frame in (plain, wide)]
    return tuple(wire_targets.two_parts(*pair) for pair in pairs)


def _messages() -> tuple[bytes, ...]:
    sampling = SamplingParams(
        max_tokens=4, seed=1, stop_token_ids=(2,), logit_bias={3: 0.5}, bad_words=((1, 2),)
    )
    snapshot = Snapshot("engine 0", 0, 1, [Series("x", ("y",), Distribution((1, 2), 3.0))])
    made: tuple[Any, ...] = (
        Submit(1, b"\1\0\0\0", sampling, kv_transfer_params=b"{}"),
        Abort([1, 2], True),
        Disconnect(),
        RpcCall(1, "reset", {"level": [1, {"a": None}]}, "key"),
        ApplyStates([DesiredState("sleep", 1, {"level": [1, {"a": None}]})]),
        StatesObserved([ObservedState("sleep", 1, None, {"level": 1})]),
        EngineMetrics(msgspec.msgpack.encode(snapshot)),
        waves.Vote(3, True),
        *_members(),
        snapshot,
    )
    return tuple(map(encode, made))


def _members() -> tuple[Any, ...]:
    protocol, traits = (
        coordination.COORDINATOR_PROTOCOL_VERSION,
        dict.fromkeys(coordination.ENGINE_TRAITS, "x"),
    )
    return (
        coordination.EngineJoin(protocol, 1, 0, 5, "tcp://10.0.0.1:5000", traits),
        coordination.ServerJoin(protocol, 0, 0),
        coordination.EngineReport(4, 1, 2, 0.5, [0, 3]),
        coordination.MemberLeave(),
        coordination.ProcessMetrics("engine 1", 0, 3, b"snapshot", 5),
    )


def _coordinator_seed() -> bytes:
    parts = [encode(message) for message in _members()]
    return b"".join(bytes((len(part), at % 4)) + part for at, part in enumerate([*parts, *parts]))


def _control_seeds() -> tuple[bytes, ...]:
    lines: tuple[Any, ...] = (
        control.Drain(replaced=True),
        control.Ready(info={"device": "cpu"}),
        control.Progress(text="loading", fraction=0.5),
        control.ChangeState(name="sleep", key="k", asked="sleep", base=0, stages=[{"level": 1}]),
        control.StatesReport(states={"sleep": control.StateReport(1, "no room", 0)}),
        control.SupervisorMetrics(snapshot=b"x"),
    )
    return (NO_CUTS + b"".join(map(control.encode, lines)),)


_HTTP = (
    b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /x?y=1 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2;e=1\r\n{}\r\n0\r\nT: 1\r\n\r\n",
    b"HEAD * HTTP/1.0\r\nConnection: keep-alive\r\nExpect: 100-continue\r\nUpgrade: h2c\r\n\r\n",
)
_HTTP2 = (
    frames.frame(frames.HEADERS, 5, 1, http2_targets.BLOCKS[0]) + frames.window_update(0, 9),
    frames.frame(frames.HEADERS, 4, 1, http2_targets.BLOCKS[2]) + frames.frame(frames.DATA, 1, 1, b"12345"),
    frames.frame(frames.HEADERS, 1, 1, http2_targets.BLOCKS[7][:5])
    + frames.frame(frames.CONTINUATION, 4, 1, http2_targets.BLOCKS[7][5:])
    + frames.frame(frames.HEADERS, 5, 3, b"\x82\x86\x84\x41\x01h\xbe")
    + frames.rst_stream(3, 8),
    frames.settings_frame({4: 100, 5: 20_000}) + frames.ping(b"12345678") + frames.frame(2, 0, 5, bytes(5)),
)
_HEAD = encode_fields([(b":status", b"200"), (b"content-type", b"text/event-stream")])
_HTTP2_REPLIES = (
    frames.frame(frames.HEADERS, 4, 1, _HEAD)
    + frames.frame(frames.DATA, 0, 1, b"data: {}\n\n")
    + frames.frame(frames.HEADERS, 4, 3, _HEAD)
    + frames.frame(frames.DATA, 8, 3, b"\2ab\0\0")
    + frames.frame(frames.DATA, 1, 1, b"data: [DONE]\n\n")
    + frames.frame(frames.HEADERS, 5, 3, encode_fields([(b"trailer", b"1")])),
    frames.frame(frames.HEADERS, 0, 1, _HEAD[:1])
    + frames.frame(frames.CONTINUATION, 4, 1, _HEAD[1:])
    + frames.ping(bytes(8))
    + frames.window_update(1, 9)
    + frames.rst_stream(3, 7)
    + frames.goaway(1, 0),
    frames.frame(frames.HEADERS, 5, 1, encode_fields([(b":status", b"204"), (b"content-length", b"0")]))
    + frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 1, frames.MAX_CONCURRENT_STREAMS: 1})
    + frames.frame(frames.HEADERS, 4, 3, encode_fields([(b":status", b"200"), (b"content-length", b"3")]))
    + frames.frame(frames.DATA, 1, 3, b"abc"),
)
_REPLIES = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"9\r\ndata: 1\n\n\r\n0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 404 Not Found\r\nConnection: close\r\n\r\nno",
    b"HTTP/1.1 204 No Content\r\n\r\nHTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n",
)
_EVENTS = (
    b'data: {"choices":[{"index":0,"text":" a"}]}\n\n' * 2
    + b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\ndata: [DONE]\n\n',
    b'event: content_block_delta\r\ndata: {"type":"content_block_delta","delta":{"text":"a"}}\r\n\r\n'
    b": c\r\n\r\n",
    b'\xef\xbb\xbfdata: {"error":{"message":"gone"}}\r\r'
    b'data: {"type":"message_start","message":{"usage":{}}}\r\r',
    b'data: {"type":"response.completed","response":{"usage":{"input_tokens":1}}}\n\n',
    *(stream.raw for stream in STREAMS),
)
_TEXTS = (
    "\0\x05\x06\x08\n\1",
    "\2hm\3\x0f\x05\x06\x08\n",
    "\4\x09\x07\x08\n;",
    "\0{",
    "\x17\x0f\x17\x0c",
)
_BODIES = (
    b'{"prompt": "x", "max_tokens": 4, "stop": ["a"], "logit_bias": {"1": 2.5}, "n": 2, "stream": true}',
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "logprobs": true, '
    b'"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}}',
    b'{"tokens": [1, 2, 3]}',
    b'{"prompt": [[1], [2]], "structured_outputs": {"regex": "a+"}, '
    b'"stream_options": {"include_usage": true}}',
)

TARGETS: dict[str, Target] = {
    "http-server": Target(http_targets.http_server, tuple(bytes(8) + each * 2 for each in _HTTP)),
    "http2-bytes": Target(http2_targets.http2_bytes, tuple(bytes(8) + each for each in _HTTP2)),
    "http2-frames": Target(http2_targets.http2_frames, (bytes(range(200)), bytes(range(255, 60, -3)))),
    "http2-client": Target(http_targets.http2_client, tuple(bytes(8) + each for each in _HTTP2_REPLIES)),
    "http-client": Target(http_targets.http_client, tuple(bytes(9) + each for each in _REPLIES)),
    "frames": Target(wire_targets.frames, _frame_seeds()),
    "made-frames": Target(wire_targets.made_frames, (bytes(range(200)), b"\7" + b"\1" * 150)),
    "messages": Target(wire_targets.messages, _messages()),
    "coordinator": Target(wire_targets.coordinator, (_coordinator_seed(),)),
    "control": Target(wire_targets.control_lines, _control_seeds()),
    "sse": Target(event_targets.sse, tuple(NO_CUTS + each for each in _EVENTS)),
    "observer": Target(event_targets.observer, tuple(NO_CUTS + each for each in _EVENTS)),
    "parsers": Target(text_targets.output_parsers, tuple(bytes(12) + each.encode() for each in _TEXTS)),
    "bodies": Target(text_targets.bodies, _BODIES),
    "conversations": Target(text_targets.conversations, (bytes(range(120)), bytes(range(255, 100, -1)))),
}
