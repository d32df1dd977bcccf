"""What the options say of adapters: ``--enable-lora``, ``--lora-modules`` and the limits.

Their syntax is that of `vllm serve`. With --engine vllm they may also stand among its own arguments, behind
``--``.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from penstock.adapters.adapter_names import MAX_NAME_CHARS, check_name
from penstock.adapters.errors import AdapterError
from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.wire.messages import MAX_PATH_CHARS

FLAG = "--lora-modules"


@dataclass(slots=True, frozen=True)
class LoraModule:
    """An adapter of ``--lora-modules``."""

    name: str
    path: str
    """Path of the directory, as it was given."""
    base_model_name: str | None = None


@dataclass(slots=True, frozen=True)
class LoraSettings:
    """What holds of the options, wherever they stand."""

    enabled: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
    modules: tuple[LoraModule, ...]
    """Adapters of the start."""
    engine_args: tuple[str, ...]
    """The arguments of vLLM without ``--lora-modules``."""


class _Module(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    path: str
    base_model_name: str | None = None


def lora_settings(config: ServeConfig, taken: Collection[str] = ()) -> LoraSettings:
    """What holds. ``taken``: names of the model itself. Raises ConfigError for options that contradict each
    other."""
    behind, others = _parse_engine_args(config.engine_args or [])
    texts = [*(config.lora_modules or ()), *behind.lora_modules]
    settings = LoraSettings(
        config.enable_lora if behind.enable_lora is None else behind.enable_lora,
        behind.max_loras or config.max_loras,
        behind.max_lora_rank or config.max_lora_rank,
        behind.max_cpu_loras or config.max_cpu_loras,
        tuple(_module(text, taken) for text in texts),
        tuple(others),
    )
    _check(settings, config)
    return settings


def _parse_engine_args(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of adapters among vLLM's arguments, and vLLM's arguments without ``--lora-modules``. Raises
    ConfigError."""
    modules = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    modules.add_argument(FLAG, "--lora_modules", nargs="+", action="extend", default=[])
    limits = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    limits.add_argument("--enable-lora", "--enable_lora", action=argparse.BooleanOptionalAction, default=None)
    for flag in ("--max-loras", "--max-lora-rank", "--max-cpu-loras"):
        limits.add_argument(flag, flag.replace("-", "_").replace("__", "--", 1), type=int)
    try:
        found, others = modules.parse_known_args(arguments)
        found, _ = limits.parse_known_args(others, found)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name or FLAG}: {error.message}") from None
    return found, others


def _module(text: str, taken: Collection[str]) -> LoraModule:
    """Raises ConfigError."""
    if text.startswith("{"):
        try:
            given = msgspec.json.decode(text, type=_Module)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ConfigError(f"{FLAG} {text}: {error}") from None
        module = LoraModule(given.name, given.path, given.base_model_name or None)
    else:
        name, _, path = text.partition("=")
        module = LoraModule(name, path)
    if not module.name or not module.path:
        raise ConfigError(f"{FLAG} {text}: it must be NAME=PATH or an object with name and path")
    if len(module.path) > MAX_PATH_CHARS or "\0" in module.path:
        raise ConfigError(f"{FLAG} {module.name}: its path is none: {module.path[:100]!r}")
    if len(module.base_model_name or "") > MAX_NAME_CHARS:
        raise ConfigError(f"{FLAG} {module.name}: base_model_name has more than {MAX_NAME_CHARS} characters")
    if module.name in taken:
        raise ConfigError(f"{FLAG} {module.name}: the served model has this name")
    try:
        check_name(module.name)
    except AdapterError as error:
        raise ConfigError(f"{FLAG}: {error}") from None
    return module


def _check(settings: LoraSettings, config: ServeConfig) -> None:
    """Raises ConfigError."""
    if not settings.enabled:
        for flag, given in ((FLAG, settings.modules), ("--lora-dir", config.lora_dir is not None)):
            if given:
                raise ConfigError(f"{flag}: needs --enable-lora")
        return
    if settings.max_cpu_loras < settings.max_loras:
        raise ConfigError(
            f"--max-cpu-loras {settings.max_cpu_loras}: it must be at least --max-loras, which is "
            f"{settings.max_loras}"
        )
    if len(settings.modules) > settings.max_cpu_loras:
        raise ConfigError(
            f"{FLAG}: these are {len(settings.modules)} adapters; --max-cpu-loras is {settings.max_cpu_loras}"
        )
    names = [module.name for module in settings.modules]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{FLAG} {name}: there are two adapters of this name")
