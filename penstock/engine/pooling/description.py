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
from penstock.engine.model_length import longest_text
from penstock.engine.pooling.supported_encoders import OFFSET_POSITIONS, SUPPORTED_ENCODERS
from penstock.engine.vocabulary import DEFAULT_MAX_MODEL_LEN
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
    normalizes: bool = True
    """Whether its vectors have the length 1 unless a request says otherwise."""
    matryoshka: bool = True
    """Whether the first values of a vector are a vector, as far as its files say."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that come before inputs, by name, as sentence-transformers has them."""
    default_prompt: str | None = None
    """Name of the prompt of requests that name none."""
    similarity: Similarity = "cosine"
    """How vectors are compared."""


def describe_pooling(directory: Path, runner: Runner = "auto") -> PoolingDescription | None:
    """What the model in ``directory`` makes besides text; None: it only generates text. Raises ConfigError
    for files that cannot be used, or a model that cannot be what ``runner`` asks for."""
    path = directory / "config.json"
    if not path.is_file() and runner in ("auto", "generate"):
        return None  # an engine that needs no model
    described = _read_object(path)
    architecture = _architecture(described)
    makes_text = _makes_text(described, architecture)
    if runner in ("generate", "both") and not makes_text:
        what = architecture or described.get("model_type")
        raise ConfigError(f"--runner {runner}: {path} is of {what}, which makes vectors or labels, no text")
    modules = _read_modules(directory)
    if runner == "generate" or (runner == "auto" and makes_text and modules is None):
        return None
    if _OTHERS.fullmatch(architecture):
        raise ConfigError(
            f"{path}: {architecture} is not supported: its heads are code of the model's, or it answers with "
            "parts of texts; classifiers are those for sequences and tokens"
        )
    common: dict[str, Any] = {"generates": runner == "both", "max_tokens": _max_tokens(directory, described)}
    if classifier := _CLASSIFIER.fullmatch(architecture):
        task = PoolingTask.CLASSIFY if classifier[1] == "Sequence" else PoolingTask.TOKEN_CLASSIFY
        return PoolingDescription(tasks=(task,), labels=_labels(path, described), normalizes=False, **common)
    sentences = _read_object(directory / "config_sentence_transformers.json", optional=True)
    prompts, default = _prompts(directory / "config_sentence_transformers.json", sentences)
    similarity = sentences.get("similarity_fn_name")
    return PoolingDescription(
        tasks=(PoolingTask.EMBED, PoolingTask.TOKEN_EMBED),
        width=_width(path, described, modules or ()),
        normalizes=modules is None or any(name == "Normalize" for name, _ in modules),
        matryoshka=described.get("is_matryoshka") is not False,
        prompts=prompts,
        default_prompt=default,
        similarity=cast(Similarity, similarity) if similarity in get_args(Similarity) else "cosine",
        **common,
    )


# -- files ---------------------------------------------------------------------------------------------


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The JSON object in a file; empty when there is none and it is ``optional``."""
    if optional and not path.is_file():
        return {}
    found = _read_json(path)
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: holds {type(found).__name__}, not an object")
    return found


def _read_modules(directory: Path) -> list[tuple[str, dict[str, Any]]] | None:
    """Class name and config.json of each module after the transformer; None: there is no modules.json."""
    path = directory / "modules.json"
    if not path.is_file():
        return None
    modules = _read_json(path)
    try:
        named = [(str(each["type"]).rpartition(".")[2], directory / str(each["path"])) for each in modules]
    except (LookupError, TypeError):
        raise ConfigError(f"{path}: is no list of modules, each with type and path") from None
    return [(name, _read_object(folder / "config.json", optional=True)) for name, folder in named[1:]]


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


def _max_tokens(directory: Path, described: dict[str, Any]) -> int:
    """The least of what positions, the tokenizer and sentence-transformers' files allow."""
    text = described.get("text_config")
    described = text | described if isinstance(text, dict) else described
    longest = longest_text(described) or DEFAULT_MAX_MODEL_LEN
    if described.get("model_type") in OFFSET_POSITIONS:
        padding = described.get("pad_token_id")
        longest -= (padding if type(padding) is int else 1) + 1
    found: list[Any] = [longest]
    tokenizer = _read_object(directory / "tokenizer_config.json", optional=True)
    found.append(tokenizer.get("model_max_length"))
    for path in sorted(directory.glob("sentence_*_config.json")):
        found.append(_read_object(path).get("max_seq_length"))
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


def _width(path: Path, described: dict[str, Any], modules: Any) -> int:
    """Values of a vector after the modules of sentence-transformers."""
    text = described.get("text_config")
    described = text | described if isinstance(text, dict) else described
    width = next((described[name] for name in WIDTH_NAMES if name in described), None)
    for name, config in modules:
        if name == "Pooling" and type(width) is int:
            width *= max(1, _modes(config))
        elif name == "Dense":
            width = config.get("out_features")
    if type(width) is not int or not 1 <= width < 1 << 24:
        raise ConfigError(f"{path}: states no size of vectors ({', '.join(WIDTH_NAMES)})")
    return width


def _modes(pooling: dict[str, Any]) -> int:
    """How many vectors are put beside each other."""
    mode = pooling.get("pooling_mode")
    if isinstance(mode, (str, list)):
        return len(mode) if isinstance(mode, list) else mode.count("+") + 1
    return sum(value is True for key, value in pooling.items() if key.startswith("pooling_mode_"))


def _prompts(path: Path, sentences: dict[str, Any]) -> tuple[dict[str, str], str | None]:
    prompts, default = sentences.get("prompts") or {}, sentences.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ConfigError(f"{path}: prompts is no object of texts")
    if default is not None and default not in prompts:
        raise ConfigError(f"{path}: default_prompt_name {default!r} is none of its prompts")
    return prompts, default
