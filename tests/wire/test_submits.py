from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.wire.decoding import decode_from_server
from penstock.wire.messages import (
    SamplingParams,
    Submit,
    encode,
)
from penstock.wire.submits import FIXED_SIZE, join_submits, shared_size, split_submit

SHARED = SamplingParams(
    8,
    0,
    grammar="x" * 100_000,
    allowed_token_ids=tuple(range(1000)),
    stop_token_ids=tuple(range(100_000, 101_000)),
    logit_bias=dict.fromkeys(range(1000), 1.0),
    bad_words=((1, 2), (70_000,)),
)
PROMPT = bytes(range(40))

tokens = st.integers(0, 3).map(lambda count: b"\7\0\0\0" * count)


@st.composite
def streams(draw: st.DrawFn) -> list[Submit]:
    """Streams of one request: of one prompt or of several, some resumed."""
    made = []
    for stream in range(draw(st.integers(1, 6))):
        prompt = draw(st.sampled_from([PROMPT, PROMPT[:8], bytes(bytearray(PROMPT))]))
        output = draw(tokens)
        sampling = replace(
            SHARED,
            seed=draw(st.integers(0, (1 << 63) - 1)),
            max_tokens=draw(st.integers(1, 9)),
            prompt_logprobs=draw(st.integers(-1, 3)),
        )
        made.append(
            Submit(stream, prompt + output, sampling, 3, 1, "salt", len(output) // 4, 20, "adapter", b"{}")
        )
    return made


@given(streams())
def test_joined_streams_are_the_same_after_the_wire(submits: list[Submit]) -> None:
    received = decode_from_server(encode(join_submits(submits)))
    assert isinstance(received, Submit)
    assert list(split_submit(received)) == submits


def test_what_choices_share_crosses_the_wire_once_and_is_held_once() -> None:
    submits = [Submit(stream, PROMPT, replace(SHARED, seed=stream)) for stream in range(1024)]
    one, joined = encode(submits[0]), encode(join_submits(submits))
    assert len(joined) < len(one) + 1024 * 24
    received = decode_from_server(joined)
    assert isinstance(received, Submit)
    split = list(split_submit(received))
    assert [request.sampling.seed for request in split] == list(range(1024))
    for request in split:
        assert request.prompt is split[0].prompt
        for name in ("grammar", "allowed_token_ids", "stop_token_ids", "logit_bias", "bad_words"):
            assert getattr(request.sampling, name) is getattr(split[0].sampling, name)


def test_the_estimated_size_is_no_less_than_the_encoded_one() -> None:
    for sampling in (SHARED, SamplingParams(1 << 30, 1 << 62)):
        submit = Submit(1 << 30, PROMPT, sampling, 1 << 14, 1 << 60, "s" * 200, 0, 60_000, "a" * 10, b"{}")
        size = len(encode(submit)) - len(PROMPT)
        assert size <= shared_size(submit) <= 2 * size + FIXED_SIZE
