"""What an engine sends for a stream that its reply cannot use: a fault of the engine; the stream ends."""

from __future__ import annotations

import logging
from base64 import b64decode
from functools import cache
from io import BytesIO

import msgspec
import numpy as np
import pytest

from penstock.generation.replies.reply import TextTables
from penstock.streaming.engine_faults import INVALID_LOGPROBS, INVALID_ROUTES, INVALID_TRANSFER
from penstock.wire.frames import FinishReason, TokenFrame
from penstock.wire.logprobs import PromptLogprobs
from penstock.wire.messages import RoutedExperts
from tests.generation.planning import body, planners, tiny_tokenizer
from tests.generation.replying import PROMPT, Desk, in_loop, tables_of

PLANNER = planners()
PLAIN = tiny_tokenizer().encode("a", add_special_tokens=False)
VOCABULARY = len(tables_of(tiny_tokenizer().raw).plain)


@cache
def tables() -> TextTables:
    return tables_of(tiny_tokenizer().raw)


def check_that_it_ends_alone(spoil: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """Streamed and collected replies with ``spoil``, beside sound ones."""

    def run() -> None:
        desk = Desk(tables())
        desk.streams.set_engines(desk.engine_client.abort, desk.streams.faults)
        plan = PLANNER.completion(body(logprobs=1, prompt_logprobs=1, max_tokens=9))
        streamed = PLANNER.completion(body(stream=True, logprobs=1, max_tokens=9))
        spoilt, sound = desk.collected(plan), desk.collected(plan)
        _, sink = desk.streamed(streamed)
        frames = [spoiled(desk.rows(0, [PLAIN], logprobs=True)[0], spoil)]
        if "prompt" not in spoil:
            frames.append(spoiled(desk.rows(2, [PLAIN], logprobs=True)[0], spoil))
        frames += desk.rows(1, [PLAIN], FinishReason.LENGTH, logprobs=True)
        desk.deliver(frames)
        error = spoilt.done.result()
        assert error is not None
        assert (error.status, error.code) == (500, "engine_error")
        assert sound.done.result() is None
        assert desk.streams.faults.counts == {(0, reason): len(frames) - 1}
        if "prompt" not in spoil:
            failed = sink.over.result()
            text = str(failed and failed.code) + "".join(str(event) for event in sink.events())
            assert "engine_error" in text
            assert "internal_error" not in text
        assert desk.engine_client.aborted

    in_loop(run)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]


def spoiled(frame: TokenFrame, spoil: str) -> TokenFrame:
    assert frame.logprobs is not None
    handle = int(frame.stream[0])
    match spoil:
        case "own id":
            frame.logprobs.ids[0, 0] = -1
        case "negative id":
            frame.logprobs.ids[0, 1] = -7
        case "id":
            frame.logprobs.ids[0, 1] = VOCABULARY
        case "nan" | "inf":
            frame.logprobs.values[0, 1] = float(spoil)
        case "rank":
            frame.logprobs.rank[0] = -1
        case "prompt gap":
            frame.prompt = prompt_logprobs(position=2)
        case "prompt position":
            frame.prompt = prompt_logprobs(position=PROMPT.length)
        case "prompt id":
            frame.prompt = prompt_logprobs(ids=[VOCABULARY])
        case "prompt nan":
            frame.prompt = prompt_logprobs(value=float("nan"))
        case _:
            frame.kv_transfer_params = {handle: spoil.encode("latin-1")}
    return frame


def prompt_logprobs(position: int = 1, ids: list[int] | None = None, value: float = -1.0) -> PromptLogprobs:
    return PromptLogprobs(
        np.zeros(1, np.int32),
        np.array([position], np.int32),
        np.array([ids or [0]], np.int32),
        np.array([[value]], np.float32),
        np.ones(1, np.int32),
    )


@pytest.mark.parametrize(
    "spoil",
    [
        "own id",
        "negative id",
        "id",
        "nan",
        "inf",
        "rank",
        "prompt gap",
        "prompt position",
        "prompt id",
        "prompt nan",
    ],
)
def test_logprobs(spoil: str, caplog: pytest.LogCaptureFixture) -> None:
    check_that_it_ends_alone(spoil, INVALID_LOGPROBS, caplog)


@pytest.mark.parametrize("params", ["", "[]", '{"a":', '{\n"a":1}', '{"a":"\xff"}', '{"a":' + "[" * 99_999])
def test_kv_transfer_params(params: str, caplog: pytest.LogCaptureFixture) -> None:
    check_that_it_ends_alone(params, INVALID_TRANSFER, caplog)


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("data", [b"\1" * 5, b"\1" * 6 * 30], ids=["a part of a token", "too many"])
def test_routed_experts(data: bytes, asked: bool) -> None:
    def run() -> None:
        desk = Desk(tables())
        desk.streams.set_engines(desk.engine_client.abort, desk.streams.faults)
        reply = desk.collected(PLANNER.completion(body(return_routed_experts=asked, max_tokens=9)))
        desk.streams.hand_routes(0, RoutedExperts(0, 3, 2, 1, data))
        error = reply.done.result()
        assert error is not None
        assert (error.status, error.code) == (500, "engine_error")
        assert desk.streams.faults.counts == {(0, INVALID_ROUTES): 1}

    in_loop(run)


@pytest.mark.parametrize("width", [1, 2])
def test_routed_experts_are_a_numpy_file(width: int) -> None:
    def run() -> None:
        desk = Desk(tables())
        reply = desk.collected(PLANNER.completion(body(return_routed_experts=True, max_tokens=1)))
        experts = np.arange(2 * 3 * 2, dtype=f"<u{width}").reshape(-1, 3, 2)
        desk.streams.hand_routes(0, RoutedExperts(0, 3, 2, width, experts.tobytes()))
        desk.deliver(desk.rows(0, [PLAIN], FinishReason.LENGTH))
        choice = msgspec.json.decode(b"".join(reply.format.whole(reply)))["choices"][0]
        found = np.load(BytesIO(b64decode(choice["routed_experts"])))
        assert found.dtype == experts.dtype
        assert np.array_equal(found, experts)

    in_loop(run)
