"""``--client-keys-file``: the clients' keys with names, priorities, shares, models and budgets."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from penstock.config.describe import Key
from penstock.config.document import convert_document
from penstock.config.watched_file import WatchedFile
from penstock.gateway.requests.caller import DAY_S, MINUTE_S, Budget, Caller
from penstock.http.access_keys import key_digest

OPTION = "--client-keys-file"
Amount = Annotated[int, Meta(gt=0, le=1 << 53)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}\Z")]
Pattern = Annotated[str, Meta(min_length=1, max_length=256)]


class _Budgets(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    requests_per_minute: Amount | None = None
    requests_per_day: Amount | None = None
    tokens_per_minute: Amount | None = None
    tokens_per_day: Amount | None = None
    input_tokens_per_minute: Amount | None = None
    input_tokens_per_day: Amount | None = None
    output_tokens_per_minute: Amount | None = None
    output_tokens_per_day: Amount | None = None
    concurrent_requests: Amount | None = None

    def budgets(self) -> tuple[Budget, ...]:
        found = []
        for field, name in zip(self.__struct_fields__, self.__struct_encode_fields__, strict=True):
            amount = getattr(self, field)
            if amount is not None and "-per-" in name:
                found.append(Budget(name, amount, DAY_S if name.endswith("-day") else MINUTE_S))
        return tuple(found)


class _Entry(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\Z")]
    key: Key | list[Key] | UnsetType = UNSET
    sha256: Digest | list[Digest] | UnsetType = UNSET
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    models: list[Pattern] = []
    budgets: _Budgets = msgspec.field(default_factory=_Budgets)

    def digests(self) -> list[bytes]:
        """SHA-256 of each of its keys."""
        keys, digests = _listed(self.key), _listed(self.sha256)
        return [key_digest(key) for key in keys] + [bytes.fromhex(each) for each in digests]

    def caller(self) -> Caller:
        return Caller(
            id=self.name,
            name=self.name,
            priority=self.priority,
            weight=self.weight,
            models=tuple(self.models),
            budgets=self.budgets.budgets(),
            most_concurrent=self.budgets.concurrent_requests,
        )


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    keys: Annotated[list[_Entry], Meta(min_length=1)]


def _listed(value: str | list[str] | UnsetType) -> list[str]:
    if value is UNSET:
        return []
    return [value] if isinstance(value, str) else value


def read_keys(text: str) -> dict[bytes, Caller]:
    """Clients by the SHA-256 digests of their keys. Raises ValueError, whose text has no key."""
    from penstock.config import yaml_file  # takes tens of milliseconds, needed only with such a file

    document = convert_document(yaml_file.load(text), _Document)
    clients: dict[bytes, Caller] = {}
    names: set[str] = set()
    for entry in document.keys:
        if entry.name in names:
            raise ValueError(f"the name {entry.name!r} is given twice; give all its keys at once, as a list")
        names.add(entry.name)
        digests, caller = entry.digests(), entry.caller()
        if not digests:
            raise ValueError(f"{entry.name}: there is no key; it needs key, or sha256: the hex digest of one")
        for digest in digests:
            if digest in clients:
                raise ValueError(f"{clients[digest].name} and {entry.name} have the same key")
            clients[digest] = caller
    return clients


def keys_file(path: str) -> WatchedFile[dict[bytes, Caller]]:
    """See :func:`read_keys`. Raises ConfigError."""
    return WatchedFile(OPTION, path, read_keys, lambda clients: f"{len(clients)} keys")
