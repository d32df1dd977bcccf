"""Imports transformers without torch.compile's machinery, which takes longer to import than all the rest.

transformers decorates some functions for torch.compile and imports the classes of sharded tensors. Both
bring torch._dynamo and sympy, 800 modules: 1.4 of the 4.0 CPU seconds that making an engine of the demo model
takes. The engine neither compiles a model nor lets transformers shard one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._device import _device_constructors

log = logging.getLogger(__name__)

_COMPILER = "torch._dynamo"
_COMPILER_MODULES = (_COMPILER, f"{_COMPILER}._trace_wrapped_higher_order_op")
_MODULES = ("transformers.modeling_utils", "transformers.generation.utils")
"""What the definition of every model imports."""


def import_transformers() -> None:
    """Import what all models of transformers need; nothing when this process has it, or has the compiler."""
    if _MODULES[0] in sys.modules or _COMPILER in sys.modules:
        return
    try:
        with _compiler_stood_in(), _sharding_absent():
            for name in _MODULES:
                import_module(name)
    except (ImportError, AttributeError, TypeError) as error:
        # Another version of transformers needs more of them: imported whole later, it takes longer.
        log.debug("transformers is imported with torch.compile: %s", error)


class _Decorators(ModuleType):
    """A module that has every name as a decorator that changes nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # a package

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _unchanged


def _unchanged(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Callable[..., Any]:
    return _unchanged if function is None else function


@contextmanager
def _compiler_stood_in() -> Iterator[None]:
    """The compiler's modules are decorators; later imports get the real ones."""
    sys.modules.update({name: _Decorators(name) for name in _COMPILER_MODULES})
    try:
        yield
    finally:
        for name in _COMPILER_MODULES:
            if isinstance(sys.modules.get(name), _Decorators):
                del sys.modules[name]


@contextmanager
def _sharding_absent() -> Iterator[None]:
    """transformers imports as where torch was built without its distributed part."""
    packages = [import_module(name) for name in ("transformers.utils.import_utils", "transformers.utils")]
    name = "is_torch_distributed_available"
    originals = [getattr(package, name) for package in packages]
    for package in packages:
        setattr(package, name, lambda: False)
    try:
        yield
    finally:
        for package, original in zip(packages, originals, strict=True):
            setattr(package, name, original)


@contextmanager
def made_without_compiler() -> Iterator[None]:
    """Models of the meta device are made without what computes such tensors in Python, for it imports the
    compiler: layers have no first random values, which the weights replace, and ranges are of the CPU."""
    layers: tuple[Any, ...] = nn.Linear, nn.Embedding
    originals = [layer.reset_parameters for layer in layers]
    arange = torch.arange
    _device_constructors()  # remembers the functions of torch that obey ``with device:``; not the one below

    def arange_of_cpu(*args: Any, device: Any = None, **options: Any) -> Tensor:
        return arange(*args, device="cpu" if device is None else device, **options)

    for layer in layers:
        layer.reset_parameters = lambda _: None
    torch.arange = arange_of_cpu
    try:
        yield
    finally:
        torch.arange = arange
        for layer, original in zip(layers, originals, strict=True):
            layer.reset_parameters = original
