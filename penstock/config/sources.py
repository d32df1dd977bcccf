"""Builds a config from command line, environment, YAML file and defaults, in this order of precedence.

Every value is checked, including those that another source overrides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import msgspec

from penstock.config.errors import ConfigError, did_you_mean
from penstock.config.introspect import PREFIX, Option, options_of
from penstock.config.origins import Origin
from penstock.config.values import Value, convert

C = TypeVar("C", bound=msgspec.Struct)
Given = tuple[Option, Origin, str | list[str] | None]

CONFIG_VARIABLE = PREFIX + "CONFIG"
"""Variable with the path of an option file, like ``--config``."""

# Kubernetes sets these in every pod of a namespace that has a service named "penstock".
_SERVICE_LINK = re.compile(PREFIX + r"(SERVICE_HOST=|SERVICE_PORT(_\w+)?=|PORT_[0-9]+_\w+=|PORT=\w+://)")


def resolve(
    config: type[C],
    arguments: Mapping[str, str | list[str]],
    environ: Mapping[str, str],
    *,
    file: str | None = None,
    other_options: Callable[[], Iterable[Option]] = tuple,
) -> tuple[C, dict[str, Origin]]:
    """The config, and the origin of every value that is set.

    ``arguments`` maps field names to the text of their flags; ``file`` is the path given with ``--config``.
    ``other_options`` yields the options of all commands: the environment and the file of ``PENSTOCK_CONFIG``
    may hold options of several commands, and those of other commands are ignored. It is called only for a
    name that ``config`` does not have.

    Raises ConfigError for an unknown name or a bad value.
    """
    layers = [_from_environment(config, environ, other_options), _from_arguments(config, arguments)]
    if file is not None:
        layers.insert(0, _from_file(config, file, tuple))
    elif CONFIG_VARIABLE in environ:
        layers.insert(0, _from_file(config, environ[CONFIG_VARIABLE], other_options))
    values: dict[str, Value | list[Value] | None] = {}
    origins: dict[str, Origin] = {}
    for layer in layers:
        for option, origin, given in layer:
            values[option.field] = convert(option, origin, given)
            origins[option.field] = origin
    try:
        return msgspec.convert(values, config), origins
    except msgspec.ValidationError as error:  # a rule over several fields, from __post_init__
        raise ConfigError(str(error)) from None


def _from_arguments(
    config: type[msgspec.Struct], arguments: Mapping[str, str | list[str]]
) -> Iterator[Given]:
    for option in options_of(config):
        if option.field in arguments:
            yield option, Origin("command line", option.flag), arguments[option.field]


def _from_environment(
    config: type[msgspec.Struct], environ: Mapping[str, str], other_options: Callable[[], Iterable[Option]]
) -> Iterator[Given]:
    own = {option.variable: option for option in options_of(config)}
    for name in sorted(name for name in environ if name.startswith(PREFIX) and name != CONFIG_VARIABLE):
        text = environ[name]
        if _SERVICE_LINK.match(f"{name}={text}"):
            raise ConfigError(
                f"{name}: set by Kubernetes for a service named penstock and not an option; "
                "give the service another name or the pod enableServiceLinks: false"
            )
        if name in own:
            option = own[name]
            given = [item.strip() for item in text.split(",")] if option.many else text
            yield option, Origin("environment", name), given
            continue
        known = {option.variable for option in other_options()}
        if name not in known:
            hint = did_you_mean(name.upper(), [*own, *sorted(known), CONFIG_VARIABLE], PREFIX)
            raise ConfigError(f"unknown environment variable {name}{hint}")


def _from_file(
    config: type[msgspec.Struct], path: str, other_options: Callable[[], Iterable[Option]]
) -> Iterator[Given]:
    from penstock.config import yaml_file

    own = {option.name: option for option in options_of(config)}
    for entry in yaml_file.read(path):
        if entry.key in own:
            origin = Origin("file", f"{path}:{entry.line}: {entry.key}")
            yield own[entry.key], origin, entry.value
            continue
        known = {option.name for option in other_options()}
        if entry.key not in known:
            hint = did_you_mean(entry.key, [*own, *sorted(known)])
            raise ConfigError(f"{path}:{entry.line}: unknown option {entry.key}{hint}")
