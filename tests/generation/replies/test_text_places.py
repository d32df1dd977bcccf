"""Offsets of logprobs are places in the text, and bytes are a token's own."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from penstock.generation.replies.logprobs import TokenNames
from penstock.generation.replies.text_places import TextPlaces
from penstock.streaming.token_table import TokenTable
from penstock.wire.frames import FinishReason
from tests.generation.planning import body, planners, tiny_tokenizer
from tests.generation.replying import Desk, in_loop, read_body, read_stream, tables_of

TEXT = "def 😀 héllo 😀"
FULL = TokenTable.from_tokenizer(tiny_tokenizer().raw, skip_special_tokens=False)


def logprobs_of(
    tokens: list[int], width: int, *, stream: bool, **fields: Any
) -> tuple[str, dict[str, list[Any]]]:
    found: list[tuple[str, dict[str, list[Any]]]] = []

    def run() -> None:
        desk = Desk(tables_of(tiny_tokenizer().raw))
        plan = planners().completion(body(logprobs=1, max_tokens=99, stream=stream, **fields))
        rows = [tokens[at : at + width] for at in range(0, len(tokens), width)]
        if stream:
            _, sink = desk.streamed(plan)
        else:
            reply = desk.collected(plan)
        desk.deliver(desk.rows(0, rows, FinishReason.EOS, logprobs=True))
        reading = read_stream(sink) if stream else read_body(reply)
        found.append((reading.text, reading.logprobs))

    in_loop(run)
    return found[0]


@pytest.mark.parametrize("width", [1, 3, 100])
@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_places_in_the_text(width: int, stream: bool) -> None:
    tokens = [*tiny_tokenizer().encode(TEXT, False), 1]
    assert len(tokens) > len(TEXT.split()), "there are characters of several tokens"
    ids = {"return_token_ids": True} if stream else {}
    text, logprobs = logprobs_of(tokens, width, stream=stream, **ids)
    places = logprobs["text_offset"]
    assert text == TEXT
    assert all(a <= b <= len(text) for a, b in pairwise(places))
    for (start, end), name in zip(pairwise([*places, len(text)]), logprobs["tokens"], strict=True):
        assert "\ufffd" in name or name == "</s>" or text[start:end] == name


@pytest.mark.parametrize("width", [1, 100])
def test_a_stop_string_bounds_them(width: int) -> None:
    tokens = [*tiny_tokenizer().encode("abc the stop string is here", False), 1]
    text, logprobs = logprobs_of(tokens, width, stream=False, stop=["the stop string"])
    assert text == "abc "
    assert max(logprobs["text_offset"]) <= len(text)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


def test_an_echoed_text_without_the_space_that_the_tokenizer_adds() -> None:
    table = TokenTable.from_tokenizer(
        _sentencepiece({"▁def": 0, "▁main": 1, "<0xF0>": 2, "<0x9F>": 3, "<0x98>": 4, "<0x80>": 5, "x": 6})
    )
    places = TextPlaces(table, "def main")
    assert places.next([0, 1]) == [0, 3]
    assert places.next([2, 3, 4, 5, 6, 6]) == [8, 8, 8, 8, 9, 10]
    assert places.next([6]) == [11]


def _sentencepiece(vocab: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def test_bytes_of_a_token_are_its_own() -> None:
    tokens = tiny_tokenizer().encode("😀é", False)
    names = TokenNames(FULL)
    spelled = [json.loads(names[token].prefix + b"0}") for token in tokens]
    assert bytes(byte for each in spelled for byte in each["bytes"]) == "😀é".encode()
    table = TokenTable.from_tokenizer(_sentencepiece({"▁a": 0, "<0xF0>": 1}), skip_special_tokens=False)
    names = TokenNames(table)
    assert [json.loads(names[t].prefix + b"0}")["bytes"] for t in (0, 1)] == [[32, 97], [240]]
