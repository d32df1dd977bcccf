"""Long base64 is kept apart from a body, however it comes, and put back as it was."""

from __future__ import annotations

import asyncio
import base64
import json
import random

import pytest

from penstock.gateway.requests import long_values
from penstock.gateway.requests.long_values import (
    MARK_BYTES,
    MIN_VALUE_BYTES,
    NO_VALUES,
    LongValueScan,
    split,
    split_by_turns,
)
from penstock.gateway.requests.request_body import PICTURE_TOKENS, TOKEN_BYTES, read_request
from penstock.gateway.routing.prefix_affinity import prefix_blocks

RANDOM = random.Random(7)
PICTURE = base64.b64encode(RANDOM.randbytes(150_000)).decode()
OTHER = base64.b64encode(RANDOM.randbytes(150_000)).decode()


def chat(*pictures: str, text: str = 'é "what" \\ is it? ') -> bytes:
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{each}"}} for each in pictures
    ]
    content = [{"type": "text", "text": text}, *parts]
    return json.dumps({"messages": [{"role": "user", "content": content}], "model": "m"}).encode()


@pytest.mark.parametrize("step", [1000, 65_535, 65_536, 1 << 20])
def test_a_body_comes_back_as_it_was(step: int) -> None:
    edges = ["A" * (MIN_VALUE_BYTES + more) for more in (-1, 0, 1)]
    body = chat(PICTURE, *edges, OTHER, PICTURE, text="é\n" * 40_000)
    scan, seen = LongValueScan(), -1
    for at in range(0, len(body), step):
        scan.feed(body[at : at + step])
        if scan.in_value and seen < scan.values:
            seen = scan.values
            text, came = scan.beginning()
            assert came == body[: len(came)]
            assert len(came) == min(at + step, len(body)), "all that has come"
            assert json.loads(text)["messages"][0]["role"] == "user"
    text, values = scan.finish()
    assert scan.size == len(body)
    assert b"".join(values.filled(text)) == body
    assert len(json.loads(text)["messages"][0]["content"]) == 7
    assert values.compared(text)[1] == 5, "one of the edges is too short"
    assert len(values.by_mark) == 4, "a picture that is sent twice is held once"


def test_what_is_forgotten_is_still_told_apart() -> None:
    body, scan = chat(PICTURE, OTHER), LongValueScan()
    scan.feed(body[:100_000])
    scan.forget()
    scan.feed(body[100_000:])
    text, values = scan.finish()
    whole, others = split(body)
    assert values.compared(text) == others.compared(whole)
    assert not any(values.by_mark.values())


def test_prompts_are_counted_and_compared_by_their_pictures_digests() -> None:
    one, values = split(chat(PICTURE))
    read = read_request(one, values=values)
    assert read.pictures == 1
    assert read.tokens == (len(read.prompt) - MARK_BYTES) // TOKEN_BYTES + PICTURE_TOKENS
    assert read_request(one).pictures == 0, "a client wrote the mark"
    long = {"text": "word " * 400}
    same, *blocks = [
        prefix_blocks("m", read_request(text, values=values).prompt)
        for text, values in (split(chat(*[each] * 4, **long)) for each in (PICTURE, PICTURE, OTHER))
    ]
    assert same == blocks[0]
    assert blocks[0][:4] == blocks[1][:4]
    assert blocks[0][-1] != blocks[1][-1]


def test_small_bodies_and_texts_are_left_alone() -> None:
    small = chat("A" * 8000)
    assert split(small) == (small, NO_VALUES)
    text = chat(text="no picture, but words " * 5000)
    assert split(text)[0] == text


def test_whole_bodies_are_searched_by_turns() -> None:
    body = chat(PICTURE * 10, OTHER)

    async def main() -> int:
        turns, task = 0, asyncio.ensure_future(split_by_turns(body))
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        text, values = task.result()
        assert b"".join(values.filled(text)) == body
        return turns

    assert asyncio.run(main()) > 3


@pytest.mark.parametrize("before", ["\\n", "\\u00e9", "\\/", "\\\\", "\\u005c", "é\\t", "x:", ""])
def test_escapes_before_base64_stay_whole(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_values, "MIN_VALUE_BYTES", 16)
    long = "QUJD" * 6
    body = f'{{"data:{long}":"{before}{long}","text":"{long}{before}{long}", "a":["\\n", "u"]}}'.encode()
    for size in range(1, 40):
        monkeypatch.setattr(long_values, "SLICE_BYTES", size)
        scan = LongValueScan()
        for at in range(0, len(body), 7):
            scan.feed(body[at : at + 7])
        text, values = scan.finish()
        assert b"".join(values.filled(text)) == body
        assert values.compared(text)[1] == (4 if before else 3)
        written = json.dumps(json.loads(text), ensure_ascii=False).encode()
        assert json.loads(b"".join(values.filled(written))) == json.loads(body)


def test_a_mark_that_a_client_writes_stands_for_nothing() -> None:
    """Else a body of 64 MB could ask for terabytes."""
    text, values = split(chat(PICTURE))
    (mark,) = values.by_mark
    for body in (text.replace(mark, PICTURE.encode() + b" " + mark), chat(PICTURE, text=mark.decode())):
        again, held = split(body)
        assert held.compared(again)[1] == 1
        assert b"".join(held.filled(again)) == body


@pytest.mark.parametrize("number", ["1" * 70_000, "-1." + "0" * 5000 + "e+1"])
def test_long_numbers_are_text(number: str) -> None:
    body = f'{{"model":"m","n":{number},"messages":"{PICTURE}"}}'.encode()
    text, values = split(body)
    assert len(values.by_mark) == 1
    assert read_request(text, values=values).pictures == 1, "it is JSON"


@pytest.mark.parametrize("name", ["session_id", "prompt_cache_key", "metadata"])
def test_a_long_name_of_a_session_is_the_same_in_every_body(name: str) -> None:
    named = {name: {"user_id": PICTURE} if name == "metadata" else PICTURE}
    body = json.dumps({"model": "m", "messages": "x", **named}).encode()
    one, two = [read_request(text, values=values).session for text, values in (split(body), split(body))]
    assert one is not None
    assert one == two
