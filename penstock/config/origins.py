"""Where the value of an option was set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec


class Origin(msgspec.Struct, frozen=True):
    """The source of a value that is not the default. Messages show its ``str()``.

    ``name`` is the flag (``--port``), the variable (``PENSTOCK_PORT``) or, for a file, its path, line and
    key (``serve.yaml:3: port``).
    """

    source: Literal["command line", "environment", "file"]
    name: str

    def __str__(self) -> str:
        return self.name


Origins = Mapping[str, Origin]
"""Origins by field name of a config Struct; fields that hold their default are absent."""
