"""Pools of endpoints, as the endpoints file describes them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.config.describe import HeaderName
from penstock.gateway.routing.endpoint import Role
from penstock.gateway.upstream.upstream import Http2Policy

PoolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")]
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]
Path = Annotated[str, Meta(min_length=1)]
Seconds = Annotated[float, Meta(gt=0)]
HeaderValue = Annotated[str, Meta(pattern=r"^([!-~]([ -~]*[!-~])?)?\Z")]


Api = Literal["chat", "completions", "messages", "responses", "ollama", "gemini"]


class PoolKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """Where the gateway's own key for a pool is; the endpoints file never has it."""

    file: Path | None = None
    """Read again when it changes."""
    env: Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z")] | None = None
    """Name of an environment variable."""
    header: HeaderName = "authorization"
    """What has the key, alone; ``authorization`` has it after ``Bearer``."""


class PoolTls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """In the place of the options ``--upstream-…``."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: Path | None = None


class PoolOverflow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """When a pool's fallback takes requests although its endpoints work."""

    waiting: Annotated[int, Meta(ge=0, le=1 << 20)]
    """More requests than this wait at each endpoint that works."""


class PoolTimeouts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """In seconds, each in the place of an option."""

    connect: Seconds | None = None
    first_token: Seconds | None = None
    event: Seconds | None = None
    total: Seconds | None = None


class Pool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """Endpoints that serve the same models."""

    name: PoolName
    endpoints: list[str] = []
    models: list[ModelName] | None = None
    """Models that all its endpoints serve, whatever they list; the names may have ``*``, ``?`` and ``[abc]``.
    None: what each of them lists."""
    fallback: list[ModelName] = []
    """Pools or models for its requests when none of its endpoints is ready, or all refuse."""
    overflow: PoolOverflow | None = None
    """None: its fallback takes requests only when it cannot."""
    role: Role = "both"
    """What its endpoints do: prefill for others, decode, or both."""
    apis: Annotated[list[Api], Meta(min_length=1)] | None = None
    """The APIs that its endpoints speak: requests for others are translated to chat completions, or refused.
    None: all that clients send is relayed as it is."""
    hosted: bool = False
    """They are an API of somebody else: it has no metrics, and gets nothing but requests of clients."""
    key: PoolKey | str | None = None
    """The key that they get: the gateway's own, that of each ``client``, or ``none``. None: as
    ``--endpoint-api-key`` says."""
    headers: dict[HeaderName, HeaderValue] = {}
    """Headers in the place of the client's; an empty value removes one."""
    query: dict[Path, str] = {}
    """Parameters in the place of the client's; an empty value removes one."""
    tls: PoolTls | None = None
    http2: Http2Policy | None = None
    timeouts: PoolTimeouts = PoolTimeouts()
    max_attempts: Annotated[int, Meta(ge=1, le=16)] | None = None

    @property
    def spoken(self) -> frozenset[str] | None:
        """The APIs, as a set."""
        return None if self.apis is None else frozenset(self.apis)

    @property
    def connection(self) -> tuple[object, ...]:
        """What it says of connections, which are opened anew when it says something else."""
        return tuple(getattr(self, name) for name in _OF_CONNECTIONS)


_OF_CONNECTIONS = ("hosted", "key", "headers", "query", "tls", "http2", "timeouts", "max_attempts")
SILENT = Pool(name="-").connection
"""Of a pool that is reached as the options say."""
