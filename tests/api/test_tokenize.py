"""Replies of /tokenize and /detokenize, of texts that are longer than what becomes JSON at a time."""

from __future__ import annotations

import json
from unittest.mock import Mock

import pytest

from penstock.api.routes.tokenize import JSON_PIECE, TokenizeRoutes
from penstock.config.serve import ServeConfig
from penstock.generation.prompt.prompt_encoder import PromptEncoder
from penstock.generation.prompt.tokenizer import LONG_DECODE
from tests.generation.planning import tiny_input_processor, tiny_tokenizer


@pytest.mark.parametrize("tokens", [1, JSON_PIECE, JSON_PIECE + 1, 3 * JSON_PIECE])
def test_a_long_reply_is_one_reply(tokens: int) -> None:
    tokenizer = tiny_tokenizer()
    processor = tiny_input_processor(ServeConfig(), max_model_len=1 << 20)
    routes = TokenizeRoutes(processor, PromptEncoder(tokenizer, None), ServeConfig(), Mock())
    text = "\N{GREEK SMALL LETTER ALPHA}" * (-(-tokens // 2))
    body = {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
    reply = json.loads(routes.tokenized(json.dumps(body).encode()))
    ids = tokenizer.encode(text, False)
    assert list(reply) == ["count", "max_model_len", "tokens", "token_strs"]
    assert (reply["count"], reply["max_model_len"]) == (len(ids), 1 << 20)
    assert reply["tokens"] == ids
    assert reply["token_strs"] == tokenizer.token_strings(ids)
    back = json.loads(routes.detokenized(json.dumps({"tokens": ids}).encode()))
    assert back == {"prompt": text}
    body["return_token_strs"] = False
    assert json.loads(routes.tokenized(json.dumps(body).encode()))["token_strs"] is None


def test_a_long_list_of_ids_is_decoded_as_a_short_one() -> None:
    tokenizer = tiny_tokenizer()
    ids = (tokenizer.encode("naïve 👍🏽 text ") * LONG_DECODE)[: LONG_DECODE + 1]
    for special in (False, True):
        assert tokenizer.decode(ids, special) == tokenizer.raw.decode(ids, skip_special_tokens=special)
