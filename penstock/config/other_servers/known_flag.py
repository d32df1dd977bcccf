"""A flag of another server, and what Penstock says about it."""

from __future__ import annotations

import msgspec

Default = str | int | float | bool | None


class MappedFlag(msgspec.Struct, frozen=True):
    """The flag has another name here."""

    flag: str
    note: str = ""
    alone: bool = False
    """Whether ``flag`` has the value already."""
    granted: tuple[str, ...] = ()
    """Values that ask for what is here anyway; they are accepted."""
    unit: str = ""
    """What the other server's numbers count, where ``flag`` counts bytes: Mi or Gi. 0 is left out."""


class IgnoredFlag(msgspec.Struct, frozen=True):
    """The flag is accepted and has no effect, for this reason."""

    why: str


class EngineFlag(msgspec.Struct, frozen=True):
    """vLLM's engine has it as ``flag``, behind ``--``. ``default``: its value that asks for nothing;
    ``alone``: the flag there takes no value."""

    flag: str
    default: str | None = None
    alone: bool = False


class Unsupported(msgspec.Struct, frozen=True):
    """The flag is refused, for this reason."""

    why: str
    with_any_engine: bool = False
    """Whether the reason holds with vLLM's engine as well, so that the flag goes nowhere."""
    granted: tuple[str, ...] = ()
    """Values that ask for what is here anyway; they are accepted."""


Advice = MappedFlag | IgnoredFlag | EngineFlag | Unsupported


class KnownFlag(msgspec.Struct, frozen=True):
    """A flag of another server.

    ``values``: how many it takes, as argparse writes it: 0 (a switch), 1, ? or +. ``default`` is the
    server's, if it is a plain value. ``engine``: vLLM's engine takes it, behind ``--``. ``advice`` is None
    for a flag that means nothing to Penstock itself.
    """

    server: str
    name: str
    values: str
    default: Default = None
    engine: bool = False
    advice: Advice | None = None
