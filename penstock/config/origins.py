"""Where the value of an option came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec


class Origin(msgspec.Struct, frozen=True):
    """The source of one value that is not the default. ``str()`` of it is what messages show.

    ``name`` is the flag (``--port``), the variable (``PENSTOCK_PORT``) or, for a file, its path, line and
    key (``serve.yaml:3: port``).
    """

    source: Literal["command line", "environment", "file"]
    name: str

    def __str__(self) -> str:
        return self.name


Origins = Mapping[str, Origin]
"""Field name of a config Struct → origin; fields that hold their default are absent."""
