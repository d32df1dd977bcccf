"""Requests as vLLM's own front end would make them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.engine.attach.requests import encode_add, sampling_params
from penstock.engine.attach.versions import takes_hints
from penstock.engine.base import RequestRejected
from penstock.wire.messages import CacheHints, SamplingParams, Submit, ThinkingLimit

VOCAB = 320
EOS = (1, 7)


def submit(resumed: int = 0, **sampling: Any) -> Submit:
    given = {"max_tokens": 20, "seed": 5} | sampling
    kept = {
        name: given.pop(name)
        for name in ("priority", "cache_salt", "kv_transfer_params", "hints")
        if name in given
    }
    prompt = np.array([40, 41, 42], "<i4").tobytes()
    return Submit(stream=3, prompt=prompt, sampling=SamplingParams(**given), resumed=resumed, **kept)


def params(resumed: int = 0, **sampling: Any) -> dict[str, Any]:
    return sampling_params(submit(resumed, **sampling), EOS, VOCAB)


def test_the_places_of_fields() -> None:
    request = submit(priority=-2, cache_salt="salt")
    kind, body = encode_add("id", request, EOS, VOCAB, ["name", 9, "/path"])
    assert kind == b"\x00"
    fields = msgspec.msgpack.decode(body)
    assert fields[:3] == ["id", [40, 41, 42], None]
    assert fields[3]["max_tokens"] == 20
    assert fields[4] is None
    assert isinstance(fields[5], float)
    assert fields[6:] == [["name", 9, "/path"], "salt", None, None, None, 0, -1, -2]


def test_hints_are_for_versions_that_know_them() -> None:
    kv_hints = {"protocol_version": "1", "message_id": "m", "actions": []}
    request = submit(hints=CacheHints(300, "session", msgspec.json.encode(kv_hints)))
    _, plain = encode_add("id", request, EOS, VOCAB)
    assert len(msgspec.msgpack.decode(plain)) == 14
    _, body = encode_add("id", request, EOS, VOCAB, hints=True)
    fields = msgspec.msgpack.decode(body)
    assert fields[14:] == [None, False, None, None, None, False, "session", kv_hints]
    assert [takes_hints(version) for version in ("0.31.2", "0.32.0", "0.33.0+cpu", "1.0.0", "dev")] == [
        False,
        True,
        True,
        True,
        True,
    ]


def test_ends_of_outputs_are_the_models_and_the_requests() -> None:
    found = params(stop_token_ids=(9,))
    assert found["_eos_token_id"] == 1
    assert found["stop_token_ids"] == [7, 9]
    assert found["_all_stop_token_ids"] == [1, 7, 9]


def test_ignored_ends_are_forbidden_only_before_min_tokens() -> None:
    found = params(ignore_eos=True, min_tokens=4, stop_token_ids=(9,))
    assert "_eos_token_id" not in found
    assert found["stop_token_ids"] == [9]
    assert found["_all_stop_token_ids"] == [1, 7, 9]
    assert found["min_tokens"] == 4


def test_what_was_generated_elsewhere_counts() -> None:
    found = params(resumed=2, max_tokens=20, min_tokens=5)
    assert (found["max_tokens"], found["min_tokens"]) == (18, 3)
    assert params(resumed=2, min_tokens=1)["min_tokens"] == 0


def test_min_tokens_never_exceed_max_tokens() -> None:
    """vLLM's engine would lose the thread in which it receives requests."""
    found = params(max_tokens=5, min_tokens=9)
    assert found["min_tokens"] <= found["max_tokens"]


def test_seeds_only_of_requests_that_have_one() -> None:
    assert "seed" not in params()
    assert params(seeded=True)["seed"] == 5
    assert params(resumed=1, seeded=True)["seed"] != 5
    assert 0 <= params(resumed=2, seeded=True, seed=(1 << 63) - 1)["seed"] < 1 << 63


def test_rare_fields_are_absent_unless_they_are_set() -> None:
    rare = {
        "logprobs",
        "logprob_token_ids",
        "prompt_logprobs",
        "logit_bias",
        "allowed_token_ids",
        "_bad_words_token_ids",
    }
    assert not rare & params().keys()
    found = params(
        logprobs=0,
        prompt_logprobs=2,
        logit_bias={5: -1.5},
        allowed_token_ids=(3, 4),
        bad_words=((5, 6), (7,)),
        kv_transfer_params=b'{"do_remote_decode": true}',
    )
    assert (found["logprobs"], found["prompt_logprobs"], found["logit_bias"]) == (0, 2, {5: -1.5})
    assert (found["allowed_token_ids"], found["_bad_words_token_ids"]) == ((3, 4), ((5, 6), (7,)))
    assert found["extra_args"] == {"kv_transfer_params": {"do_remote_decode": True}}
    listed = params(logprobs=2, logprob_token_ids=(5, 3))
    assert (listed["logprobs"], listed["logprob_token_ids"]) == (2, (5, 3))


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (VOCAB,)}, "allowed_token_ids"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"bad_words": ((VOCAB,),)}, "bad_words"),
        ({"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
        ({"logprobs": 129, "logprob_token_ids": tuple(range(129))}, "logprob_token_ids"),
        ({"grammar": "root ::= 'a'"}, "structured_outputs"),
    ],
)
def test_what_vllm_does_not_take_is_refused_by_name(sampling: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestRejected, match=rf"^{field}: "):
        params(**sampling)


def test_a_reply_under_a_grammar_cannot_be_continued() -> None:
    assert params(grammar='start: "a"')["structured_outputs"]["grammar"] == 'start: "a"'
    with pytest.raises(RequestRejected, match="cannot continue a reply under a grammar") as caught:
        params(resumed=1, grammar='start: "a"')
    assert caught.value.code == "engine_error"


def test_numbers_beyond_the_wire() -> None:
    request = submit(kv_transfer_params=b'{"n": 99999999999999999999999}')
    with pytest.raises(RequestRejected, match="kv_transfer_params"):
        encode_add("id", request, EOS, VOCAB)


def test_vllm_gets_the_budget_of_reasoning() -> None:
    assert "thinking_token_budget" not in params()
    assert params(thinking=ThinkingLimit(0, ((4,),), ((5,),), (5,), (5,)))["thinking_token_budget"] == 0
