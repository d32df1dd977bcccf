"""What parses the bytes of other processes: token frames, messages, and the lines of the control channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.coordinator.state import CoordinatorState
from penstock.metrics.snapshot import decode_snapshot
from penstock.wire import control, coordination, waves
from penstock.wire.decoding import decode_from_engine, decode_from_server
from penstock.wire.frames import FinishReason, TokenFrame, decode_frame, encode_frame
from penstock.wire.logprobs import Logprobs, PromptLogprobs
from penstock.wire.messages import (
    FrameHeader,
    WireError,
    encode,
)
from penstock.wire.regroup import merge_frames, take_rows
from tests.hostile.fuzz.byte_source import ByteSource

MAX_ROWS = 8


def two_parts(header: bytes, body: bytes) -> bytes:
    """A frame's two parts as one input of :func:`frames`: the length of the first in two bytes."""
    return len(header).to_bytes(2, "little") + header + body


def _decoded(data: bytes) -> TokenFrame | None:
    source = ByteSource(data)
    header, body = source.take(source.number(2)), source.rest()
    try:
        message = decode_from_engine(header)
        return decode_frame(message, body) if isinstance(message, FrameHeader) else None
    except WireError:
        return None


def frames(data: bytes) -> None:
    """A token frame of an engine is refused with WireError, or it can be cut, merged and sent on whole."""
    frame = _decoded(data)
    if frame is None:
        return
    header, body = encode_frame(frame)
    again = _decoded(two_parts(header, body))
    assert again is not None
    assert encode_frame(again) == [header, body]
    rows = np.flatnonzero(np.arange(frame.rows) % 2 == 0)
    part = take_rows(frame, rows)
    assert part.rows == len(rows)
    try:
        merged = merge_frames([frame, part])
    except WireError:
        return
    assert len(merged.tokens) == len(frame.tokens) + len(part.tokens)
    assert (np.diff(merged.stream) > 0).all()


def made_frames(data: bytes) -> None:
    """The same, from a frame that is well formed but for some changed bytes of its columns."""
    source = ByteSource(data)
    rows = source.below(MAX_ROWS) + 1
    count = np.array([source.below(4) for _ in range(rows)], np.int32)
    tokens = int(count.sum())
    frame = TokenFrame(
        step=source.below(100),
        stream=np.array([source.below(16) for _ in range(rows)], np.int32),
        position=np.array([source.below(300) for _ in range(rows)], np.int32),
        tokens=np.array([source.below(70000) for _ in range(tokens)], np.int32),
        count=count,
        finish=np.array([source.below(len(FinishReason)) for _ in range(rows)], np.int8),
        cached=np.arange(rows, dtype=np.int32) if source.flag() else None,
        logprobs=_logprobs(source, tokens) if tokens and source.flag() else None,
        prompt=_prompt_logprobs(source, rows) if source.flag() else None,
        kv_transfer_params={source.below(16): b"{}"} if source.flag() else None,
    )
    header, body = encode_frame(frame)
    changed = bytearray(body)
    for _ in range(source.below(4)):
        changed[source.number(2) % len(changed)] = source.byte()
    frames(two_parts(header, bytes(changed)))


def _logprobs(source: ByteSource, tokens: int) -> Logprobs:
    entries = np.arange(0, tokens, 1 + source.below(3), dtype=np.int32)
    shape = len(entries), 1 + source.below(3)
    return Logprobs(
        entries,
        np.full(shape, source.signed(), np.int32),
        np.full(shape, -1.5, np.float32),
        np.ones(len(entries), np.int32),
    )


def _prompt_logprobs(source: ByteSource, rows: int) -> PromptLogprobs:
    row = np.sort(np.array([source.below(rows) for _ in range(1 + source.below(4))], np.int32))
    shape = len(row), 1 + source.below(3)
    return PromptLogprobs(
        row,
        np.arange(len(row), dtype=np.int32),
        np.full(shape, source.signed(), np.int32),
        np.full(shape, -1.5, np.float32),
        np.ones(len(row), np.int32),
    )


_DECODERS: tuple[Callable[[bytes], Any], ...] = (
    decode_from_server,
    decode_from_engine,
    waves.decode_from_peer,
    coordination.decode_from_member,
    coordination.decode_from_coordinator,
)


def messages(data: bytes) -> None:
    """Each decoder refuses a message with WireError, or what it returns can be encoded and read again."""
    for decode in _DECODERS:
        try:
            message = decode(data)
        except WireError:
            continue
        again = encode(message)
        assert encode(decode(again)) == again
    try:
        decode_snapshot(data)
    except ValueError as error:
        assert not isinstance(error, UnicodeDecodeError)  # noqa: PT017 - the documented type covers it


def coordinator(data: bytes) -> None:
    """Messages of hostile members: length (one byte), member (one byte), message. The coordinator's state
    takes them or refuses them, and its updates can be encoded."""
    source = ByteSource(data)
    state = CoordinatorState(ranks=4, local_ranks=frozenset((0,)))
    now = 0.0
    while source:
        size, member = source.byte(), source.byte() % 4
        part = source.take(size)
        now += 0.3 * (member + 1)
        identity = b"member-%d" % member
        try:
            replies = state.receive(identity, coordination.decode_from_member(part), now)
        except WireError:
            continue
        for _, reply in [*replies, *state.take_updates(now)]:
            coordination.decode_from_coordinator(encode(reply))
        if member == 3:
            state.on_send_failed(b"member-0", now)


def control_lines(data: bytes) -> None:
    """Lines of the control channel do not depend on their cuts; each is a message or a ControlError."""
    source = ByteSource(data)
    cut_at, stream = source.take(14), source.rest()
    whole, cut = control.LineBuffer(), control.LineBuffer()
    lines = whole.feed(stream)
    assert [line for piece in ByteSource(cut_at).pieces(stream) for line in cut.feed(piece)] == lines
    for line in lines:
        for decode in (control.decode_for_child, control.decode_for_supervisor):
            try:
                message: Any = decode(line)  # type: ignore[operator]
            except control.ControlError:
                continue
            assert decode(control.encode(message)[:-1]) == message  # type: ignore[operator]
