"""Builds a config from command line, environment, YAML file and defaults, in this order of precedence.

Every value is checked, including those that another source overrides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec

from penstock.config.errors import ConfigError, Problems, did_you_mean, nearest
from penstock.config.introspect import PREFIX, Option, options_of
from penstock.config.origins import Origin
from penstock.config.values import Value, convert
from penstock.config.watched_file import TextFiles

if TYPE_CHECKING:  # imported when there is something of another server's
    from penstock.config.other_servers.review import GivenFlag

C = TypeVar("C")
Given = tuple[Option, Origin, str | list[str] | None]

CONFIG_VARIABLE = PREFIX + "CONFIG"
"""Variable with the path of an option file, like ``--config``."""
_GUARDS = ("api_key", "api_key_file", "admin_api_key", "admin_api_key_file", "cluster_key_file")
"""Fields without which anybody may use a server: a misspelled variable of theirs ends the command."""

# Kubernetes sets these in every pod, for each service of the namespace: those of a service named
# penstock-picker begin with PENSTOCK_PICKER_, those of one named vllm with VLLM_.
_SERVICE_LINK = re.compile(
    r"\w+_(SERVICE_HOST=.*|SERVICE_PORT(_\w+)?=[0-9]+|PORT(_[0-9]+_[A-Z]+)?=(tcp|udp|sctp)://.*"
    r"|PORT_[0-9]+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)=.*)",
    re.DOTALL,
)

_JSON_BEGINS = re.compile(r"""\s*(\[\s*["'{]|\{\s*")""")
"""Neither ``[::1]:8000`` nor the pattern ``[gG]pt*`` begins so."""


class Resolved(NamedTuple, Generic[C]):
    """A config, the origin of every value that is set, and what the operator should know: texts that begin
    with ``warning:`` or ``note:``."""

    config: C
    origins: dict[str, Origin]
    remarks: list[str]


class OtherServers(NamedTuple):
    """What a command that replaces other servers got of theirs: flags, the rest of the command line, and the
    command's words. See :mod:`penstock.config.other_servers`."""

    flags: Sequence[GivenFlag] = ()
    rest: Sequence[str] = ()
    program: str = "penstock serve"


def resolve(
    config: type[C],
    arguments: Mapping[str, str | list[str]],
    environ: Mapping[str, str],
    *,
    file: str | None = None,
    files: TextFiles | None = None,
    other_options: Callable[[], Iterable[Option]] = tuple,
    other_servers: OtherServers | None = None,
    problems: Problems | None = None,
) -> Resolved[C]:
    """The config from all sources.

    ``arguments`` maps field names to the text of their flags; ``file`` is the path given with ``--config``,
    which ``files`` has read before if it is read again.
    ``other_options`` yields the options of all commands: the environment and the file of ``PENSTOCK_CONFIG``
    may hold options of several commands, and those of other commands are ignored. It is called only for a
    name that ``config`` does not have. ``other_servers``: for a command that replaces other servers.

    Raises ConfigError for an unknown name in a file, bad values, and a flag of another server that cannot be
    passed over. With ``problems`` bad values and broken rules are added to these: such an option has its
    default, and the config may break rules.
    """
    sources = _Sources(config, environ, other_options, other_servers)
    files = files or TextFiles()
    layers = [sources.environment(), sources.arguments(arguments)]
    if file is not None:
        layers.insert(0, sources.file(file, files, tuple))
    elif CONFIG_VARIABLE in environ:
        layers.insert(0, sources.file(environ[CONFIG_VARIABLE], files, other_options))
    values: dict[str, Value | list[Value] | None] = {}
    origins: dict[str, Origin] = {}
    lenient, problems = problems is not None, problems or Problems()
    for layer in layers:
        with problems.collected():
            for option, origin, given in layer:
                with problems.collected():
                    values[option.field] = convert(option, origin, given)
                    origins[option.field] = origin
    if not lenient:
        problems.raise_all()
    for option, origin, given in sources.vllm_environment(origins):
        values[option.field] = convert(option, origin, given)
        origins[option.field] = origin
    attached = values.get("attach") is not None
    engine = str(values.get("engine", "vllm" if attached else "torch"))
    if attached and engine != "vllm":
        raise ConfigError(
            f"{origins['engine']} {engine}: does not go with --attach, whose engines are vLLM's"
        )
    sources.review(engine, attached=attached)
    try:
        return Resolved(msgspec.convert(values, config), origins, sources.remarks)
    except msgspec.ValidationError as error:  # rules over several fields, from __post_init__
        problems.found += str(error).splitlines()
    if not lenient:
        problems.raise_all()
    return Resolved(_unchecked(config, values), origins, sources.remarks)


def _unchecked(config: type[C], values: Mapping[str, Value | list[Value] | None]) -> C:
    """The config with these values, though it breaks rules."""
    made = object.__new__(config)
    for option in options_of(config):
        object.__setattr__(made, option.field, values.get(option.field, option.default))
    return made


class _Sources:
    """The layers of one config. Each yields what it sets, and adds to the remarks."""

    def __init__(
        self,
        config: type,
        environ: Mapping[str, str],
        other_options: Callable[[], Iterable[Option]],
        other_servers: OtherServers | None,
    ) -> None:
        self.remarks: list[str] = []
        self._options = options_of(config)
        self._environ = environ
        self._other_options = other_options
        self._other_servers = other_servers
        self._foreign = list(other_servers.flags) if other_servers else []

    def arguments(self, arguments: Mapping[str, str | list[str]]) -> Iterator[Given]:
        for option in self._options:
            if option.field in arguments:
                origin = Origin("command line", option.flag)
                yield self._translated(option, origin, arguments[option.field])

    def environment(self) -> Iterator[Given]:
        own = {option.variable: option for option in self._options}
        for name in sorted(each for each in self._environ if each.startswith(PREFIX)):
            text = self._environ[name]
            if is_service_link(name, text):
                if name in own:
                    self.remarks.append(
                        f"note: {name}={text} is ignored: Kubernetes sets it for a service of that name"
                    )
            elif name in own:
                option = own[name]
                given = _items(name, text) if option.many else text
                yield self._translated(option, Origin("environment", name), given)
            elif name != CONFIG_VARIABLE:
                self._check_unknown(name)

    def _check_unknown(self, name: str) -> None:
        known = {option.variable: option for option in (*self._options, *self._other_options())}
        if name in known:
            return
        names = [*known, CONFIG_VARIABLE]
        text = f"unknown environment variable {name}{did_you_mean(name, names, PREFIX)}"
        near = nearest(name.removeprefix(PREFIX), (each.removeprefix(PREFIX) for each in names))
        if near is not None and near.lower() in _GUARDS:
            raise ConfigError(text)
        self.remarks.append(f"warning: {text}")

    def file(
        self, path: str, files: TextFiles, other_options: Callable[[], Iterable[Option]]
    ) -> Iterator[Given]:
        from penstock.config import yaml_file

        own = {option.name: option for option in self._options}
        for entry in yaml_file.read(path, files):
            origin = Origin("file", f"{path}:{entry.line}: {entry.key}")
            if entry.key in own and self._is_foreign(entry.key, origin, entry.value, own[entry.key]):
                continue
            if entry.key in own:
                if entry.misfit_line is not None:
                    raise ConfigError(
                        f"{path}:{entry.misfit_line}: {entry.key} must be one value or a list of values "
                        "(an object is written as JSON text, in quotes)"
                    )
                yield self._translated(own[entry.key], origin, entry.value)
                continue
            known = {option.name for option in other_options()}
            if entry.key not in known and not self._is_foreign(entry.key, origin, entry.value):
                hint = did_you_mean(entry.key, [*own, *sorted(known)])
                raise ConfigError(f"{path}:{entry.line}: unknown option {entry.key}{hint}")

    def vllm_environment(self, set_by: Mapping[str, Origin]) -> Iterator[Given]:
        """What variables of vLLM's set that no source of Penstock's sets."""
        names = self._vllm_names()
        if not names:
            return
        from penstock.config.other_servers import vllm_environment

        for option, name in vllm_environment.honoured(self._options, names, self._other_servers is not None):
            text = self._environ[name]
            if option.field in set_by or (option.field == "api_key" and "api_key_file" in set_by):
                other = set_by.get(option.field) or set_by["api_key_file"]
                self.remarks.append(f"note: {name} is ignored: {other} is set")
                continue
            yield self._translated(option, Origin("environment", name), [text] if option.many else text)

    def _vllm_names(self) -> list[str]:
        set_ = self._environ.items()
        return [name for name, text in set_ if name.startswith("VLLM_") and not is_service_link(name, text)]

    def review(self, engine: str, *, attached: bool) -> None:
        """Raises ConfigError for flags of other servers that cannot be passed over with this engine.
        ``attached``: with --attach."""
        if self._other_servers is None:
            return
        if names := self._vllm_names():
            from penstock.config.other_servers import vllm_environment

            self.remarks += vllm_environment.unheeded(names, engine)
        if self._foreign:
            from penstock.config.other_servers.review import Review

            own = {option.flag for option in self._options}
            review = Review(self._foreign, engine, own, attached=attached)
            if review.problems:
                raise review.error(self._other_servers.program, self._other_servers.rest, self._options)
            self.remarks += review.notes

    def _is_foreign(
        self, key: str, origin: Origin, value: str | list[str] | None, option: Option | None = None
    ) -> bool:
        """Whether a key of a file, or the value of ``option`` in it, is another server's."""
        if self._other_servers is None:
            return False
        from penstock.config.other_servers.review import from_file

        given = from_file(key, origin, value, option)
        if given is not None:
            self._foreign.append(given)
        return given is not None

    def _translated(self, option: Option, origin: Origin, given: str | list[str] | None) -> Given:
        """``given`` in Penstock's words if it is in those of another server."""
        if self._other_servers is not None:
            from penstock.config.other_servers.vllm_values import translated

            other = translated(option.flag, given)
            if isinstance(other, str) and other != str(given).lower():
                self.remarks.append(f"note: {origin} {given} is taken as {other}")
            given = given if other is None else other
        return option, origin, given


def _items(name: str, text: str) -> list[str]:
    """The items of a list in the variable ``name``: separated by commas, or one JSON object, or a JSON array.
    Raises ConfigError, which does not show the text, for what begins as JSON and is not."""
    if text.lstrip().startswith(("{", "[")):
        try:
            items = msgspec.json.decode(text, type=list[str | dict[str, Any]] | dict[str, Any])
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            if _JSON_BEGINS.match(text):
                raise ConfigError(f"{name}: {error}; it takes a,b or a JSON array of texts") from None
        else:
            if isinstance(items, dict):
                return [text.strip()]
            return [item if isinstance(item, str) else json.dumps(item) for item in items]
    return [item.strip() for item in text.split(",")]


def is_service_link(name: str, text: str) -> bool:
    """Whether Kubernetes sets this variable, for a service of the namespace."""
    return _SERVICE_LINK.fullmatch(f"{name}={text}") is not None
