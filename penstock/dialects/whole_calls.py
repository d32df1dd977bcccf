"""Calls of tools in APIs that send each call whole, its arguments as an object, and may leave ids out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from penstock.generation.parsers.delta import CallDelta


class WholeCall(NamedTuple):
    number: int
    """From 0."""
    id: str
    name: str
    arguments: dict[str, Any]


class CallJoiner:
    """Joins the pieces of an output's calls."""

    def __init__(self) -> None:
        self._first: CallDelta | None = None
        self._arguments: list[str] = []

    def push(self, piece: CallDelta) -> WholeCall | None:
        """The call before, if another one begins with this piece."""
        done = None if piece.name is None else self.finish()
        if piece.name is not None:
            self._first = piece
        self._arguments.append(piece.arguments)
        return done

    def finish(self) -> WholeCall | None:
        """The last call, after which text or the end comes; None: it has been returned, or there is none."""
        first, arguments = self._first, "".join(self._arguments)
        self._first = None
        self._arguments.clear()
        if first is None:
            return None
        return WholeCall(first.index, first.id or "", first.name or "", arguments_object(arguments))


def whole_calls(pieces: Iterable[CallDelta]) -> list[WholeCall]:
    """The calls of a whole output."""
    joiner = CallJoiner()
    calls = [joiner.push(piece) for piece in pieces]
    return [call for call in (*calls, joiner.finish()) if call is not None]


class MissingCallIds:
    """Ids of the calls in a conversation whose results name functions: ids that are missing are made up."""

    def __init__(self) -> None:
        self._open: list[tuple[str, str]] = []
        """Id and function of calls that have no result."""
        self._made = 0

    def of_call(self, id: str | None, name: str) -> str:
        """The id of the next call."""
        if not id:
            self._made += 1
            id = f"call_{self._made:08d}"
        self._open.append((id, name))
        return id

    def of_result(self, id: str | None, name: str | None) -> str | None:
        """The id of the call that the next result answers: the one with this id, else the oldest of this
        function, else the oldest. None: there is none."""
        for at in (
            next((at for at, each in enumerate(self._open) if each[0] == id), None),
            next((at for at, each in enumerate(self._open) if each[1] == name), None),
            0 if self._open and not (id or name) else None,
        ):
            if at is not None:
                return self._open.pop(at)[0]
        return id


def arguments_object(text: str) -> dict[str, Any]:
    """The arguments of a call, in whose strings may be control characters; empty if their JSON is cut or
    invalid, or has numbers that are infinite or none."""
    try:
        value = json.loads(text, strict=False, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no JSON")
    return value
