"""The bundled demo model: small enough to ship, complete, and it writes words."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

import penstock
from penstock.generation.parsers.formats import TOOL_FORMATS
from penstock.generation.parsers.registry import output_format
from penstock.generation.prompt.chat_template import ChatTemplate

FOLDER = Path(penstock.__file__).parent / "demo"
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "README.md",
    "LICENSE-PYTHON.txt",
}
SIZE_LIMIT = 8_000_000
"""Bytes of the whole folder."""
SPECIAL = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
SOURCE = Path(__file__).parent.parent.parent / "scripts" / "demo_chat_template.jinja"
"""The chat template, as it is trained on."""
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def read(name: str) -> dict[str, Any]:
    value = json.loads((FOLDER / name).read_text("utf-8"))
    assert isinstance(value, dict)
    return value


def special_id(token: str) -> int:
    found = TOKENIZER.token_to_id(token)
    assert found is not None
    return found


def weights() -> dict[str, Any]:
    """The header of model.safetensors: name → {"dtype", "shape", "data_offsets"}."""
    with (FOLDER / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    assert isinstance(header, dict)
    return header


def test_the_folder_is_complete_and_small() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert set(sizes) == FILES
    assert sum(sizes.values()) <= SIZE_LIMIT


def test_the_configuration_describes_the_weights() -> None:
    config, tensors = read("config.json"), weights()
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert {tensor["dtype"] for tensor in tensors.values()} == {"BF16"}
    assert tensors["model.embed_tokens.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]
    keys = tensors["model.layers.0.self_attn.k_proj.weight"]["shape"]
    assert keys == [config["num_key_value_heads"] * config["head_dim"], config["hidden_size"]]
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    layers = {match[1] for name in tensors if (match := re.match(r"model\.layers\.(\d+)\.", name))}
    assert len(layers) == config["num_hidden_layers"]
    assert config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in tensors


def test_special_tokens_have_the_ids_that_the_configurations_name() -> None:
    config, generation, settings_ = (
        read("config.json"),
        read("generation_config.json"),
        read("tokenizer_config.json"),
    )
    begin, end, _, im_end, pad = (special_id(token) for token in SPECIAL)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (begin, end, pad)
    assert sorted(generation["eos_token_id"]) == sorted([end, im_end])
    assert [settings_[f"{role}_token"] for role in ("bos", "eos", "pad")] == [
        "<|begin|>",
        "<|end|>",
        "<|pad|>",
    ]
    assert TOKENIZER.get_vocab_size() == config["vocab_size"]
    for token in SPECIAL:
        assert TOKENIZER.encode(token, add_special_tokens=False).tokens == [token]


def test_encoding_begins_with_the_begin_token() -> None:
    assert TOKENIZER.encode("Return the").tokens == ["<|begin|>", "Return", "Ġthe"]
    assert TOKENIZER.encode("Return the", add_special_tokens=False).tokens == ["Return", "Ġthe"]


@given(st.text().filter(lambda text: not any(token in text for token in SPECIAL)))
@settings(max_examples=200)
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_the_vocabulary_fits_python_s_documentation() -> None:
    text = "Return a list of the names of the files in the directory given by path."
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert len(text) / len(ids) > 3.5


def test_the_chat_template_renders_in_a_sandbox() -> None:
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
        read("tokenizer_config.json")["chat_template"]
    )
    assert read("tokenizer_config.json")["chat_template"] + "\n" == SOURCE.read_text("utf-8")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    text = template.render(messages=messages, bos_token="<|begin|>", add_generation_prompt=True)
    assert text == (
        "<|begin|><|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    closed = template.render(messages=messages, bos_token="<|begin|>", add_generation_prompt=False)
    assert text == closed + "<|im_start|>assistant\n"
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert ids.count(special_id("<|begin|>")) == 1


def test_tools_are_shown_as_calls_with_examples_of_values() -> None:
    template = ChatTemplate.load(FOLDER)
    assert template is not None
    assert output_format("auto", "auto", template.source).tools is TOOL_FORMATS["hermes"]
    properties: dict[str, Any] = {
        "city": {"type": "string"},
        "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "unit": {"enum": ["celsius", "kelvin"]},
        "all": {"type": ["boolean", "null"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "more": {"type": "object"},
        "any": True,
    }
    weather = {
        "name": "weather",
        "description": "The weather.\nIn a city.",
        "parameters": {"properties": properties},
    }
    add = {
        "name": "add",
        "parameters": {"properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a"]},
    }
    tools = [
        {"type": "function", "function": each} for each in (weather, add, {"name": "now", "parameters": None})
    ]
    call = {"name": "now", "arguments": {"x": "é"}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": call}],
        },
        {"role": "tool", "content": "noon"},
    ]
    assert template.render(messages, tools=tools) == (
        "<|begin|><|im_start|>system\nBe brief.\n\nTools:\n"
        'The weather. {"name": "weather", "arguments": {"city": "string", "days": 0, '
        '"unit": "celsius|kelvin", "all": true, "tags": ["string"], "more": {}, "any": "string"}}\n'
        ' {"name": "add", "arguments": {"a": 0}}\n {"name": "now", "arguments": {}}\n<|im_end|>\n'
        "<|im_start|>user\nWeather?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "now", "arguments": {"x": "é"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nnoon<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("prompt", ["Return the", "The with statement", "This module provides"])
def test_greedy_text_reads_like_words(prompt: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    ids = torch.tensor([TOKENIZER.encode(prompt).ids])
    reply = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False)
    new = reply[0, ids.shape[1] :].tolist()
    text = TOKENIZER.decode(new)
    assert len(set(new)) > len(new) / 3
    assert text.isascii()
    words = re.findall(r"[A-Za-z]{2,}", text)
    assert len(words) >= 5
    assert sum(map(len, words)) > len(text) / 2
