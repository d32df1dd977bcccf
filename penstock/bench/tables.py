"""Text of reports: tables and the line of options."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence


def options_line(options: Mapping[str, object]) -> str:
    """Options as on a command line, from field names and values."""
    return " ".join(_as_given(name.replace("_", "-"), value) for name, value in options.items())


def _as_given(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"--{name} {shlex.quote(text)}"


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines: the first column is left-aligned, others are right-aligned.

    The last of three columns is a remark, which stays as it is.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        if len(others) == 2:
            cells[1] = others[1]
        lines.append("  ".join([f"{first:{widths[0]}}", *cells]).rstrip())
    return lines
