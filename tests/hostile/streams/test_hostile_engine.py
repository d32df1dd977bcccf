"""An engine that sends anything, beside a sound one, whose streams get exactly their tokens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from penstock.logging_setup import RateLimitedLog
from penstock.metrics.snapshot import Series, Snapshot, encode_snapshot, process_name
from penstock.wire.frames import Column, TokenFrame, encode_frame
from penstock.wire.logprobs import Logprobs, PromptLogprobs
from penstock.wire.messages import (
    OVERLOADED,
    Draining,
    EngineMetrics,
    GoAway,
    RpcReply,
    Started,
    StreamFailed,
    Welcome,
    encode,
)
from tests.hostile.streams.fakes import INFO, VOCABULARY, ApiServer, Reply, SoundEngine, frame_of, token_at

SOUND, HOSTILE = 0, 1
I32_MAX = (1 << 31) - 1


class Hostile:
    """Draws messages: frames with wrong rows and columns, other messages about any stream, noise."""

    def __init__(self, server: ApiServer, draw: random.Random) -> None:
        self._server = server
        self._draw = draw
        self._ended: set[int] = set()

    def message(self) -> list[bytes]:
        """Mostly what can be decoded, since anything else ends the connection."""
        make: Callable[[], list[bytes]] = self._draw.choices(
            [self._frame, self._about_a_stream, self._other, self._broken_frame, self._noise],
            weights=[50, 25, 15, 5, 5],
        )[0]
        return make()

    def _handle(self) -> int:
        everyone = [stream.handle for stream in self._server.streams.streams if stream is not None]
        own = [handle for handle in everyone if self._server.streams._columns.rank[handle] == HOSTILE]
        return self._draw.choice([*own * 8, *everyone, self._draw.randrange(2000), I32_MAX])

    def _row(self) -> tuple[int, int, list[int], int]:
        draw, handle = self._draw, self._handle()
        positions = self._server.streams._columns.position
        due = int(positions[handle]) if handle < len(positions) else 0
        position = draw.choice([due, due, due, due, due + 1, max(0, due - 1), 0, I32_MAX])
        tokens = [draw.randrange(VOCABULARY) for _ in range(draw.choice([0, 1, 1, 2, 5, 30]))]
        if tokens and draw.random() < 0.1:
            tokens[-1] = draw.choice([VOCABULARY, I32_MAX])
        return handle, position, tokens, draw.choice([0, 0, 0, 0, 1, 2, 3, 4, 5])

    def _whole_frame(self) -> TokenFrame:
        draw = self._draw
        frame = frame_of([self._row() for _ in range(draw.randrange(6))], step=draw.choice([0, 5, 1 << 60]))
        rows, tokens = frame.rows, len(frame.tokens)
        if rows and draw.random() < 0.2:
            frame.cached = np.array([draw.choice([0, I32_MAX]) for _ in range(rows)], np.int32)
        if tokens and draw.random() < 0.3:
            some = sorted(draw.sample(range(tokens), draw.randint(1, tokens)))
            frame.logprobs = Logprobs(np.array(some, np.int32), *self._candidates(len(some)))
        if rows and draw.random() < 0.2:
            some = sorted(draw.choices(range(rows), k=3))
            place = np.array([draw.choice([0, 1, 2, I32_MAX]) for _ in some], np.int32)
            frame.prompt = PromptLogprobs(np.array(some, np.int32), place, *self._candidates(3))
        if draw.random() < 0.2:
            frame.kv_transfer_params = {self._handle(): draw.choice([b"{}", b"", b"\n\n"]) for _ in range(2)}
        return frame

    def _candidates(self, entries: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids = np.array([[self._draw.choice([-1, -7, 3, I32_MAX])] * 2] * entries, np.int32)
        values = np.full((entries, 2), self._draw.choice([np.nan, np.inf, -np.inf, -1.0]), np.float32)
        return ids, values, np.full(entries, -5, np.int32)

    def _frame(self) -> list[bytes]:
        return encode_frame(self._whole_frame())

    def _broken_frame(self) -> list[bytes]:
        """A frame whose header says something else than its body."""
        draw = self._draw
        header, body = encode_frame(self._whole_frame())
        values = msgspec.msgpack.decode(header)
        columns = values[2]
        match draw.randrange(4):
            case 0 if columns:
                columns[draw.randrange(len(columns))] = draw.choice([0, 1, 99, I32_MAX])
            case 1:
                columns += [draw.choice(list(Column)), draw.randrange(3)]
            case 2:
                body = body[: draw.randrange(len(body) + 1)]
            case _:
                return [header]
        return [msgspec.msgpack.encode(values), body]

    def _about_a_stream(self) -> list[bytes]:
        draw, handle = self._draw, self._handle()
        if draw.random() < 0.1:
            return [encode(Started(handle))]
        code = draw.choice([OVERLOADED, OVERLOADED, "invalid_request", "x" * 1000])
        return [encode(StreamFailed(handle, draw.choice([0, 3, I32_MAX]), code, "y" * 10_000))]

    def _other(self) -> list[bytes]:
        draw = self._draw
        snapshot = Snapshot(
            draw.choice([process_name("engine", HOSTILE), process_name("engine", SOUND), "x" * 99]),
            draw.randrange(3),
            draw.randrange(9),
            [Series("penstock:engine_steps", ("m", "1"), draw.choice([1.0, float("nan")]))],
        )
        message = draw.choice(
            [
                EngineMetrics(encode_snapshot(snapshot), I32_MAX, 0, 1.0),
                EngineMetrics(b"\x81"),
                RpcReply(draw.randrange(9), result={"a": [1]}),
                Welcome(1, HOSTILE, draw.randrange(3), INFO),
                Welcome(1, SOUND, 0, INFO),
                Draining(),
                GoAway("z" * 10_000),
            ]
        )
        return [encode(message)]

    def _noise(self) -> list[bytes]:
        return [self._draw.randbytes(self._draw.randrange(1, 40)) for _ in range(self._draw.randrange(1, 4))]


def attack(seed: int, rounds: int) -> None:
    """``rounds`` of messages from both engines, with streams that come and go."""
    draw = random.Random(seed)
    server = ApiServer(2)
    sound, hostile = SoundEngine(server, SOUND), Hostile(server, draw)
    replies: list[tuple[int, Reply]] = []
    others: list[Reply] = []
    for _ in range(rounds):
        if not server.connected(HOSTILE):
            server.connect(HOSTILE)
        for _ in range(draw.randrange(3)):
            stream, reply = server.open(SOUND)
            replies.append((stream.handle, reply))
            others.append(server.open(HOSTILE)[1])
        server.arrive(HOSTILE, *[hostile.message() for _ in range(draw.randrange(1, 5))])
        frames = [
            sound.step([draw.choice([1, 1, 2, 5]) for _ in range(99)]) for _ in range(draw.choice([1, 3]))
        ]
        server.arrive(SOUND, *[frame for frame in frames if frame is not None])
        assert server.connected(SOUND)
    while (frame := sound.step([20] * 999)) is not None:
        server.arrive(SOUND, frame)
    for handle, reply in replies:
        assert reply.tokens == [token_at(handle, place) for place in range(20)]
        assert reply.end == "LENGTH"
    server.client.close("over")
    assert all(reply.end for reply in others), "a stream without an end"
    assert len(server.streams) == 0
    assert server.client.faults.counts.keys() <= {
        (HOSTILE, reason) for _, reason in server.client.faults.counts
    }


def in_loop(test: Callable[[], None]) -> None:
    async def run() -> None:
        test()

    asyncio.run(run())


@pytest.fixture(autouse=True)
def _no_unexpected_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is caught and logged with a traceback is a fault, too."""

    def log(self: RateLimitedLog, subject: str, *message: object, exc_info: bool = False) -> None:
        if exc_info:
            raise AssertionError(message)

    monkeypatch.setattr(RateLimitedLog, "__call__", log)


@pytest.mark.parametrize("seed", range(12))
def test_streams_of_a_sound_engine_get_exactly_their_tokens(seed: int) -> None:
    in_loop(lambda: attack(seed, 60))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(100, 110))
def test_they_do_under_a_long_attack(seed: int) -> None:
    in_loop(lambda: attack(seed, 3000))
