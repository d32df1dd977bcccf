"""The desired list of adapters, as API servers, engines and the supervisor exchange it."""

from __future__ import annotations

import msgspec

from penstock.wire.messages import Adapter

ADAPTERS = "adapters"
"""Name of the state."""


class AdapterList(msgspec.Struct, frozen=True):
    """The state's value."""

    adapters: list[Adapter] = []


class AdapterStatus(msgspec.Struct, frozen=True):
    """What an engine has of the desired list."""

    loaded: dict[str, str]
    """Digest of each adapter that streams may use, by name."""
    missing: dict[str, str] = {}
    """Why an adapter of the list is not loaded, by name."""
