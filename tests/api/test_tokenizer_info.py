"""The tokenizer's configuration, as clients see it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.api.routes.tokenizer_info import tokenizer_info
from penstock.generation.prompt.chat_template import ChatTemplate


def test_what_is_shown_of_a_configuration(tmp_path: Path) -> None:
    token = {"__type": "AddedToken", "content": "<s>", "lstrip": False, "special": True}
    added = {"0": {"content": "<s>", "special": True}}
    config: dict[str, Any] = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": token,
        "additional_special_tokens": [token, "<x>"],
        "added_tokens_decoder": added,
        "model_max_length": 1000000000000000019884624838656,
        "vocab_file": "/secret/vocab.txt",
        "name_or_path": "/secret",
        "chat_template": "the model's",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    info = json.loads(tokenizer_info(tmp_path, ChatTemplate({"default": "ours"}, {})))
    assert info == {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "additional_special_tokens": ["<s>", "<x>"],
        "added_tokens_decoder": added,
        "model_max_length": 1000000000000000019884624838656,
        "chat_template": "ours",
    }


def test_a_tokenizer_without_a_configuration(tmp_path: Path) -> None:
    assert json.loads(tokenizer_info(tmp_path, None)) == {"tokenizer_class": "PreTrainedTokenizerFast"}
