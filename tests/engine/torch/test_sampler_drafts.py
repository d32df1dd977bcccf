"""Rows behind the end of a history are sampled as if their drafts had been appended, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.batch.slots import SlotTable
from penstock.engine.sampling.metadata import READS_LAST_TOKEN, SamplingMetadata
from penstock.engine.torch.sampling.sampler import SOME_CANDIDATES, Sampler
from penstock.wire.logprobs import Logprobs
from tests.engine.torch.harness import DEVICE, finished, submit
from tests.engine.torch.sampling_reference import any_sampling

pytestmark = pytest.mark.gpu

MAX_DRAFTS, STEPS, LENGTH = 5, 6, 120
Row = tuple[int, tuple[Any, ...] | None]
"""A token, and its logprobs: ids, values, rank."""


@dataclass
class Stream:
    """What a stream was asked for, and what it has given so far."""

    prompt: list[int]
    sampling: dict[str, Any]
    output: list[int] = field(default_factory=list)
    slot: int = -1
    in_flight: bool = False
    """Whether the last token of the output is on the device only."""


class Bench:
    """A sampler over streams whose histories, drafts and tokens in flight a test writes."""

    def __init__(self, slots: int, vocab: int) -> None:
        self.vocab = vocab
        self.table = SlotTable(slots, LENGTH, [])
        self.columns = SamplingMetadata(self.table, vocab)
        self.last = torch.zeros(slots, dtype=torch.int64, device=DEVICE)
        self.sampler = Sampler(self.columns, self.last)

    def add(self, stream: Stream) -> None:
        number = int(self.table.generation.sum()) * self.table.size + self.table.running()
        request = submit(number, stream.prompt, max_tokens=100, **stream.sampling)
        stream.slot = self.table.allocate(0, request)
        self.columns.set(stream.slot, request.sampling)
        for token in stream.output:
            self.append(stream, token)

    def remove(self, stream: Stream) -> None:
        self.columns.clear(stream.slot)
        self.table.release(stream.slot)

    def append(self, stream: Stream, token: int) -> None:
        self.table.append(np.array([stream.slot]), np.array([token], np.int32))

    def launch(self, stream: Stream, token: int) -> None:
        """A token that only the device knows: what stands in its place on the host is another one."""
        self.table.in_flight_tokens[stream.slot] = 1
        self.last[stream.slot] = token
        self.table.history[stream.slot, self.table.length[stream.slot]] = (token + 1) % self.vocab

    def settle(self, stream: Stream) -> None:
        self.table.in_flight_tokens[stream.slot] = 0
        self.append(stream, stream.output[-1])

    def draft(self, stream: Stream, tokens: list[int]) -> None:
        end = int(self.table.length[stream.slot])
        self.table.history[stream.slot, end : end + len(tokens)] = tokens

    def sample(self, logits: np.ndarray, slots: np.ndarray, length: np.ndarray) -> list[Row]:
        given = torch.from_numpy(logits.copy()).to(DEVICE)
        output = self.sampler.sample(given, slots, length.astype(np.int32)).to_host()
        finished()
        return rows_of(*output.read_tokens())


def rows_of(tokens: np.ndarray, logprobs: Logprobs | None) -> list[Row]:
    found: dict[int, tuple[Any, ...]] = {}
    if logprobs is not None:
        for row, ids, values, rank in zip(
            logprobs.token, logprobs.ids, logprobs.values, logprobs.rank, strict=True
        ):
            asked = ids >= 0
            found[int(row)] = ids[asked].tolist(), values[asked].tolist(), int(rank)
    return [(token, found.get(row)) for row, token in enumerate(tokens.tolist())]


def alone(vocab: int, stream: Stream, logits: np.ndarray, drafts: list[int]) -> Row:
    """The token of one row after a history to which the drafts are appended, in a sampler of its own."""
    bench = Bench(1, vocab)
    bench.add(Stream(stream.prompt, stream.sampling, stream.output + drafts))
    return bench.sample(logits[None], np.zeros(1, np.intp), bench.table.length[:1])[0]


def any_drafts(rng: np.random.Generator, stream: Stream, vocab: int) -> list[int]:
    """Tokens of the prompt, of the output, of bad words, any others, and each other's."""
    drafts: list[int] = []
    for _ in range(int(rng.integers(0, MAX_DRAFTS + 1))):
        sources = [stream.prompt, stream.output, drafts, range(min(vocab, 6)), range(vocab)]
        known = [source for source in sources if len(source)]
        source = known[int(rng.integers(len(known)))]
        drafts.append(int(source[int(rng.integers(len(source)))]))
    for word in stream.sampling.get("bad_words", ()):
        if rng.random() < 0.3:
            drafts = (drafts[: int(rng.integers(0, 3))] + list(word[:-1]))[:MAX_DRAFTS]
    return drafts


def step(rng: np.random.Generator, bench: Bench, streams: list[Stream]) -> None:
    """Sample rows of all streams, cut into calls anywhere; then let each history go on."""
    vocab = bench.vocab
    rng.shuffle(streams)  # type: ignore[arg-type]
    chosen = streams[: int(rng.integers(1, len(streams) + 1))]
    drafts = [[] if stream.in_flight else any_drafts(rng, stream, vocab) for stream in chosen]
    for stream, tokens in zip(chosen, drafts, strict=True):
        if not stream.in_flight:
            bench.draft(stream, tokens)
    rows = [
        (stream, tokens[:taken])
        for stream, tokens in zip(chosen, drafts, strict=True)
        for taken in range(len(tokens) + 1)
    ]
    logits = rng.normal(0, 2, (len(rows), vocab)).astype(np.float32)
    if rng.random() < 0.5:
        logits = np.round(logits)  # many equal ones
    slots = np.array([stream.slot for stream, _ in rows], np.intp)
    length = np.array([len(stream.prompt) + len(stream.output) + len(taken) for stream, taken in rows])
    cuts = np.sort(rng.integers(0, len(rows) + 1, int(rng.integers(0, 4))))
    found: list[Row] = []
    for part in np.split(np.arange(len(rows)), cuts):
        if len(part):
            found += bench.sample(logits[part], slots[part], length[part])
    wanted = [alone(vocab, stream, logits[row], taken) for row, (stream, taken) in enumerate(rows)]
    assert found == wanted
    for stream, tokens in zip(chosen, drafts, strict=True):
        go_on(rng, bench, stream, tokens)


def go_on(rng: np.random.Generator, bench: Bench, stream: Stream, drafts: list[int]) -> None:
    if stream.in_flight:
        bench.settle(stream)
        stream.in_flight = False
    accepted = drafts[: int(rng.integers(0, len(drafts) + 1))]
    last = int(rng.integers(bench.vocab))
    stream.output += [*accepted, last]
    for token in accepted:
        bench.append(stream, token)
    if not accepted and not bench.columns.needs[stream.slot] & READS_LAST_TOKEN and rng.random() < 0.5:
        bench.launch(stream, last)
        stream.in_flight = True
    else:
        bench.append(stream, last)
    if rng.random() < 0.1 and not stream.in_flight:  # another engine resumes it, or another stream comes
        bench.remove(stream)
        if rng.random() < 0.5:
            stream.output, stream.sampling = [], any_sampling(rng, bench.vocab)
        bench.add(stream)


@settings(max_examples=10)
@given(st.integers(0, 1 << 30))
@pytest.mark.parametrize("vocab", [5, 40, 300, SOME_CANDIDATES + 300])
def test_a_draft_is_sampled_as_if_it_were_appended(vocab: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 6))
    bench = Bench(count, vocab)
    streams = [
        Stream(rng.integers(0, vocab, int(rng.integers(1, 12))).tolist(), any_sampling(rng, vocab))
        for _ in range(count)
    ]
    for stream in streams:
        bench.add(stream)
    for _ in range(STEPS):
        step(rng, bench, streams)
