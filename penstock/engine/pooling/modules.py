"""The modules of a model's directory, as sentence-transformers stores them: what is computed after the
transformer. Imports no torch.

``modules.json`` lists the modules in order, each with its folder and the name of its class; a folder's
config.json has what the module was made with. A model without ``modules.json`` has one that averages tokens,
as sentence-transformers takes it for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from penstock.config.errors import ConfigError

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
MODES: tuple[PoolingMode, ...] = get_args(PoolingMode)
"""In the order in which modes that are stated by flags are concatenated."""
_FLAGS = dict(
    zip(
        (
            "pooling_mode_cls_token",
            "pooling_mode_max_tokens",
            "pooling_mode_mean_tokens",
            "pooling_mode_mean_sqrt_len_tokens",
            "pooling_mode_weightedmean_tokens",
            "pooling_mode_lasttoken",
        ),
        MODES,
        strict=True,
    )
)
ACTIVATIONS = ("ELU", "GELU", "Identity", "LeakyReLU", "ReLU", "ReLU6", "Sigmoid", "SiLU", "Softplus", "Tanh")
"""Classes of torch.nn that work value by value."""
LABEL_ACTIVATIONS = (*ACTIVATIONS, "Softmax")
_TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names that versions of sentence-transformers have given to the transformer's file."""
_TASKS = {"feature-extraction": "hidden", "sequence-classification": "labels", "text-generation": "logits"}
_AT = {"token_embeddings": True, "sentence_embedding": False}
MAX_FEATURES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class PoolStep:
    """Makes one vector of an input's tokens."""

    modes: tuple[PoolingMode, ...] = ("mean",)
    """Their vectors follow each other."""
    with_prompt: bool = True
    """Whether the prompt's tokens count."""


@dataclass(frozen=True, kw_only=True)
class DenseStep:
    """A linear layer with an activation."""

    directory: Path
    """Has its weights: model.safetensors or pytorch_model.bin."""
    inputs: int
    outputs: int
    bias: bool
    activation: str
    """A name of :data:`ACTIVATIONS`."""
    residual: bool = False
    """Whether its input, projected if the widths differ, is added."""
    on_tokens: bool = False
    """Whether it is for tokens, before they are pooled."""


@dataclass(frozen=True, kw_only=True)
class LayerNormStep:
    """A layer norm of vectors."""

    directory: Path
    width: int


@dataclass(frozen=True, kw_only=True)
class NormalizeStep:
    """Divides by the length."""

    on_tokens: bool = False


@dataclass(frozen=True, kw_only=True)
class LogitScore:
    """The score of a language model: the logit of a token after the last one, less that of another."""

    true_token: int
    false_token: int | None


Step: TypeAlias = PoolStep | DenseStep | LayerNormStep | NormalizeStep | LogitScore


@dataclass(frozen=True, kw_only=True)
class Modules:
    """What a model's directory says of its transformer and of what follows it."""

    stated: bool
    """Whether there is a ``modules.json``."""
    transformer: Path
    """Folder of the transformer's config.json and weights."""
    output: Literal["hidden", "labels", "logits"] = "hidden"
    """What the transformer makes, as far as the file says: states, or logits, of tokens, or of labels."""
    steps: tuple[Step, ...] = (PoolStep(),)
    """In order."""
    max_seq_length: int | None = None
    """Tokens of the longest input, if the files say."""
    do_lower_case: bool = False
    """Whether texts become lower case before they are tokenized."""
    label_activation: str | None = None
    """A name of :data:`LABEL_ACTIVATIONS` for the logits of labels; None: sigmoid for one label, softmax for
    several."""

    @property
    def normalizes(self) -> bool:
        """Whether vectors have the length 1."""
        return bool(self.steps) and isinstance(self.steps[-1], NormalizeStep)

    @property
    def pools_prompt(self) -> bool:
        """Whether the tokens of a prompt count in a vector."""
        return all(step.with_prompt for step in self.steps if isinstance(step, PoolStep))

    def width(self, hidden: int) -> int:
        """Values of a vector of a transformer with ``hidden`` values per token."""
        for step in self.steps:
            if isinstance(step, PoolStep):
                hidden *= len(step.modes)
            elif isinstance(step, DenseStep):
                hidden = step.outputs
        return hidden


def read_modules(directory: Path) -> Modules:
    """The modules of the model in ``directory``. Raises ConfigError for a file that cannot be read, a value
    that is none, and a module that is unknown."""
    path = directory / "modules.json"
    if not path.is_file():
        return Modules(stated=False, transformer=directory, **_transformer_fields(directory))
    listed = _read(path)
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{path}: has to be a list of modules")
    transformer: Path | None = None
    steps: list[Step] = []
    for module in listed:
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise ConfigError(f"{path}: a module is {module!r:.100}; it has to be an object with a type")
        kind = module["type"].rpartition(".")[2]
        folder = directory / str(module.get("path") or "")
        if kind == "Transformer" and transformer is None and not steps:
            transformer = folder
        elif kind in _READERS and transformer is not None:
            steps.append(_READERS[kind](folder))
        elif kind != "Dropout":
            known = ", ".join(("Transformer", *_READERS))
            raise ConfigError(
                f"{path}: module {module['type']!r:.100} cannot be run; those that can: {known}"
            )
    if transformer is None:
        raise ConfigError(f"{path}: the first module has to be a Transformer")
    return Modules(
        stated=True, transformer=transformer, steps=tuple(steps), **_transformer_fields(transformer)
    )


def _transformer_fields(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    path = next((directory / name for name in _TRANSFORMER_FILES if (directory / name).is_file()), None)
    if path is not None:
        described = _object(path)
        length = described.get("max_seq_length")
        if length is not None:
            found["max_seq_length"] = _integer(path, "max_seq_length", length)
        found["do_lower_case"] = bool(described.get("do_lower_case"))
        task = described.get("transformer_task", "feature-extraction")
        if task not in _TASKS:
            allowed = ", ".join(_TASKS)
            raise ConfigError(f"{path}: transformer_task is {task!r:.60}; those that can be run: {allowed}")
        found["output"] = _TASKS[task]
    path = directory / "config.json"
    if path.is_file():
        found["label_activation"] = _label_activation(path, _object(path))
    return found


def _label_activation(path: Path, described: dict[str, Any]) -> str | None:
    own = described.get("sentence_transformers")
    name, value = "sentence_transformers.activation_fn", None
    if isinstance(own, dict):
        value = own.get("activation_fn")
    if value is None:
        name = "sbert_ce_default_activation_function"
        value = described.get(name)
    if value is not None:
        return _activation(path, name, value, LABEL_ACTIVATIONS)
    if described.get("problem_type") == "multi_label_classification":
        return "Sigmoid"
    name = "function_to_apply"
    functions = {None: None, "none": "Identity", "sigmoid": "Sigmoid", "softmax": "Softmax"}
    value = described.get(name)
    if value not in functions:
        raise ConfigError(f"{path}: {name} is {value!r:.60}; allowed: none, sigmoid, softmax")
    return functions[value]


def _read_pool(directory: Path) -> PoolStep:
    path = directory / "config.json"
    described = _object(path)
    modes: Any = described.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _FLAGS.items() if described.get(flag)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not modes or any(mode not in MODES for mode in modes):
        raise ConfigError(f"{path}: pooling_mode is {modes!r:.100}; allowed: {', '.join(MODES)}")
    return PoolStep(modes=tuple(modes), with_prompt=described.get("include_prompt") is not False)


def _read_dense(directory: Path) -> DenseStep:
    path = directory / "config.json"
    described = _object(path)
    activation = described.get("activation_function", "torch.nn.modules.activation.Tanh")
    return DenseStep(
        directory=directory,
        inputs=_integer(path, "in_features", described.get("in_features")),
        outputs=_integer(path, "out_features", described.get("out_features")),
        bias=described.get("bias") is not False,
        activation=_activation(path, "activation_function", activation, ACTIVATIONS),
        residual=described.get("use_residual") is True,
        on_tokens=_on_tokens(path, described),
    )


def _read_layer_norm(directory: Path) -> LayerNormStep:
    path = directory / "config.json"
    return LayerNormStep(
        directory=directory, width=_integer(path, "dimension", _object(path).get("dimension"))
    )


def _read_normalize(directory: Path) -> NormalizeStep:
    path = directory / "config.json"
    return NormalizeStep(on_tokens=path.is_file() and _on_tokens(path, _object(path)))


def _read_logit_score(directory: Path) -> LogitScore:
    path = directory / "config.json"
    described = _object(path)
    false = described.get("false_token_id")
    return LogitScore(
        true_token=_integer(path, "true_token_id", described.get("true_token_id"), 0),
        false_token=None if false is None else _integer(path, "false_token_id", false, 0),
    )


_READERS: dict[str, Callable[[Path], Step]] = {
    "Pooling": _read_pool,
    "Dense": _read_dense,
    "LayerNorm": _read_layer_norm,
    "Normalize": _read_normalize,
    "LogitScore": _read_logit_score,
}


def _on_tokens(path: Path, described: dict[str, Any]) -> bool:
    """Whether a module is for tokens; one that reads something and writes another is none that can be run."""
    source = described.get("module_input_name", "sentence_embedding")
    target = described.get("module_output_name") or source
    if source not in _AT or source != target:
        raise ConfigError(
            f"{path}: module_input_name is {source!r:.60} and module_output_name {target!r:.60}; allowed: "
            f"both {' or both '.join(_AT)}"
        )
    return _AT[source]


def _activation(path: Path, name: str, value: Any, allowed: tuple[str, ...]) -> str:
    package, _, last = value.rpartition(".") if isinstance(value, str) else ("", "", "")
    if package.partition(".")[0] != "torch" or last not in allowed:
        names = ", ".join(allowed)
        raise ConfigError(f"{path}: {name} is {value!r:.100}; allowed, of torch.nn: {names}")
    return last


def _integer(path: Path, name: str, value: Any, least: int = 1) -> int:
    if type(value) is not int or not least <= value < MAX_FEATURES:
        allowed = f"an integer from {least} to {MAX_FEATURES - 1:,}"
        raise ConfigError(f"{path}: {name} is {value!r:.60}, it has to be {allowed}")
    return value


def _object(path: Path) -> dict[str, Any]:
    found = _read(path)
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: has to be a JSON object")
    return found


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
