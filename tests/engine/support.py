"""What the tests of the engine process share: a tokenizer, requests, rows as plain Python, fakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.engine.base import StepRows
from penstock.wire.decoding import decode_from_engine
from penstock.wire.frames import TokenFrame, decode_frame
from penstock.wire.messages import (
    CacheHints,
    EngineMetrics,
    FrameHeader,
    SamplingParams,
    Submit,
)

PROMPT = (40, 41, 42)


def byte_level_tokenizer(*longer: str) -> Tokenizer:
    """Specials 0 and 1, the 256 bytes, "é" as one token, and an added token that is not special.

    ``longer``: further tokens, each one character longer than a known one.
    """
    vocab = {"<s>": 0, "</s>": 1}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[character] = len(vocab)
    texts = ("Ã©", *longer)
    for text in texts:
        vocab[text] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(text[:-1], text[-1]) for text in texts]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def submit(
    stream: int,
    max_tokens: int = 10,
    *,
    prompt: Sequence[int] = PROMPT,
    interval: int = 1,
    resumed: int = 0,
    seed: int | None = None,
    priority: int = 0,
    salt: str | None = None,
    adapter: str | None = None,
    resubmitted: bool = False,
    keep_s: int = 0,
    **sampling: Any,
) -> Submit:
    """A request whose seed is its stream's number unless given."""
    return Submit(
        stream,
        np.array(prompt, "<i4").tobytes(),
        SamplingParams(max_tokens, stream if seed is None else seed, **sampling),
        interval,
        priority,
        salt,
        resumed,
        adapter=adapter,
        resubmitted=resubmitted or resumed > 0,
        hints=CacheHints(keep_s) if keep_s else None,
    )


class Received:
    """What one API server has of its streams; asserts that positions fit together and ends are single."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, int] = {}
        self.failed: dict[int, Any] = {}
        self.others: list[Any] = []
        """Messages that are neither a frame, nor a stream's failure, nor metrics."""
        self.metrics: list[EngineMetrics] = []
        self.frames = 0
        self.rows = 0

    def parts(self, parts: list[bytes]) -> None:
        """One ZMQ message of an engine."""
        message = decode_from_engine(parts[0])
        if isinstance(message, FrameHeader):
            assert len(parts) == 2
            self.frame(decode_frame(message, parts[1]))
            return
        assert len(parts) == 1
        if type(message).__name__ == "StreamFailed":
            self.fail(message)
        elif isinstance(message, EngineMetrics):
            self.metrics.append(message)
        else:
            self.others.append(message)

    def frame(self, frame: TokenFrame) -> None:
        self.frames += 1
        offset = 0
        for row in range(frame.rows):
            self.rows += 1
            stream = int(frame.stream[row])
            count = 1 if frame.count is None else int(frame.count[row])
            known = self.tokens.setdefault(stream, [])
            assert not self.ended(stream), f"a row of stream {stream} after its end"
            assert frame.position[row] == len(known), f"stream {stream} is at {len(known)}"
            known += frame.tokens[offset : offset + count].tolist()
            offset += count
            if frame.finish is not None and frame.finish[row]:
                self.finish[stream] = int(frame.finish[row])

    def fail(self, failure: Any) -> None:
        assert not self.ended(failure.stream), f"two ends of stream {failure.stream}"
        assert failure.position == len(self.tokens.get(failure.stream, []))
        self.failed[failure.stream] = failure

    def ended(self, stream: int) -> bool:
        return stream in self.finish or stream in self.failed

    def step(self, rows: StepRows) -> None:
        """A step's rows straight from an engine, all of one API server."""
        columns = ("stream", "position", "tokens", "count", "finish", "cached")
        self.frame(TokenFrame(step=0, **{name: getattr(rows, name) for name in columns}))
        for failure in rows.failed:
            self.fail(failure)


class Clock:
    """Time that passes only when something sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.naps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.naps.append(seconds)
        self.now += seconds
