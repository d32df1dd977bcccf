"""A fault at every place of a stream: the client has all tokens that were generated, then one error."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock.config.serve import ServeConfig
from penstock.engine.base import StepRows
from penstock.engine.loop.publisher import Publisher
from penstock.engine.synthetic.engine import SyntheticEngine
from penstock.engine.synthetic.faults import InjectedFault
from penstock.generation.replies.reply import TextTables
from penstock.streaming.stream import StreamError
from penstock.supervisor.startup.model_resolution import DEMO_DIR
from penstock.wire.decoding import decode_from_engine
from penstock.wire.frames import decode_frame
from penstock.wire.messages import (
    FrameHeader,
    SamplingParams,
    StreamFailed,
    Submit,
)
from tests.generation.planning import body, planners
from tests.generation.replying import PROMPT, Desk, MemorySink, in_loop, read_stream, tables_of

PLANNER = planners()
TOKENS = 64
INTERVAL = 10


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_DIR / "tokenizer.json"))


@cache
def tables() -> TextTables:
    return tables_of(tokenizer())


class ToDesk:
    """A publisher's socket: what it sends is decoded and delivered at once."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk

    def send(self, identity: bytes, parts: list[bytes]) -> bool:
        message = decode_from_engine(parts[0])
        if isinstance(message, FrameHeader):
            self.desk.streams.process_frame(0, decode_frame(message, parts[1]), 0.0)
        else:
            assert isinstance(message, StreamFailed)
            error = StreamError(500, message.code, message.message)
            self.desk.streams.fail(0, message.stream, error)
        return True


def run_stream(fault: str | None, **fields: Any) -> tuple[MemorySink, StreamError | None]:
    """A stream of 64 tokens with the fault; what the client got, and the error left to the HTTP status."""
    desk = Desk(tables())
    plan = PLANNER.completion(body(stream=True, return_token_ids=True, max_tokens=TOKENS, **fields))
    _, sink = desk.streamed(plan)
    config = ServeConfig(engine="synthetic", synthetic_step_ms=0, synthetic_fault=fault, max_num_seqs=2)
    engine = SyntheticEngine(config, str(DEMO_DIR), sleep=lambda seconds: None)
    publisher = Publisher(ToDesk(desk))
    publisher.attach(0, b"peer")
    engine.submit(0, Submit(0, PROMPT.ids, SamplingParams(TOKENS, 7), INTERVAL))
    while engine.has_work():
        publisher.publish(step(engine), engine.load())
    assert len(desk.streams) == 0
    assert len(desk.outcomes) == 1
    return sink, sink.over.result()


def step(engine: SyntheticEngine) -> StepRows:
    try:
        return engine.step()
    except InjectedFault as fault:
        return engine.fail_all("engine_error", str(fault))


@pytest.mark.parametrize("stop", [None, "never in there"])
@pytest.mark.parametrize("kind", ["stream-error", "error"])
def test_a_fault_at_every_token_loses_none_of_those_before(kind: str, stop: str | None) -> None:
    def run() -> None:
        whole, _ = run_stream(None, stop=stop)
        tokens = read_stream(whole).tokens
        assert (len(tokens), whole.lines()[-1]) == (TOKENS, "data: [DONE]")
        last_fault = TOKENS - 1 if kind == "error" else TOKENS - 2  # the last step ends the stream well
        for place in range(last_fault + 1):
            sink, error = run_stream(f"{kind}@{place}", stop=stop)
            generated = place + 1 if kind == "stream-error" else place  # the one fails after its step
            if not generated:
                assert error is not None
                assert (error.code, sink.data) == ("engine_error", b"")
                continue
            *events, last = sink.events()
            assert last["error"]["code"] == "engine_error"
            assert not any("error" in event for event in events)
            assert "[DONE]" not in sink.lines()[-1]
            choices = [event["choices"][0] for event in events]
            assert [token for choice in choices for token in choice["token_ids"]] == tokens[:generated]
            assert "".join(choice["text"] for choice in choices) == tokenizer().decode(tokens[:generated])
            assert all(choice["finish_reason"] is None for choice in choices)
            assert (sink.ended, error) == ("finish", None)

    in_loop(run)
