"""Random token frames, and frames as plain Python for comparison."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from penstock.wire.decoding import decode_from_engine
from penstock.wire.frames import FinishReason, TokenFrame, decode_frame
from penstock.wire.logprobs import Logprobs, PromptLogprobs
from penstock.wire.messages import (
    FrameHeader,
)

I32_MAX = (1 << 31) - 1


@dataclass
class StreamPart:
    """One stream's part of one or more frames."""

    position: int
    tokens: list[int] = field(default_factory=list)
    finish: int = 0
    cached: int = 0
    logprobs: list[Any] = field(default_factory=list)
    """Per token None, or (ids, values, rank) without the padding of a narrower entry."""
    prompt: list[Any] = field(default_factory=list)
    """(place, entry) of prompt tokens."""
    transfer: Any = None

    def extend(self, other: StreamPart) -> None:
        assert other.position == self.position + len(self.tokens), "positions are not consecutive"
        assert not self.finish, "a row after the end"
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.prompt += other.prompt
        self.finish, self.cached = max(self.finish, other.finish), max(self.cached, other.cached)
        self.transfer = other.transfer


def entry_of(logprobs: Logprobs | PromptLogprobs, at: int) -> Any:
    ids = logprobs.ids[at].tolist()
    width = max(place + 1 for place, token in enumerate(ids) if token >= 0)
    return ids[:width], logprobs.values[at][:width].tolist(), int(logprobs.rank[at])


def rows_of(frame: TokenFrame) -> list[tuple[int, StreamPart]]:
    """(stream, part) per row, read element by element."""
    entries: dict[int, Any] = {}
    if frame.logprobs is not None:
        entries = {int(token): entry_of(frame.logprobs, at) for at, token in enumerate(frame.logprobs.token)}
    rows, offset = [], 0
    for row in range(frame.rows):
        count = 1 if frame.count is None else int(frame.count[row])
        part = StreamPart(
            int(frame.position[row]),
            frame.tokens[offset : offset + count].tolist(),
            0 if frame.finish is None else int(frame.finish[row]),
            0 if frame.cached is None else int(frame.cached[row]),
            [entries.get(token) for token in range(offset, offset + count)],
            prompt_of(frame, row),
            (frame.kv_transfer_params or {}).get(int(frame.stream[row])),
        )
        rows.append((int(frame.stream[row]), part))
        offset += count
    assert offset == len(frame.tokens)
    return rows


def prompt_of(frame: TokenFrame, row: int) -> list[Any]:
    if frame.prompt is None:
        return []
    return [
        (int(frame.prompt.position[at]), entry_of(frame.prompt, at))
        for at in range(len(frame.prompt.row))
        if frame.prompt.row[at] == row
    ]


def by_stream(frames: list[TokenFrame]) -> dict[int, StreamPart]:
    """What consecutive frames say of each stream; asserts that they fit together."""
    parts: dict[int, StreamPart] = {}
    for frame in frames:
        for stream, part in rows_of(frame):
            if stream in parts:
                parts[stream].extend(part)
            else:
                parts[stream] = part
    return parts


def frame_of(step: int, rows: list[tuple[int, StreamPart]], optional: bool, weights: int = 0) -> TokenFrame:
    """The frame of ``rows``; columns that say nothing are left out unless ``optional``."""
    parts = [part for _, part in rows]
    counts = [len(part.tokens) for part in parts]
    entries = [entry for part in parts for entry in part.logprobs]
    given = [(token, entry) for token, entry in enumerate(entries) if entry is not None]
    logprobs = None
    if given:
        token = np.array([token for token, _ in given], np.int32)
        logprobs = Logprobs(token, *columns_of([entry for _, entry in given]))
    prompt = None
    scored = [(row, place, entry) for row, part in enumerate(parts) for place, entry in part.prompt]
    if scored:
        prompt = PromptLogprobs(
            np.array([row for row, _, _ in scored], np.int32),
            np.array([place for _, place, _ in scored], np.int32),
            *columns_of([entry for _, _, entry in scored]),
        )
    return TokenFrame(
        step=step,
        stream=np.array([stream for stream, _ in rows], np.int32),
        position=np.array([part.position for part in parts], np.int32),
        tokens=np.array([token for part in parts for token in part.tokens], np.int32),
        count=np.array(counts, np.int32) if optional or any(count != 1 for count in counts) else None,
        finish=np.array([part.finish for part in parts], np.int8)
        if optional or any(part.finish for part in parts)
        else None,
        cached=np.array([part.cached for part in parts], np.int32)
        if optional or any(part.cached for part in parts)
        else None,
        logprobs=logprobs,
        waiting=step * 3,
        running=step * 2,
        kv_used=step % 1001 / 1000,
        prompt=prompt,
        kv_transfer_params={stream: part.transfer for stream, part in rows if part.transfer} or None,
        weights=weights,
    )


def columns_of(entries: list[Any]) -> tuple[Any, Any, Any]:
    """Candidate ids, values and ranks, padded to the widest entry."""
    width = max(len(ids) for ids, _, _ in entries)
    ids = np.full((len(entries), width), -1, np.int32)
    values = np.full((len(entries), width), -np.inf, np.float32)
    for at, (row, floats, _) in enumerate(entries):
        ids[at, : len(row)], values[at, : len(row)] = row, floats
    return ids, values, np.array([rank for _, _, rank in entries], np.int32)


ENTRIES = st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=3), st.integers(1, 9)).map(
    lambda drawn: (drawn[0], [-0.5 * place for place in range(len(drawn[0]))], drawn[1])
)
LOGPROBS = st.none() | ENTRIES
TRANSFERS = st.integers(0, 9).map(lambda drawn: b'{"block":%d}' % drawn)


@st.composite
def consecutive_frames(draw: st.DrawFn, min_size: int = 1) -> list[TokenFrame]:
    """Steps of a few streams that start, skip steps, give several tokens at once, and end; some have rows for
    their prompts first."""
    position = dict(
        zip(draw(st.sets(st.integers(0, 40) | st.just(I32_MAX), max_size=6)), [0] * 6, strict=False)
    )
    scored = dict.fromkeys(position, 1)
    ended: set[int] = set()
    frames = []
    weights = draw(st.integers(0, 2))
    for step in range(draw(st.integers(min_size, 6))):
        rows = []
        for stream in draw(st.permutations(sorted(position))):
            if stream in ended or draw(st.booleans()):
                continue
            finish = draw(st.sampled_from([0, 0, 0, *(reason.value for reason in FinishReason)]))
            prompt = draw(st.lists(ENTRIES, max_size=3)) if position[stream] == 0 else []
            least = 0 if finish or prompt else 1
            tokens = draw(st.lists(st.integers(0, I32_MAX), min_size=least, max_size=3))
            cached = draw(st.sampled_from([0, 16])) if position[stream] == 0 else 0
            logprobs = [draw(LOGPROBS) for _ in tokens]
            places = [(scored[stream] + place, entry) for place, entry in enumerate(prompt)]
            transfer = draw(st.none() | TRANSFERS) if finish else None
            part = StreamPart(position[stream], tokens, finish, cached, logprobs, places, transfer)
            rows.append((stream, part))
            position[stream] += len(tokens)
            scored[stream] += len(prompt)
            if finish:
                ended.add(stream)
        frames.append(frame_of(step, rows, optional=draw(st.booleans()), weights=weights))
    return frames


def decode(parts: list[bytes]) -> TokenFrame:
    header, body = parts
    message = decode_from_engine(header)
    assert isinstance(message, FrameHeader)
    return decode_frame(message, body)


def load_of(frame: TokenFrame) -> tuple[int, int, int, float, int]:
    return frame.step, frame.waiting, frame.running, frame.kv_used, frame.weights


def tolerant_rows(frame: TokenFrame) -> list[tuple[int, int, list[int], int]]:
    """Rows without logprobs, whose ids may be anything."""
    plain = msgspec.structs.replace(frame, logprobs=None, prompt=None)
    return [(stream, part.position, part.tokens, part.finish) for stream, part in rows_of(plain)]
