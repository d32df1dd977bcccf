"""Events with logprobs and token ids by columns have the bytes that replies make one by one."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dialects.chat.reply import ChatReply
from penstock.dialects.completions.reply import CompletionReply
from penstock.generation.plan import RequestPlan
from penstock.generation.replies.reply import TextTables
from penstock.http.write_target import WriteTarget
from penstock.streaming.rows.http_framing import MAX_EVENT
from penstock.streaming.rows.row_writer import Path
from penstock.streaming.rows.token_fields import ItemKind, join_items
from penstock.streaming.token_names import TokenNames
from penstock.wire.frames import FinishReason, TokenFrame
from penstock.wire.logprobs import Logprobs
from penstock.wire.messages import SamplingParams
from tests.generation.planning import tiny_tokenizer
from tests.generation.replying import Desk, MemorySink, tables_of

INFINITE = float("inf")


@cache
def tables() -> TextTables:
    return tables_of(tiny_tokenizer().raw)


@cache
def vocabulary() -> tuple[list[int], list[int]]:
    """Tokens with a context-free text, and some whose text depends on others."""
    plain = [token for token, text in enumerate(tables().plain) if text]
    parts = tiny_tokenizer().encode("😀é", False)
    return plain[:40], [token for token in parts if tables().plain[token] is None]


class OneByOneChat(ChatReply):
    __slots__ = ()

    def token_fields(self, names: TokenNames, width: int, *, ids: bool) -> None:
        return None


class OneByOneCompletion(CompletionReply):
    __slots__ = ()

    def token_fields(self, names: TokenNames, width: int, *, ids: bool) -> None:
        return None


class Server:
    """Streamed replies on HTTP/1.1 connections, all fed by the same frames."""

    def __init__(self, plans: Sequence[tuple[bool, RequestPlan]], *, direct: Sequence[bool]) -> None:
        """``plans``: whether it is a chat, and the plan. ``direct``: which replies are written by columns to
        a socket; others are written to their sinks."""
        self.desk = Desk(tables())
        self.desk.streams._writer._burst = self._burst  # type: ignore[assignment]
        self.sinks: list[MemorySink] = []
        self.by_columns = 0
        for number, ((chat, plan), own) in enumerate(zip(plans, direct, strict=True)):
            made = (ChatReply if chat else CompletionReply)("r", "m", "assistant")
            _, sink = self.desk.streamed(plan, format=made)
            if own:
                sink.write_target = WriteTarget(descriptor=number)
            self.sinks.append(sink)

    def _burst(self, descriptors: Any, data: bytes, lengths: Any) -> list[tuple[int, int]]:
        for descriptor, length in zip(descriptors.tolist(), lengths.tolist(), strict=True):
            chunk, data = data[:length], data[length:]
            size, event = chunk.split(b"\r\n", 1)
            assert len(event) == int(size, 16) + 2
            self.sinks[descriptor].data += event[:-2]
            self.by_columns += 1
        assert not data
        return []


def plan(logprobs: int, *, ids: bool, names: bool, n: int = 1) -> RequestPlan:
    return RequestPlan(
        model="m",
        prompts=["a"],
        add_special_tokens=False,
        base=SamplingParams(max_tokens=1000, seed=1),
        max_model_len=2000,
        n=n,
        stream=True,
        logprobs=logprobs,
        return_token_ids=ids,
        tokens_as_ids=names,
    )


def entries(tokens: list[int], draw: Any, widths: list[int]) -> Logprobs | None:
    """Made-up logprobs; ``widths``: candidates of each token, 0: none."""
    width = max(widths, default=0)
    scored = [number for number, own in enumerate(widths) if own]
    if not scored:
        return None
    ids, values = (
        np.full((len(scored), width), -1, np.int32),
        np.full((len(scored), width), -INFINITE, np.float32),
    )
    for row, number in enumerate(scored):
        own = tokens[number]
        others = [token for token in draw.sample(range(len(tables().plain)), widths[number]) if token != own]
        given_ids = [own, *others[: widths[number] - 1]]
        ids[row, : len(given_ids)] = given_ids
        values[row, : len(given_ids)] = [
            draw.choice([-0.0, -1e-7, -INFINITE, -draw.random(), -12.5]) for _ in given_ids
        ]
    return Logprobs(np.array(scored, np.int32), ids, values, np.ones(len(scored), np.int32))


@given(data=st.data(), random=st.randoms(use_true_random=False))
def test_events_are_those_of_replies(data: st.DataObject, random: Any) -> None:
    kinds = st.tuples(st.booleans(), st.sampled_from([-1, 0, 0, 2, 5]), st.booleans(), st.booleans())
    chosen = data.draw(st.lists(kinds, min_size=1, max_size=7))
    if data.draw(st.booleans()):  # many begin and end at once
        chosen = [chosen[0]] * len(chosen)
    plans = [(chat, plan(logprobs, ids=ids, names=names)) for chat, logprobs, ids, names in chosen]
    direct = [data.draw(st.booleans()) for _ in plans]

    async def run() -> None:
        server = Server(plans, direct=direct)
        expected = Server(plans, direct=[False] * len(plans))
        for handle, (chat, _) in enumerate(plans):
            stream = expected.desk.streams.streams[handle]
            assert stream is not None
            stream.reply._fields = stream.fields = None  # type: ignore[attr-defined]
            stream.reply.format = (OneByOneChat if chat else OneByOneCompletion)("r", "m", "assistant")  # type: ignore[attr-defined]
        plain, parts = vocabulary()
        positions = [0] * len(plans)
        for step in range(6):
            rows = []
            for _ in plans:
                count = data.draw(st.sampled_from([1, 1, 1, 3, 7]))
                choices = plain if data.draw(st.integers(0, 4)) else plain + parts
                rows.append([random.choice(choices) for _ in range(count)])
            counts = [len(row) for row in rows]
            tokens = [token for row in rows for token in row]
            widths = [1 + chosen[handle][1] for handle, row in enumerate(rows) for _ in row]
            frame = TokenFrame(
                step=step,
                stream=np.arange(len(plans), dtype=np.int32),
                position=np.array(positions, np.int32),
                tokens=np.array(tokens, np.int32),
                count=None if set(counts) == {1} else np.array(counts, np.int32),
                finish=np.full(len(plans), FinishReason.LENGTH, np.int8) if step == 5 else None,
                logprobs=entries(tokens, random, widths),
            )
            positions = [position + count for position, count in zip(positions, counts, strict=True)]
            for each in (server, expected):
                each.desk.streams.process_frame(0, frame, float(step))
        for own, other in zip(server.sinks, expected.sinks, strict=True):
            stamps = [_without_time(sink.data) for sink in (own, other)]
            assert stamps[0] == stamps[1]
            own.events()
        assert server.desk.outcomes == expected.desk.outcomes

    asyncio.run(run())


def _without_time(data: bytes) -> bytes:
    """Events of one reply, whose clock may have gone on between two replies."""
    events = data.split(b'"created":')
    return b"".join([events[0], *(event.split(b",", 1)[1] for event in events[1:])])


@pytest.mark.parametrize("chat", [True, False])
def test_most_rows_with_logprobs_are_written_by_columns(chat: bool) -> None:
    async def run() -> None:
        server = Server([(chat, plan(2, ids=True, names=False))] * 3, direct=[True, True, False])
        plain, _ = vocabulary()
        for step in range(4):
            tokens = [plain[step], plain[5], plain[6]]
            frame = TokenFrame(
                step=step,
                stream=np.arange(3, dtype=np.int32),
                position=np.full(3, step, np.int32),
                tokens=np.array(tokens, np.int32),
                logprobs=Logprobs(
                    np.arange(3, dtype=np.int32),
                    np.array([[token, 1, 2] for token in tokens], np.int32),
                    np.full((3, 3), -0.5, np.float32),
                    np.ones(3, np.int32),
                ),
            )
            server.desk.streams.process_frame(0, frame, float(step))
        paths = [server.desk.streams._writer.path(handle) for handle in range(3)]
        assert paths == [Path.CHUNK, Path.CHUNK, Path.SINK]
        assert server.by_columns == 2 * 3  # all but the first rows
        for sink in server.sinks:
            choices = [event["choices"][0] for event in sink.events()]
            assert [each for choice in choices for each in choice.get("token_ids", [])][-1] in plain
            assert len([choice for choice in choices if choice["logprobs"]]) == 4

    asyncio.run(run())


def test_a_large_event_is_a_chunk_of_its_own_size() -> None:
    async def run() -> None:
        server = Server([(True, plan(5, ids=False, names=False))], direct=[True])
        plain, _ = vocabulary()
        position = 0
        for count in (1, 100):
            tokens = (plain * 3)[:count]
            ids = np.array([[token, *plain[:5]] for token in tokens], np.int32)
            frame = TokenFrame(
                step=0,
                stream=np.zeros(1, np.int32),
                position=np.full(1, position, np.int32),
                tokens=np.array(tokens, np.int32),
                count=np.full(1, count, np.int32),
                logprobs=Logprobs(
                    np.arange(count, dtype=np.int32),
                    ids,
                    np.full(ids.shape, -0.25, np.float32),
                    np.ones(count, np.int32),
                ),
            )
            server.desk.streams.process_frame(0, frame, 0.0)
            position += count
        assert server.by_columns == 1
        last = server.sinks[0].events()[-1]
        assert len(json.dumps(last)) > MAX_EVENT
        assert len(last["choices"][0]["logprobs"]["content"]) == 100

    asyncio.run(run())


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("count", [1, 3])
def test_a_step_creates_no_tracked_object_per_row(chat: bool, width: int, count: int) -> None:
    rows = 512

    async def run() -> None:
        server = Server([(chat, plan(width - 1, ids=True, names=False))] * rows, direct=[True] * rows)
        server.desk.streams._writer._burst = lambda *written: []  # type: ignore[assignment]
        plain, _ = vocabulary()
        for step in range(3):
            tokens = np.array((plain * rows)[: rows * count], np.int32)
            frame = TokenFrame(
                step=step,
                stream=np.arange(rows, dtype=np.int32),
                position=np.full(rows, step * count, np.int32),
                tokens=tokens,
                count=None if count == 1 else np.full(rows, count, np.int32),
                logprobs=Logprobs(
                    np.arange(len(tokens), dtype=np.int32),
                    np.stack([tokens, *[tokens + place for place in range(1, width)]], axis=1),
                    np.full((len(tokens), width), -0.5, np.float32),
                    np.ones(len(tokens), np.int32),
                ),
            )
            gc.collect()
            gc.disable()
            try:
                before = gc.get_count()[0]
                server.desk.streams.process_frame(0, frame, float(step))
                made = gc.get_count()[0] - before
            finally:
                gc.enable()
        assert made < 100

    asyncio.run(run())


def test_numbers_read_back_as_the_same_float32() -> None:
    names = TokenNames(tables().full)
    values = -np.geomspace(1e-30, 1e4, 500, dtype=np.float32)
    ids = np.full((500, 1), 5, np.int32)
    [listed] = join_items((ItemKind.LOGPROB,), names, ids, values[:, None])
    read = json.loads(b"[%b]" % listed)
    assert np.array_equal(np.array(read, np.float32), np.maximum(values, np.float32(-9999)))


def test_names_are_forgotten_and_spelled_again() -> None:
    names = TokenNames(tables().full, most=4)
    for start in range(0, 40, 2):
        tokens = np.arange(start, start + 2, dtype=np.int32)
        names.spell(tokens)
        assert [names.quoted[token] for token in tokens] == [names[int(token)].quoted for token in tokens]
        assert names.known.sum() <= 4
    names.spell(np.arange(30, dtype=np.int32))  # more at once than are kept
    assert names.known.sum() == 30
