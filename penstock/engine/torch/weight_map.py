"""Which tensors of a checkpoint make which parameters of a loaded model.

Names and shapes of a checkpoint may be others than the model's: transformers renames, stacks the experts of a
layer, divides fused projections. Its own rules are applied here to tensors in files, one parameter at a time,
into the memory that the parameters have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.engine.weights.tensor_files import StoredTensor, shown

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Types of tensors that are taken, which are those of weights that are not quantized."""
TEXT_NAMES = {
    r"^(?:model\.(?:language_model|text_model)|language_model\.model)\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
"""From the names of a model's text part, those of its transformers model and those of released files, to the
names of a model of text alone."""
_TEXT_MODULES = r"(?:embed_tokens|layers|norm)\."
"""Those of a language model, by which the names of a text part alone are known."""
Shapes = Mapping[str, tuple[int, ...]]


class Conversion(NamedTuple):
    """Tensors of a checkpoint that become one or more parameters together."""

    target: str
    """The parameter, or the first of them."""
    parts: tuple[tuple[str, str], ...]
    """(pattern, name) of each tensor, in order."""
    converter: Any
    """transformers' WeightConverter; None: the tensor is the parameter."""


class WeightMap:
    """transformers' rules for one model."""

    def __init__(self, model: Any, parameters: Mapping[str, Tensor], share: tuple[int, int]) -> None:
        """``parameters`` by name, as the model was loaded. ``share``: this rank's part of the experts, and
        the number of parts."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        rules = get_model_conversion_mapping(model, _names(model))
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self._prefix: str = model.base_model_prefix
        self._config = model.config
        self._shapes: Shapes = {name: tuple(each.shape) for name, each in parameters.items()}
        self._dtypes = {name: each.dtype for name, each in parameters.items()}
        self._tied = _tied(parameters)
        self._rank, self._ranks = share
        self._known: tuple[Any, list[Conversion]] = None, []
        """What was asked for last, and the answer: updates have the same tensors again and again."""

    def conversions(
        self, tensors: Mapping[str, StoredTensor], named: Set[str], *, whole: bool
    ) -> list[Conversion]:
        """What the tensors become. Those that the model does not have are left out, unless they are among
        ``named``. ``whole``: the tensors must make every parameter. Raises ValueError, which names what does
        not fit."""
        shapes = tuple((each.name, each.shape, each.dtype) for each in tensors.values())
        signature = whole, frozenset(named), shapes
        if self._known[0] != signature:
            conversions = self._resolve(tensors, named)
            for conversion in conversions:
                self._check(conversion, tensors)
            if whole:
                self._check_complete(conversions, tensors)
            self._known = signature, conversions
        return self._known[1]

    def check_range(
        self, conversions: Sequence[Conversion], tensors: Mapping[str, StoredTensor], start: str | None
    ) -> None:
        """Look at all values of tensors whose type has larger ones than the parameter's. Raises ValueError
        for a tensor with values that would become infinite, or are. Tensors of files in the directory
        ``start`` are taken as they are."""
        for conversion in conversions:
            dtype = self._dtypes[conversion.target]
            for _, name in conversion.parts:
                tensor = tensors[name]
                stored = DTYPES[tensor.dtype]
                if torch.finfo(stored).max <= torch.finfo(dtype).max:
                    continue
                if start is not None and tensor.file.startswith(f"{start}/"):
                    continue
                if not torch.from_numpy(tensor.extremes()).view(stored).to(dtype).isfinite().all():
                    raise ValueError(
                        f"{name}, of type {tensor.dtype}, has values that are infinite in the model's type, "
                        f"{str(dtype).removeprefix('torch.')}"
                    )

    def _check_types(self, conversion: Conversion, tensors: Mapping[str, StoredTensor]) -> None:
        for _, name in conversion.parts:
            tensor = tensors[name]
            if tensor.dtype not in DTYPES:
                raise ValueError(
                    f"{tensor.name} is of type {tensor.dtype}; taken are {', '.join(DTYPES)} (weights that "
                    "are not quantized)"
                )

    def _resolve(self, tensors: Mapping[str, StoredTensor], named: Set[str]) -> list[Conversion]:
        from transformers.core_model_loading import dot_natural_key, rename_source_key

        parts: dict[str, list[tuple[str, str]]] = {}
        rules: dict[str, Any] = {}
        unknown = []
        for name in sorted(tensors, key=dot_natural_key):
            target, pattern = rename_source_key(
                name, self._renamings, self._converters, self._prefix, self._shapes
            )
            if target not in self._shapes and name in self._shapes:
                target, pattern = rename_source_key(name, [], [], self._prefix, self._shapes)
            if target not in self._shapes:
                unknown += [name] if name in named else []
                continue
            parts.setdefault(target, []).append((pattern or "", name))
            rules.setdefault(target, None if pattern is None else self._by_pattern[pattern])
        if unknown:
            raise ValueError(f"the model has no parameter for {shown(unknown)}")
        tied = {name for name in parts if self._tied.get(name, name) != name and self._tied[name] in parts}
        places = {name: place for place, name in enumerate(tensors)}
        for target, each in parts.items():
            if rules[target] is None:  # the latest source may have another name for it
                each[:] = [max(each, key=lambda part: places[part[1]])]
        return [
            Conversion(target, tuple(each), rules[target])
            for target, each in parts.items()
            if target not in tied
        ]

    def _check(self, conversion: Conversion, tensors: Mapping[str, StoredTensor]) -> None:
        self._check_types(conversion, tensors)
        names = [name for _, name in conversion.parts]
        made = dict(self.convert(conversion, tensors, _empty))
        for target, tensor in made.items():
            wanted = self._shapes.get(target)
            if wanted is None:
                raise ValueError(f"{shown(names)} would become {target}, which the model does not have")
            if tuple(tensor.shape) != wanted:
                whole = "" if len(names) == 1 else f" (of {len(names)} tensors; all are needed)"
                raise ValueError(f"{shown(names)} is {list(tensor.shape)}, not {list(wanted)}{whole}")

    def _check_complete(self, conversions: Sequence[Conversion], tensors: Mapping[str, StoredTensor]) -> None:
        made: set[str] = set()
        for conversion in conversions:
            names = {conversion.target}
            if conversion.converter is not None:
                names = {target for target, _ in self.convert(conversion, tensors, _empty)}
            made |= {self._tied.get(name, name) for name in names}
        missing = [name for name in self._shapes if self._tied.get(name, name) not in made]
        if missing:
            raise ValueError(
                f"no weights for {shown(missing)}; if the files have some only, update with whole: false"
            )

    def convert(
        self,
        conversion: Conversion,
        tensors: Mapping[str, StoredTensor],
        read: Callable[[StoredTensor], Tensor],
    ) -> Iterator[tuple[str, Tensor]]:
        """The parameters' names and what they become, of this rank's experts only. Raises ValueError."""
        if conversion.converter is None:
            ((_, name),) = conversion.parts
            yield conversion.target, self._own(conversion.target, read(tensors[name]))
            return
        rule = deepcopy(conversion.converter)
        for pattern in dict.fromkeys(pattern for pattern, _ in conversion.parts):
            names = [name for each, name in conversion.parts if each == pattern]
            for name in self._own_names(conversion.target, names):
                rule.add_tensor(conversion.target, name, pattern, read(tensors[name]))
        try:
            made = rule.convert(conversion.target, config=self._config)
        except Exception as error:  # noqa: BLE001 - whatever a rule does with wrong tensors
            names = [name for _, name in conversion.parts]
            raise ValueError(f"{shown(names)} cannot become {conversion.target}: {error}") from None
        for target, tensor in made.items():
            value = tensor[0] if isinstance(tensor, list) else tensor
            yield target, self._own(target, value)

    # -- experts that are split over ranks

    def _own_names(self, target: str, names: list[str]) -> list[str]:
        """Of one tensor per expert, those of this rank's experts."""
        own = self._shapes[target][0] if self._shapes[target] else 0
        if self._ranks == 1 or ".experts." not in target or len(names) != own * self._ranks:
            return names
        return names[self._rank * own :][:own]

    def _own(self, target: str, value: Tensor) -> Tensor:
        """Of a tensor [experts, ...], this rank's part."""
        shape = self._shapes.get(target, ())
        if self._ranks == 1 or ".experts." not in target or not value.ndim or not shape:
            return value
        own = shape[0]
        return value[self._rank * own :][:own] if len(value) == own * self._ranks else value


def read_tensor(tensor: StoredTensor) -> Tensor:
    """A view of the mapped file."""
    if not tensor.data:
        return torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
    return torch.frombuffer(tensor.data, dtype=DTYPES[tensor.dtype]).view(tensor.shape)


def _empty(tensor: StoredTensor) -> Tensor:
    """A tensor of that shape without any bytes."""
    return torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="meta")


def _names(model: Any) -> dict[str, str]:
    """From names that a checkpoint may have, besides those of its model's class, to the model's."""
    if model.config.get_text_config() is model.config:
        return TEXT_NAMES
    text = model.get_decoder()
    path = next(path for path, module in model.named_modules() if module is text)
    return {rf"^{model.base_model_prefix}\.(?={_TEXT_MODULES})": f"{path}."}


def _tied(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """The first name of each parameter that has several, by the others."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in parameters.items():
        known = first.setdefault(id(parameter), name)
        if known != name:
            tied[name] = known
    return tied
