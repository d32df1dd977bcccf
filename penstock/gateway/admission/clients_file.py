"""``--client-keys-file``: the clients' keys, and the issuers of their tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.config.document import convert_document
from penstock.config.watched_file import WatchedFile
from penstock.distribution import pip_install
from penstock.gateway.admission.budget_terms import NOT_SHARED, ModelTerms, SharedBudgets, TeamEntry
from penstock.gateway.admission.keys_file import Grant, KeyEntry
from penstock.gateway.admission.oidc.issuer_entry import IssuerEntry

OPTION = "--client-keys-file"


class ClientsDocument(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """What the file says."""

    keys: Annotated[list[KeyEntry], Meta(min_length=1)] | None = None
    issuers: Annotated[list[IssuerEntry], Meta(min_length=1, max_length=16)] | None = None
    teams: list[TeamEntry] = []
    model_budgets: ModelTerms = {}
    """Budgets that all clients of the file have together."""


@dataclass(frozen=True, slots=True)
class KnownClients:
    """What the file says, checked."""

    grants: dict[bytes, Grant]
    """By the SHA-256 digests of keys."""
    issuers: tuple[IssuerEntry, ...] = ()
    names: frozenset[str] = frozenset()
    """Of keys. No token has one of them."""
    shared: SharedBudgets = NOT_SHARED

    def __str__(self) -> str:
        issuers = f" and {len(self.issuers)} issuers" if self.issuers else ""
        return f"{len(self.grants)} keys{issuers}"


def read_document(text: str) -> ClientsDocument:
    """Raises ValueError, whose text has no key."""
    from penstock.config import yaml_file  # takes tens of milliseconds, needed only with such a file

    return convert_document(yaml_file.load(text), ClientsDocument)


def read_clients(text: str) -> KnownClients:
    """Raises ValueError, whose text has no key."""
    document = read_document(text)
    if document.keys is None and document.issuers is None:
        raise ValueError("the file: it needs keys, or issuers")
    grants: dict[bytes, Grant] = {}
    names: set[str] = set()
    shared = SharedBudgets.read(document.teams, document.model_budgets)
    for entry in document.keys or ():
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
            grants[digest] = replace(grant, caller=shared.added_to(grant.caller))
    return KnownClients(grants, _checked(document.issuers or []), frozenset(names), shared)


def _checked(issuers: list[IssuerEntry]) -> tuple[IssuerEntry, ...]:
    """Raises ValueError."""
    if issuers and (find_spec("jwt") is None or find_spec("cryptography") is None):
        raise ValueError(f"issuers needs the packages PyJWT and cryptography: {pip_install('jwt')}")
    for at, entry in enumerate(issuers):
        try:
            entry.check()
        except ValueError as error:
            raise ValueError(f"issuers[{at}]: {error}") from None
        for before, other in enumerate(issuers[:at]):
            if entry.issuer == other.issuer:
                raise ValueError(f"issuers[{at}].issuer: is that of issuers[{before}]")
            if entry.prefix.startswith(other.prefix) or other.prefix.startswith(entry.prefix):
                raise ValueError(
                    f"issuers[{at}].prefix: begins as that of issuers[{before}], so two clients could have "
                    "the same name"
                )
    return tuple(issuers)


def clients_file(path: str) -> WatchedFile[KnownClients]:
    """See :func:`read_clients`. Raises ConfigError."""
    return WatchedFile(OPTION, path, read_clients, str)
