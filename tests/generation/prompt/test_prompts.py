from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from penstock.dialects.completions.request_schema import CompletionRequest
from penstock.generation.prompt.prompts import check_vocabulary, parse_prompts, token_columns
from penstock.generation.request.body_decoder import MANY_BYTES, BodyDecoder
from penstock.http.errors import ApiError
from tests.generation.planning import body, error_of, planners


def column(*ids: int) -> bytes:
    return np.array(ids, "<i4").tobytes()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", ""], ["a", ""]),
        ([1, 2], [column(1, 2)]),
        ([[1], [2, 9]], [column(1), column(2, 9)]),
        ([column(1), column(2, 9)], [column(1), column(2, 9)]),
    ],
)
def test_the_four_forms(prompt: Any, prompts: list[Any]) -> None:
    assert list(parse_prompts(prompt, 10)) == prompts


@pytest.mark.parametrize(
    "prompt", [None, "", [], [[]], [10], [[1], [10]], [column(1, 10)], ["a", 1], [1, "a"], [1, [1]]]
)
def test_what_is_no_prompt(prompt: Any) -> None:
    assert error_of(parse_prompts, prompt, 10).status == 400


@pytest.mark.parametrize("prompt", [None, [], [[]], [10], [column(1, 10)], ["a", 1]])
def test_errors_name_the_field_that_was_sent(prompt: Any) -> None:
    error = error_of(parse_prompts, prompt, 10, "input")
    assert error.param in ("input", "body.input.0")
    assert "prompt" not in error.message.replace("at least one prompt", "")


def test_the_vocabulary_ends_before_its_size() -> None:
    check_vocabulary("prompt", 9, 10)
    error = error_of(check_vocabulary, "prompt", 10, 10)
    assert (error.message, error.param) == ("Token id 10 is out of vocabulary", "prompt")


MANY = list(range(1000, 1000 + MANY_BYTES // 4))
"""As many token ids as are decoded apart."""
apart = BodyDecoder(CompletionRequest, strict=False, id_field="prompt")
together = BodyDecoder(CompletionRequest, strict=False)


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        (b"[1]", [column(1)]),
        (b"[ 1 ,\n2,\t3\r]", [column(1, 2, 3)]),
        (b"[0, 2147483647]", [column(0, (1 << 31) - 1)]),
        (b"[[1, 2], [3]]", [column(1, 2), column(3)]),
        (b"[ [1] ,[2] ]", [column(1), column(2)]),
        *((text, None) for text in (b"null", b'"1, 2"', b"5", b"{}", b"[]", b"[ ]", b"[[]]", b"[[1], []]")),
        *(
            (text, None)
            for text in (b"[-1]", b"[1.0]", b"[1e3]", b"[true]", b"[null]", b'["1"]', b'["a", 1]')
        ),
        *(
            (text, None)
            for text in (b"[[1], 2]", b"[1, [2]]", b"[[[1]]]", b'[[1], "a"]', b'["[1]"]', b"[[1.5]]")
        ),
        *((text, None) for text in (b"[2147483648]", b"[1, 18446744073709551617]", b"[[1], [1%099d]]" % 0)),
        (b"[" + b",".join([b"[1]"] * 4097) + b"]", None),
    ],
)
def test_lists_of_token_ids_become_columns_and_nothing_else_does(
    text: bytes, columns: list[bytes] | None
) -> None:
    assert token_columns(text) == columns


@pytest.mark.parametrize(
    "replaced",
    [
        *(
            "1",
            "true",
            "null",
            "-5",
            "1.0",
            "1e2",
            "1.5",
            '"7"',
            '"x"',
            "[2]",
            "[]",
            "{}",
            "99999999999999999999",
        ),
        *("01", "+1", "1 2", "1,", ",1", "1]", "[1", "NaN", "0x1", "1_0", '"\\ud800"', ""),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_bodies_with_many_ids_are_decoded_as_those_with_few(replaced: str, nested: bool) -> None:
    prompt: Any = [MANY, MANY] if nested else MANY
    text = json.dumps({"max_tokens": 3, "prompt": prompt, "n": 1}).replace("1001", replaced, 1).encode()
    found: list[Any] = []
    for decoder in (apart, together):
        try:
            request = decoder.decode(text)
            assert (request.max_tokens, request.n) == (3, 1)
            found.append(list(parse_prompts(request.prompt, 50_000)))
        except ApiError as error:
            found.append((error.status, error.type, error.param, error.message))
    assert found[0] == found[1]


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n\t", " : ")])
def test_many_ids_are_never_a_list(separators: tuple[str, str]) -> None:
    prompts = [MANY, MANY[:9]]
    decoded = apart.decode(json.dumps({"prompt": prompts}, separators=separators).encode()).prompt
    assert decoded == [column(*ids) for ids in prompts]
    plan = planners().completion(body(prompt=MANY))
    assert plan.prompts == [column(*MANY)]
    error = error_of(planners().completion, body(prompt=[MANY, [*MANY, 16384]]))
    assert (error.message, error.param) == ("Token id 16384 is out of vocabulary", "prompt")
