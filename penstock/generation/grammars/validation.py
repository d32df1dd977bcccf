"""What a process that validates grammars is asked, and what it answers."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.generation.grammars.schema_parts import Path

GrammarKind = Literal["llguidance", "gbnf", "json_schema"]
"""How a grammar is validated; GBNF is translated, which takes long."""


class Question(msgspec.Struct, array_like=True):
    """One grammar to validate."""

    grammar: str
    kind: GrammarKind = "llguidance"
    loose: tuple[Path, ...] = ()
    """See :func:`check_schema`."""


class ValidationResult(msgspec.Struct, array_like=True):
    """The result of one validation."""

    grammar: str = ""
    """The grammar as it is to be used, if that differs from what was sent."""
    problem: str = ""
    """Why it is invalid; empty: it is valid."""
    path: Path = ()
    """The part of a JSON schema with the problem."""
