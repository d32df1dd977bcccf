"""``--client-keys-file``: the clients' keys with names, times, priorities, shares, models and budgets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
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
Time = Annotated[datetime, Meta(tz=True)]
KeyName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\Z")]


@dataclass(frozen=True, slots=True)
class Grant:
    """Whose a key is, and when it is good. Times are Unix times, in seconds."""

    caller: Caller
    begins: float = -math.inf
    expires: float = math.inf
    revoked: bool = False

    def refusal(self, now: float) -> str:
        """``revoked``, ``expired``, ``not_yet_valid``, or empty: it is good."""
        if self.revoked:
            return "revoked"
        if now >= self.expires:
            return "expired"
        return "not_yet_valid" if now < self.begins else ""


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


class _Previous(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A key that was replaced."""

    sha256: Digest
    expires: Time


class KeyEntry(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A client, as the file names it."""

    name: KeyName
    key: Key | list[Key] | UnsetType = UNSET
    sha256: Digest | list[Digest] | UnsetType = UNSET
    team: KeyName = ""
    not_before: Time | None = None
    expires: Time | None = None
    revoked: bool = False
    previous: list[_Previous] = []
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    models: list[Pattern] = []
    budgets: _Budgets = msgspec.field(default_factory=_Budgets)

    def caller(self) -> Caller:
        return Caller(
            id=self.name,
            name=self.name,
            team=self.team,
            priority=self.priority,
            weight=self.weight,
            models=tuple(self.models),
            budgets=self.budgets.budgets(),
            most_concurrent=self.budgets.concurrent_requests,
        )

    def digests(self) -> list[bytes]:
        """SHA-256 of each of its keys, but for the previous ones."""
        keys, digests = _listed(self.key), _listed(self.sha256)
        return [key_digest(key) for key in keys] + [bytes.fromhex(each) for each in digests]

    def grants(self) -> list[tuple[bytes, Grant]]:
        """Every key of the client, by its digest. Raises ValueError."""
        begins = -math.inf if self.not_before is None else self.not_before.timestamp()
        expires = math.inf if self.expires is None else self.expires.timestamp()
        if expires <= begins:
            raise ValueError(f"{self.name}: expires is not after not-before, so no key would ever be valid")
        now = Grant(self.caller(), begins, expires, self.revoked)
        found = [(digest, now) for digest in self.digests()]
        for each in self.previous:
            end = min(expires, each.expires.timestamp())
            found.append((bytes.fromhex(each.sha256), Grant(now.caller, begins, end, self.revoked)))
        return found


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    keys: Annotated[list[KeyEntry], Meta(min_length=1)]


def _listed(value: str | list[str] | UnsetType) -> list[str]:
    if value is UNSET:
        return []
    return [value] if isinstance(value, str) else value


def read_entries(text: str) -> list[KeyEntry]:
    """The clients that the file names. Raises ValueError, whose text has no key."""
    from penstock.config import yaml_file  # takes tens of milliseconds, needed only with such a file

    return convert_document(yaml_file.load(text), _Document).keys


def read_keys(text: str) -> dict[bytes, Grant]:
    """Grants by the SHA-256 digests of the keys. Raises ValueError, whose text has no key."""
    grants: dict[bytes, Grant] = {}
    names: set[str] = set()
    for entry in read_entries(text):
        if entry.name in names:
            raise ValueError(f"the name {entry.name!r} is given twice; give all its keys at once, as a list")
        names.add(entry.name)
        if not entry.digests():
            raise ValueError(f"{entry.name}: there is no key; it needs key, or sha256: the hex digest of one")
        for digest, grant in entry.grants():
            if digest in grants:
                owners = dict.fromkeys((grants[digest].caller.name, entry.name))
                twice = "has the same key twice" if len(owners) == 1 else "have the same key"
                raise ValueError(f"{' and '.join(owners)} {twice}")
            grants[digest] = grant
    return grants


def keys_file(path: str) -> WatchedFile[dict[bytes, Grant]]:
    """See :func:`read_keys`. Raises ConfigError."""
    return WatchedFile(OPTION, path, read_keys, lambda grants: f"{len(grants)} keys")
