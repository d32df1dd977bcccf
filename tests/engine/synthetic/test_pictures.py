"""Pictures in the prompts of a synthetic engine, alone and behind its sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.config.serve import ServeConfig
from penstock.engine.synthetic.engine import SyntheticEngine
from penstock.wire.media.items import MediaItem, PagePiece, PagesWanted
from penstock.wire.messages import MEDIA_GONE, GoAway, Submit
from tests.engine.loops import Host
from tests.engine.media.pictures import Pictures, file_of, key, pictures_in
from tests.engine.media.test_page_supply import pieces
from tests.engine.peers import ApiServer
from tests.engine.support import Clock, Received, submit

IMAGE = 259
"""The tokenizer's last added token."""


@pytest.fixture
def pictures(tmp_path: Path) -> Iterator[Pictures]:
    with pictures_in(tmp_path) as made:
        yield made


def seeing(stream: int, *names: str, tokens: int = 5, temperature: float = 0.0, text: int = 40) -> Submit:
    """A request with pictures of 6 tokens, each behind a token of text."""
    prompt, media = [], []
    for name in names:
        media.append(MediaItem(key(name), len(prompt) + 1, 6, len(file_of(name, 6))))
        prompt += [text, *[IMAGE] * 6]
    request = submit(stream, tokens, prompt=[*prompt, 41], temperature=temperature, ignore_eos=True)
    return msgspec.structs.replace(request, media=tuple(media))


class Bench:
    """An engine whose time passes only in its own sleep."""

    def __init__(self, model_dir: Path, pictures: Pictures, **options: Any) -> None:
        self.clock = Clock()
        self.engine = make_engine(model_dir, pictures, clock=self.clock, sleep=self.clock.sleep, **options)
        self.received = Received()

    def run(self, *requests: Submit, most: int = 1000) -> dict[int, list[int]]:
        for request in requests:
            self.engine.submit(0, request)
        for _ in range(most):
            if not self.engine.has_work():
                break
            self.received.step(self.engine.step())
        return self.received.tokens

    def counts(self) -> list[float]:
        """Pictures encoded, of prompts, found."""
        metrics = self.engine.metrics()
        names = ("pictures_encoded_total", "encoder_cache_queries_total", "encoder_cache_hits_total")
        return [metrics[name] for name in names]


def make_engine(
    model_dir: Path, pictures: Pictures, clock: Any = None, sleep: Any = None, **options: Any
) -> SyntheticEngine:
    times = {} if clock is None else {"clock": clock, "sleep": sleep}
    return SyntheticEngine(
        ServeConfig(engine="synthetic", **options), str(model_dir), pages=pictures.supply, **times
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_depend_on_the_pictures_and_their_order(
    model_dir: Path, pictures: Pictures, temperature: float
) -> None:
    pictures.put("a", "b")
    bench = Bench(model_dir, pictures)
    shown = [("a",), ("b",), ("a", "b"), ("b", "a"), ("a",)]
    requests = [seeing(stream, *names, temperature=temperature) for stream, names in enumerate(shown)]
    requests = [
        msgspec.structs.replace(each, sampling=msgspec.structs.replace(each.sampling, seed=7))
        for each in requests
    ]
    tokens = bench.run(*requests)
    assert tokens[0] == tokens[4]
    assert len({tuple(tokens[stream]) for stream in range(4)}) == 4
    again = Bench(model_dir, pictures, max_num_batched_tokens=3).run(*requests)  # in several steps
    assert again == tokens
    assert bench.counts() == [2, 7, 5]


def test_encoding_takes_its_time_once_per_picture(model_dir: Path, pictures: Pictures) -> None:
    """One picture per step beside text, which is delayed by no more than that."""
    pictures.put("a", "b", "c")
    bench = Bench(model_dir, pictures, synthetic_step_ms=10, synthetic_encode_ms=50)
    bench.run(submit(0, 20, ignore_eos=True), most=2)
    began = bench.clock.now
    bench.run(seeing(1, "a"), seeing(2, "b"), seeing(3, "c"), seeing(4, "a"), most=3)
    assert bench.clock.naps[-3:] == pytest.approx([0.06] * 3)
    assert bench.clock.now - began == pytest.approx(0.18)
    assert len(bench.received.tokens[0]) == 5
    bench.run()
    assert bench.counts() == [3, 4, 1]


def test_streams_wait_for_pages_and_text_does_not(model_dir: Path, pictures: Pictures) -> None:
    bench = Bench(model_dir, pictures, synthetic_step_ms=0)
    bench.run(seeing(1, "a"), seeing(2, "a"), submit(3, 4), most=8)
    assert bench.received.finish.keys() == {3}
    assert bench.engine.has_work()
    assert pictures.supply.take_wanted() == [(0, PagesWanted(key("a")))]
    pictures.supply.receive(0, PagePiece(key("a"), 0, b""))
    bench.run()
    assert {failure.code for failure in bench.received.failed.values()} == {MEDIA_GONE}
    assert bench.received.failed.keys() == {1, 2}


def test_a_stream_may_leave_while_its_pictures_are_encoded(model_dir: Path, pictures: Pictures) -> None:
    pictures.put("a", "b")
    bench = Bench(model_dir, pictures, max_num_batched_tokens=2, max_num_seqs=2)

    def begin() -> None:
        bench.engine.call("sleep", {})  # it forgets features
        bench.received = Received()
        bench.run(seeing(1, "a", "b"), most=1)
        assert not bench.received.tokens

    for _ in range(2):
        begin()
        bench.engine.abort(0, [1])
        bench.run(most=2)
        assert not bench.engine.has_work()
    begin()
    bench.engine.drop_server(0)
    assert not bench.engine.has_work()
    begin()
    assert [failure.stream for failure in bench.engine.fail_all("code", "why").failed] == [1]
    assert not bench.engine.has_work()


def test_pages_over_the_wire(
    model_dir: Path, run_dir: str, pictures: Pictures, stack: ExitStack, connect: Callable[..., ApiServer]
) -> None:
    """They come once for all streams; wrong ones end the streams of who sent them, and no others."""
    engine = make_engine(model_dir, pictures, synthetic_step_ms=1)
    stack.callback(Host(model_dir, run_dir, engine).close)
    good, bad = connect(0), connect(1)
    good.send(*(seeing(stream, "a") for stream in (1, 2)))
    bad.send(seeing(1, "b"))
    good.read(lambda: PagesWanted(key("a")) in good.received.others)
    bad.read(lambda: PagesWanted(key("b")) in bad.received.others)
    bad.send(PagePiece(key("b"), 5, b"x"))
    bad.read(lambda: any(isinstance(message, GoAway) for message in bad.received.others))
    good.send(*pieces("a"))
    good.read(lambda: {1, 2} <= good.received.finish.keys())
    assert good.received.others.count(PagesWanted(key("a"))) == 1
    assert good.received.tokens[1] == good.received.tokens[2]
    assert engine.metrics()["pictures_encoded_total"] == 1
    assert engine.metrics()["pages_wanted_total"] == 2
