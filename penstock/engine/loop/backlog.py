"""What waits for an API server whose ZMQ queue is full: token frames, merged by stream as they gather, and
behind them the messages that must not overtake rows. Frames of other weights come behind the messages, one
of which tells of the weights."""

from __future__ import annotations

from collections import deque

from penstock.wire.frames import TokenFrame, encode_frame
from penstock.wire.regroup import merge_frames

SEGMENT_TOKENS_PER_ROW = 64
"""A frame with this many tokens per row is not merged further: its rows' columns are small beside its
tokens, and the time of a merge stays bounded, however large the backlog."""


class FrameBacklog:
    """Consecutive frames of one API server, merged into few; each token is merged a bounded number of
    times."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes of all columns, about."""
        self._frames: deque[TokenFrame] = deque()

    def __len__(self) -> int:
        return len(self._frames)

    def append(self, frame: TokenFrame) -> None:
        """Merge like a binary carry: while the last frame has at least half its neighbour's tokens."""
        frames = self._frames
        self._push(frame)
        while len(frames) > 1 and _mergeable(frames[-2], frames[-1]):
            last = self._pop()
            self._push(merge_frames([self._pop(), last]))

    def _push(self, frame: TokenFrame) -> None:
        self._frames.append(frame)
        self.size += _bytes_of(frame)

    def _pop(self) -> TokenFrame:
        frame = self._frames.pop()
        self.size -= _bytes_of(frame)
        return frame

    def popleft(self) -> TokenFrame:
        frame = self._frames.popleft()
        self.size -= _bytes_of(frame)
        return frame


def _mergeable(earlier: TokenFrame, later: TokenFrame) -> bool:
    if earlier.weights != later.weights or not (earlier.vectors is later.vectors is None):
        return False
    full = _weight(earlier) >= SEGMENT_TOKENS_PER_ROW * earlier.rows
    return not full and 2 * _weight(later) >= _weight(earlier)


def _weight(frame: TokenFrame) -> int:
    return len(frame.tokens) + (0 if frame.prompt is None else len(frame.prompt.row))


def _bytes_of(frame: TokenFrame) -> int:
    """Size of the frame's columns, about: a row has at most five, an entry of logprobs two per candidate."""
    size = 20 * len(frame.stream) + 4 * len(frame.tokens)
    if frame.logprobs is not None:
        size += 2 * frame.logprobs.ids.nbytes
    if frame.prompt is not None:
        size += 2 * frame.prompt.ids.nbytes
    if frame.vectors is not None:
        size += frame.vectors.values.nbytes
    if frame.kv_transfer_params is not None:
        size += sum(len(params) for params in frame.kv_transfer_params.values())
    return size


class Backlog:
    """What waits for one API server, in the order in which it must be sent: a message that found the queue
    full, then frames and the messages behind them, several times if the weights have changed meanwhile."""

    __slots__ = ("_bytes", "_frames", "_head", "_later", "_messages", "_weights")

    def __init__(self) -> None:
        self._head: list[bytes] | None = None
        self._frames = FrameBacklog()
        self._messages: deque[bytes] = deque()
        self._later: deque[tuple[FrameBacklog, deque[bytes]]] = deque()
        """Frames and messages that come behind :attr:`_messages`, which are not empty then."""
        self._weights = 0
        """``weights`` of the frame that was added last."""
        self._bytes = 0
        """Bytes of the head, the messages and all that comes later."""

    def __bool__(self) -> bool:
        return bool(self._head is not None or self._frames or self._messages)

    @property
    def size(self) -> int:
        """In bytes."""
        return self._bytes + self._frames.size

    def add_frame(self, frame: TokenFrame) -> None:
        frames, messages = self._later[-1] if self._later else (self._frames, self._messages)
        if frame.weights != self._weights and messages:
            frames = FrameBacklog()
            self._later.append((frames, deque()))
        self._weights = frame.weights
        before = frames.size
        frames.append(frame)
        if frames is not self._frames:
            self._bytes += frames.size - before

    def add_message(self, message: bytes) -> None:
        (self._later[-1][1] if self._later else self._messages).append(message)
        self._bytes += len(message)

    def take_message(self) -> list[bytes]:
        """The parts of the next ZMQ message of a backlog that is not empty."""
        parts, self._head = self._head, None
        if parts is None:
            if self._frames:
                return encode_frame(self._frames.popleft())
            parts = [self._messages.popleft()]
        self._bytes -= sum(map(len, parts))
        if self._later and not self:
            self._frames, self._messages = self._later.popleft()
            self._bytes -= self._frames.size
        return parts

    def put_back(self, parts: list[bytes]) -> None:
        """Put parts back that could not be sent; they are the next to try."""
        self._head = parts
        self._bytes += sum(map(len, parts))
