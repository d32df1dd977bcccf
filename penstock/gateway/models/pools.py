"""Pools of endpoints."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.gateway.routing.endpoint import Role

PoolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")]
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]


class Pool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Endpoints that serve the same models."""

    name: PoolName
    endpoints: list[str] = []
    models: list[ModelName] | None = None
    """Models that all its endpoints serve, whatever they list; the names may have ``*``, ``?`` and ``[abc]``.
    None: what each of them lists."""
    fallback: list[ModelName] = []
    """Pools or models for its requests when none of its endpoints is ready, or all refuse."""
    role: Role = "both"
    """What its endpoints do: prefill for others, decode, or both."""
