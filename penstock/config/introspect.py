"""Options, read from the fields of a config class: the source of flags, variables, file keys and docs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import inspect

from penstock.config.hidden import HIDDEN, hide_credentials

PREFIX = "PENSTOCK_"
_MEBI = 1 << 20


class Alternative(msgspec.Struct, frozen=True):
    """One type that a value may have, with its bounds."""

    kind: Literal["text", "integer", "number", "switch", "choice"]
    choices: tuple[str, ...] = ()
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    pattern: str | None = None

    def __str__(self) -> str:
        """In words: ``an integer from 0 to 65535``, ``auto or none`` …"""
        match self.kind:
            case "choice":
                return " or ".join(filter(None, (", ".join(self.choices[:-1]), self.choices[-1])))
            case "switch":
                return "true or false"
            case "text":
                return f"text matching {self.pattern}" if self.pattern else "text"
            case "integer":
                return " ".join(filter(None, ("an integer", self._preposition, self.range)))
            case "number":
                return " ".join(filter(None, ("a number", self._preposition, self.range)))

    @property
    def range(self) -> str:
        """The bounds in words, ``0 to 65535``; empty when there are none."""
        if self.ge is not None and self.le is not None:
            return f"{self.ge} to {self.le}"
        bounds = (("at least", self.ge), ("above", self.gt), ("at most", self.le), ("below", self.lt))
        return " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)

    @property
    def _preposition(self) -> str:
        if self.ge is None:
            return ""
        return "of" if self.le is None else "from"


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One option.

    ``type`` is the field's annotated type, for ``msgspec.convert``. ``alternatives`` are the types of its
    value or, if it takes a list (``many``), of the items. ``optional``: null is allowed.
    """

    field: str
    description: str
    group: str
    type: Any
    alternatives: tuple[Alternative, ...]
    many: bool
    optional: bool
    default: Any
    metavar: str
    short: str | None
    words: str | None
    """What a value, or an item of a list, may be; None: its type and bounds say it."""
    secret: bool
    positional: bool
    rest: bool

    @property
    def name(self) -> str:
        """The key in a file: ``max-num-seqs``."""
        return self.field.replace("_", "-")

    @property
    def flag(self) -> str:
        """The name on the command line: ``--max-num-seqs``, or ``MODEL`` for a positional argument."""
        return self.metavar if self.positional else f"--{self.name}"

    @property
    def variable(self) -> str:
        """The name in the environment: ``PENSTOCK_MAX_NUM_SEQS``."""
        return PREFIX + self.field.upper()

    @property
    def is_switch(self) -> bool:
        """Whether it is ``--flag`` or ``--no-flag``, without a value."""
        return self.alternatives[0].kind == "switch"

    @property
    def is_tristate(self) -> bool:
        """Whether ``on`` and ``off`` are among its values; ``--flag`` and ``--no-flag`` set them, too."""
        return {"on", "off"} <= set(self.alternatives[0].choices)

    @property
    def default_text(self) -> str:
        """The default as written on the command line: ``false``, ``64Mi``, ``0.9``, ``a b``; empty for
        None."""
        if self.default is None:
            return ""
        if isinstance(self.default, list):
            return " ".join(map(str, self.default))
        if isinstance(self.default, bool):
            return str(self.default).lower()
        if isinstance(self.default, int) and self.default >= _MEBI and self.default % _MEBI == 0:
            return f"{self.default // _MEBI}Mi"
        return f"{self.default:.15g}" if isinstance(self.default, float) else str(self.default)

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        one = self.words or " or ".join(map(str, self.alternatives))
        return f"one or more values, each {one}" if self.many else one


_options: dict[type, tuple[Option, ...]] = {}
"""Options by config class, as far as they were read: that takes milliseconds."""


def options_of(config: type) -> tuple[Option, ...]:
    """The options of a config class: those of its bases, one after the other, then its own.

    Raises TypeError for a required field, for one without :func:`penstock.config.describe.option`, and for
    types other than bool, int, float, str, a Literal of strings, a list of these, or a union of these with
    each other or None.
    """
    options = _options.get(config)
    if options is None:
        described = {field.name: field for field in inspect.type_info(config).fields}  # type: ignore[attr-defined]
        types = get_type_hints(config, include_extras=True)
        options = tuple(_option(config, types[name], described[name]) for name in _names(config))
        _options[config] = options
    return options


def _names(config: type) -> dict[str, None]:
    """Names of the fields, in the order of the bases: that of a dataclass is the reverse."""
    names = {name: None for base in config.__bases__ if is_dataclass(base) for name in _names(base)}
    return names | dict.fromkeys(field.name for field in fields(config))


def _option(config: type, annotation: Any, field: inspect.Field) -> Option:
    where = f"{config.__name__}.{field.name}"
    if not isinstance(field.type, inspect.Metadata) or field.type.extra is None:
        raise TypeError(f"{where} is not described with option()")
    if field.required:
        raise TypeError(f"{where} has no default")
    extra = field.type.extra
    many, optional, alternatives = _alternatives(where, field.type, list(_literals(annotation)))
    return Option(
        field=field.name,
        description=(field.type.extra_json_schema or {})["description"],
        group=extra["group"],
        type=annotation,
        alternatives=alternatives,
        many=many,
        optional=optional,
        default=field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory(),
        metavar=extra.get("metavar") or _metavar(field.name, alternatives),
        short=extra.get("short"),
        words=extra.get("allowed"),
        secret=extra.get("secret", False),
        positional=extra.get("positional", False),
        rest=extra.get("rest", False),
    )


def _literals(annotation: Any) -> Iterable[str]:
    """The values of the Literals in a type, in source order; msgspec sorts them."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for part in get_args(annotation):
            yield from _literals(part)


def _alternatives(
    where: str, described: inspect.Type, literals: list[str]
) -> tuple[bool, bool, tuple[Alternative, ...]]:
    """Whether the type is a list, whether None is allowed, and the types of the value or its items."""
    members = list(_members(described))
    optional = any(isinstance(member, inspect.NoneType) for member in members)
    members = [member for member in members if not isinstance(member, inspect.NoneType)]
    many = len(members) == 1 and isinstance(members[0], inspect.ListType)
    if many:
        members = [item for member in members for item in _members(member.item_type)]
    return many, optional, tuple(_alternative(where, member, literals) for member in members)


def _members(described: inspect.Type) -> Iterable[Any]:
    if isinstance(described, inspect.Metadata):
        yield from _members(described.type)
    elif isinstance(described, inspect.UnionType):
        for member in described.types:
            yield from _members(member)
    else:
        yield described


def _alternative(where: str, described: inspect.Type, literals: list[str]) -> Alternative:
    match described:
        case inspect.BoolType():
            return Alternative("switch")
        case inspect.LiteralType(values) if all(isinstance(value, str) for value in values):
            return Alternative("choice", choices=tuple(sorted(map(str, values), key=literals.index)))
        case inspect.StrType(pattern=pattern):
            return Alternative("text", pattern=pattern)
        case inspect.IntType(gt=gt, ge=ge, lt=lt, le=le):
            return Alternative("integer", gt=gt, ge=ge, lt=lt, le=le)
        case inspect.FloatType(gt=gt, ge=ge, lt=lt, le=le):
            return Alternative("number", gt=gt, ge=ge, lt=lt, le=le)
    raise TypeError(f"{where}: an option cannot have the type {described}")


def _metavar(field: str, alternatives: tuple[Alternative, ...]) -> str:
    """Placeholder of the value in ``--help``: ``N``, ``auto|none`` or the last word of the name."""
    names = {"integer": "N", "number": "X", "switch": "", "text": field.rsplit("_", 1)[-1].upper()}
    return "|".join("|".join(one.choices) if one.choices else names[one.kind] for one in alternatives)


def without_secrets(config: object) -> dict[str, Any]:
    """Field names and values of a config for logs and banners, without secrets and credentials of URLs."""
    secret = {option.field for option in options_of(type(config)) if option.secret}
    return {
        name: HIDDEN
        if name in secret and value
        else hide_credentials(value)
        if isinstance(value, str)
        else value
        for name, value in vars(config).items()
    }
