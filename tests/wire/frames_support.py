"""Random token frames, and frames as plain Python for comparison."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from penstock.wire.frames import Finish, Logprobs, TokenFrame

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

    def extend(self, other: "StreamPart") -> None:
        assert other.position == self.position + len(self.tokens), "positions are not consecutive"
        assert not self.finish, "a row after the end"
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.finish, self.cached = max(self.finish, other.finish), max(self.cached, other.cached)


def entry_of(logprobs: Logprobs, at: int) -> Any:
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
        )
        rows.append((int(frame.stream[row]), part))
        offset += count
    assert offset == len(frame.tokens)
    return rows


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


def frame_of(step: int, rows: list[tuple[int, StreamPart]], optional: bool) -> TokenFrame:
    """The frame of ``rows``; columns that say nothing are left out unless ``optional``."""
    parts = [part for _, part in rows]
    counts = [len(part.tokens) for part in parts]
    entries = [entry for part in parts for entry in part.logprobs]
    given = [(token, entry) for token, entry in enumerate(entries) if entry is not None]
    logprobs = None
    if given:
        width = max(len(ids) for _, (ids, _, _) in given)
        ids = np.full((len(given), width), -1, np.int32)
        values = np.full((len(given), width), -np.inf, np.float32)
        for at, (_, (row, floats, _)) in enumerate(given):
            ids[at, : len(row)], values[at, : len(row)] = row, floats
        logprobs = Logprobs(
            np.array([token for token, _ in given], np.int32),
            ids,
            values,
            np.array([rank for _, (_, _, rank) in given], np.int32),
        )
    return TokenFrame(
        step,
        np.array([stream for stream, _ in rows], np.int32),
        np.array([part.position for part in parts], np.int32),
        np.array([token for part in parts for token in part.tokens], np.int32),
        np.array(counts, np.int32) if optional or any(count != 1 for count in counts) else None,
        np.array([part.finish for part in parts], np.int8)
        if optional or any(part.finish for part in parts)
        else None,
        np.array([part.cached for part in parts], np.int32)
        if optional or any(part.cached for part in parts)
        else None,
        logprobs,
        waiting=step * 3,
        running=step * 2,
        kv_used_permille=step % 1001,
    )


LOGPROBS = st.none() | st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=3), st.integers(1, 9)).map(
    lambda drawn: (drawn[0], [-0.5 * place for place in range(len(drawn[0]))], drawn[1])
)


@st.composite
def consecutive_frames(draw: st.DrawFn, min_size: int = 1) -> list[TokenFrame]:
    """Steps of a few streams that start, skip steps, give several tokens at once, and end."""
    position = dict(
        zip(draw(st.sets(st.integers(0, 40) | st.just(I32_MAX), max_size=6)), [0] * 6, strict=False)
    )
    ended: set[int] = set()
    frames = []
    for step in range(draw(st.integers(min_size, 6))):
        rows = []
        for stream in draw(st.permutations(sorted(position))):
            if stream in ended or draw(st.booleans()):
                continue
            finish = draw(st.sampled_from([0, 0, 0, *(reason.value for reason in Finish)]))
            tokens = draw(st.lists(st.integers(0, I32_MAX), min_size=0 if finish else 1, max_size=3))
            cached = draw(st.sampled_from([0, 16])) if position[stream] == 0 else 0
            logprobs = [draw(LOGPROBS) for _ in tokens]
            rows.append((stream, StreamPart(position[stream], tokens, finish, cached, logprobs)))
            position[stream] += len(tokens)
            if finish:
                ended.add(stream)
        frames.append(frame_of(step, rows, optional=draw(st.booleans())))
    return frames
