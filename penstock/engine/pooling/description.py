"""What a model directory says of the vectors, scores or labels that its model makes. Imports no torch: the
supervisor and API servers read it as well."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from penstock.config.errors import ConfigError
from penstock.engine.model_length import DEFAULT_MAX_MODEL_LEN, longest_text
from penstock.engine.pooling.modules import MAX_FEATURES, LogitScore, Modules, read_modules
from penstock.engine.pooling.supported_encoders import OFFSET_POSITIONS, SUPPORTED_ENCODERS
from penstock.wire.pooling import MAX_LABELS, PoolingTask

Runner = Literal["auto", "generate", "pooling", "both"]
"""What a model is served for: text, vectors, or both; ``auto``: what its files say."""
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]

WIDTH_NAMES = ("hidden_size", "n_embd", "dim", "d_model")
"""Fields of config.json that state the size of hidden states; the first one that is there counts."""

_TEXT = re.compile(r"\w+(ForCausalLM|LMHeadModel|ForConditionalGeneration|ChatModel)")
"""Architectures that generate text; those of other models make vectors or labels."""
_CLASSIFIER = re.compile(r"\w+For(Sequence|Token)Classification")
_OTHERS = re.compile(
    r"\w*(RewardModel|RewardModeling)|\w+For(QuestionAnswering|MultipleChoice|NextSentencePrediction)"
)


@dataclass(frozen=True, kw_only=True)
class PoolingDescription:
    """The properties of a model that makes vectors, scores or labels."""

    tasks: tuple[PoolingTask, ...]
    """What it can make, the first one by default."""
    generates: bool = False
    """Whether it is to serve text as well."""
    width: int = 0
    """Values of a vector; 0: it makes none."""
    labels: tuple[str, ...] = ()
    """Names of its classifier's labels."""
    max_tokens: int
    """Tokens of the longest input, special ones included."""
    positions: int = 0
    """Tokens that it has positions for, where its files allow fewer."""
    normalizes: bool = True
    """Whether its vectors have the length 1 unless a request says otherwise."""
    matryoshka: bool = True
    """Whether the first values of a vector are a vector, as far as its files say."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that come before inputs, by name, as sentence-transformers has them."""
    default_prompt: str | None = None
    """Name of the prompt of requests that name none."""
    pools_prompt: bool = True
    """Whether the tokens of a prompt count in the vector."""
    similarity: Similarity = "cosine"
    """How vectors are compared."""

    def longest(self, asked: int | None) -> int:
        """Tokens of the longest input with that ``--max-model-len``, which may be more than the files
        allow."""
        return self.max_tokens if asked is None else min(asked, max(self.max_tokens, self.positions))


def describe_pooling(directory: Path, runner: Runner = "auto") -> PoolingDescription | None:
    """What the model in ``directory`` makes besides text; None: it only generates text. Raises ConfigError
    for files that cannot be used, or a model that cannot be what ``runner`` asks for."""
    modules = read_modules(directory)
    path = modules.transformer / "config.json"
    if not path.is_file() and runner in ("auto", "generate"):
        return None  # an engine that needs no model
    described = _read_object(path)
    architecture = _architecture(described)
    makes_text = _makes_text(described, architecture)
    if runner in ("generate", "both") and not makes_text:
        what = architecture or described.get("model_type")
        raise ConfigError(
            f"{path}: {what} makes vectors or labels; {runner!r} of --runner asks for a model of text"
        )
    if runner == "generate" or (runner == "auto" and makes_text and not modules.stated):
        return None
    if _OTHERS.fullmatch(architecture):
        raise ConfigError(
            f"{path}: {architecture} is not supported: its heads are code of the model's, or it answers with "
            "parts of texts; classifiers are those for sequences and tokens"
        )
    positions = _positions(described)
    common: dict[str, Any] = {
        "generates": runner == "both",
        "max_tokens": _max_tokens(modules, positions),
        "positions": positions,
    }
    if any(isinstance(step, LogitScore) for step in modules.steps):
        return PoolingDescription(tasks=(PoolingTask.CLASSIFY,), labels=("LABEL_0",), **common)
    if classifier := _CLASSIFIER.fullmatch(architecture):
        task = PoolingTask.CLASSIFY if classifier[1] == "Sequence" else PoolingTask.TOKEN_CLASSIFY
        return PoolingDescription(tasks=(task,), labels=_labels(path, described), **common)
    sentences = _read_object(directory / "config_sentence_transformers.json", optional=True)
    prompts, default = _prompts(directory / "config_sentence_transformers.json", sentences)
    similarity = sentences.get("similarity_fn_name")
    return PoolingDescription(
        tasks=(PoolingTask.EMBED, PoolingTask.TOKEN_EMBED),
        width=modules.width(_hidden_size(path, described)),
        normalizes=modules.normalizes or not modules.stated,
        matryoshka=described.get("is_matryoshka") is not False,
        prompts=prompts,
        default_prompt=default,
        pools_prompt=modules.pools_prompt,
        similarity=cast(Similarity, similarity) if similarity in get_args(Similarity) else "cosine",
        **common,
    )


# -- files ---------------------------------------------------------------------------------------------


def _read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The JSON object in a file; empty when there is none and it is ``optional``."""
    if optional and not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: has to be a JSON object")
    return found


# -- its parts -----------------------------------------------------------------------------------------


def _architecture(described: dict[str, Any]) -> str:
    named = described.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _makes_text(described: dict[str, Any], architecture: str) -> bool:
    """Whether the model generates text: a decoder with its output layer."""
    if described.get("use_bidirectional_attention") is True or described.get("is_causal") is False:
        return False
    if described.get("model_type") in SUPPORTED_ENCODERS:
        return False
    return not architecture or _TEXT.fullmatch(architecture) is not None


def _positions(described: dict[str, Any]) -> int:
    text = described.get("text_config")
    described = text | described if isinstance(text, dict) else described
    longest = longest_text(described) or DEFAULT_MAX_MODEL_LEN
    if described.get("model_type") in OFFSET_POSITIONS:
        padding = described.get("pad_token_id")
        longest -= (padding if type(padding) is int else 1) + 1
    return longest


def _max_tokens(modules: Modules, positions: int) -> int:
    """The least of what positions, the tokenizer and sentence-transformers' files allow."""
    tokenizer = _read_object(modules.transformer / "tokenizer_config.json", optional=True)
    found = [positions, modules.max_seq_length, tokenizer.get("model_max_length")]
    return min(each for each in found if type(each) is int and each > 0)


def _labels(path: Path, described: dict[str, Any]) -> tuple[str, ...]:
    named = described.get("id2label")
    if isinstance(named, dict) and named:
        count: Any = len(named)
    else:
        named, count = {}, described.get("num_labels", 2)  # transformers writes no names of two labels
    if type(count) is not int or not 1 <= count <= MAX_LABELS:
        raise ConfigError(
            f"{path}: num_labels is {count!r:.60}, it has to be an integer from 1 to {MAX_LABELS:,}"
        )
    return tuple(str(named.get(str(index), f"LABEL_{index}")) for index in range(count))


def _hidden_size(path: Path, described: dict[str, Any]) -> int:
    text = described.get("text_config")
    described = text | described if isinstance(text, dict) else described
    width = next((described[name] for name in WIDTH_NAMES if name in described), None)
    if type(width) is not int or not 1 <= width < MAX_FEATURES:
        raise ConfigError(f"{path}: states no size of vectors ({', '.join(WIDTH_NAMES)})")
    return width


def _prompts(path: Path, sentences: dict[str, Any]) -> tuple[dict[str, str], str | None]:
    prompts, default = sentences.get("prompts") or {}, sentences.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ConfigError(f"{path}: prompts is no object of texts")
    if default is not None and default not in prompts:
        raise ConfigError(f"{path}: default_prompt_name {default!r} is none of its prompts")
    return prompts, default
