"""Models of random weights in the shapes of well-known ones: a folder with config.json and a tokenizer."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPT_125M: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "dtype": "float16",
    "vocab_size": 50272,
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_TINY = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass(frozen=True)
class Shape:
    """A model's shape. ``longest``: tokens of a prompt and its output that measurements use; ``parameters``:
    their number."""

    name: str
    config: dict[str, Any]
    longest: int
    parameters: int

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def heads(self) -> int:
        return int(self.config["num_attention_heads"])

    @property
    def head_size(self) -> int:
        return int(self.config["hidden_size"]) // self.heads

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of a token's keys and values in all layers."""
        heads = int(self.config.get("num_key_value_heads", self.heads))
        return 2 * self.layers * heads * self.head_size * itemsize

    def write(self, folder: Path) -> str:
        """Writes the model's files; ``--load-format dummy`` needs no weights. Returns the folder."""
        (folder / "config.json").write_text(json.dumps(self.config))
        (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(self.vocab_size)))
        return str(folder)

    def prompts(self, count: int, tokens: int, seed: int = 0) -> list[list[int]]:
        """Different random token ids: no prompt shares a prefix with another one."""
        draw = random.Random(f"{seed}/{count}/{tokens}")
        return [draw.choices(range(300, self.vocab_size), k=tokens) for _ in range(count)]


def find_shape(name: str, *, tiny: bool) -> Shape:
    """opt-125m, or llama-8b: Llama 3's 8 B model, with 32,768 positions. ``tiny``: 2 small layers each."""
    if name == "opt-125m":
        config, longest, parameters = OPT_125M, 2048, 125_239_296
        small: dict[str, Any] = {"ffn_dim": 128, "word_embed_proj_dim": 64, "max_position_embeddings": 256}
    else:
        config, longest, parameters = LLAMA_8B, 17000, 8_030_261_248
        small = {"intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16}
    if tiny:
        return Shape(name, config | _TINY | small, 256, 200_000)
    return Shape(name, config, longest, parameters)


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """A tokenizer.json with a text for every token id: the bytes, then words of letters."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = "abcdefghijklmnopqrstuvwxyz"
    texts = sorted(ByteLevel.alphabet())
    for number in range(vocab_size - len(texts)):
        word = "Ġ" + letters[number % 26]
        while number := number // 26:
            word += letters[number % 26]
        texts.append(word)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {text: number for number, text in enumerate(texts)}, "merges": []}
    return {"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": byte_level} | {
        "decoder": byte_level
    }
