"""Parses ``--lora-modules``: the LoRA adapters that requests may name, in the syntax of `vllm serve`."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence

import msgspec

from penstock.config.errors import ConfigError
from penstock.wire.messages import Adapter

FLAG = "--lora-modules"


class _Module(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    path: str
    base_model_name: str | None = None


def parse_lora_modules(
    arguments: Sequence[str], taken: Collection[str]
) -> tuple[tuple[Adapter, ...], list[str]]:
    """The adapters in ``arguments``, and the other arguments. ``taken``: names of the model itself.

    An adapter is NAME=PATH or ``{"name": …, "path": …, "base_model_name": …}``. Raises ConfigError.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(FLAG, FLAG.replace("-modules", "_modules"), nargs="+", action="extend", default=[])
    try:
        found, others = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{FLAG}: {error.message}") from None
    adapters = tuple(_adapter(text) for text in found.lora_modules)
    names = [adapter.name for adapter in adapters]
    for name in names:
        if name in taken or names.count(name) > 1:
            raise ConfigError(f"{FLAG} {name}: there is a model of this name already")
    return adapters, others


def _adapter(text: str) -> Adapter:
    if text.startswith("{"):
        try:
            module = msgspec.json.decode(text, type=_Module)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{FLAG} {text}: {error}") from None
    else:
        name, _, path = text.partition("=")
        module = _Module(name, path)
    if not module.name or not module.path:
        raise ConfigError(f"{FLAG} {text}: it must be NAME=PATH or an object with name and path")
    return Adapter(module.name, module.path, module.base_model_name)
