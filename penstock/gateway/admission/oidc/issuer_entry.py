"""An issuer of tokens (OpenID Connect, JWT), as the keys file names it, and what its tokens grant."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from penstock.config.document import convert_document
from penstock.gateway.admission.budget_terms import BudgetTerms, KeyName, Pattern
from penstock.gateway.requests.caller import Caller

Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]  # fmt: skip
"""Those with a public key. With a shared secret (HS256), whoever can check a token could make one."""
ALGORITHMS: tuple[Algorithm, ...] = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
)  # fmt: skip
MAX_NAME = 128
"""Characters of a client's name."""
MAX_PATTERNS = 64
"""Models, or groups, of a token."""

ClaimPath = Annotated[str, Meta(min_length=1, max_length=256)]
"""Name of a claim; one within another after a dot, as ``realm_access.roles``. A name with dots of its own, as
``https://example.com/team``, is looked for first."""
Text = Annotated[str, Meta(min_length=1, max_length=1024)]


class ClaimsError(ValueError):
    """A token has a claim that cannot be used. The text has none of its value."""


class ClaimNames(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """Which claim has what; None: no claim has it."""

    name: ClaimPath = "sub"
    team: ClaimPath | None = None
    groups: ClaimPath | None = None
    models: ClaimPath | None = None
    priority: ClaimPath | None = None
    budgets: ClaimPath | None = None

    def paths(self) -> list[str]:
        """Of those that some claim has."""
        named = (self.name, self.team, self.groups, self.models, self.priority, self.budgets)
        return [path for path in named if path is not None]


class GroupTerms(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """What a token grants that has one of these groups."""

    groups: Annotated[list[Text], Meta(min_length=1)]
    team: KeyName | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    weight: Annotated[float, Meta(gt=0, le=1000)] | None = None
    models: Annotated[list[Pattern], Meta(min_length=1)] | None = None
    budgets: BudgetTerms | None = None


class IssuerEntry(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """An issuer, and what its tokens grant where neither a claim nor a group says it."""

    issuer: Text
    audience: Text | Annotated[list[Text], Meta(min_length=1)]
    jwks: Text | None = None
    """URL or file of the issuer's keys; None: the issuer tells the URL (discovery)."""
    ca_file: str | None = None
    algorithms: Annotated[list[Algorithm], Meta(min_length=1)] | None = None
    """None: all of ALGORITHMS."""
    leeway: Annotated[int, Meta(ge=0, le=300)] = 30
    prefix: Annotated[str, Meta(max_length=32)] = ""
    claims: ClaimNames = msgspec.field(default_factory=ClaimNames)
    group_terms: list[GroupTerms] = []
    team: KeyName | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    models: list[Pattern] = []
    budgets: BudgetTerms = msgspec.field(default_factory=BudgetTerms)

    @property
    def audiences(self) -> list[str]:
        return [self.audience] if isinstance(self.audience, str) else self.audience

    @property
    def has_file(self) -> bool:
        """Whether the keys are in a file."""
        return self.jwks is not None and "://" not in self.jwks

    def check(self) -> None:
        """Raise ValueError for what its types do not tell."""
        if not self.has_file:
            check_url(self.jwks or self.issuer)
        if self.group_terms and self.claims.groups is None:
            raise ValueError("group-terms needs claims: {groups: NAME}, the claim that has the groups")
        if not self.prefix.isprintable():
            raise ValueError("prefix has characters that cannot be printed")

    def caller(self, claims: dict[str, Any]) -> Caller | None:
        """The client of a token that has been verified; None: it has none of the groups that are granted
        anything. Raises ClaimsError."""
        names = self.claims
        groups = texts(claims, names.groups) or []
        group = next((each for each in self.group_terms if not set(each.groups).isdisjoint(groups)), None)
        if group is None and self.group_terms:
            return None
        name = self.prefix + _required_name(claims, names.name)
        models = texts(claims, names.models)
        if models is not None and not models:
            raise ClaimsError(f"its claim {names.models} names no model")
        priority, budgets = _priority(claims, names.priority), _budgets(claims, names.budgets)
        if group is not None:
            models = group.models if models is None else models
            priority = group.priority if priority is None else priority
            budgets = group.budgets if budgets is None else budgets
        budgets = self.budgets if budgets is None else budgets
        weight = None if group is None else group.weight
        team = _team(claims, names.team) or (group and group.team) or self.team or ""
        return Caller(
            id=name,
            name=name,
            team=team,
            priority=self.priority if priority is None else priority,
            weight=self.weight if weight is None else weight,
            models=tuple(self.models if models is None else models),
            budgets=budgets.budgets(),
            most_concurrent=budgets.concurrent_requests,
        )


def check_url(url: str) -> None:
    """Raise ValueError for a URL from which keys are not fetched: whoever can change what is on its way could
    make tokens."""
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ValueError("its URL has credentials")
    if not parts.hostname or parts.scheme not in ("http", "https"):
        raise ValueError("it takes a URL, https://HOST[:PORT][/PATH]")
    if parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise ValueError("it takes https://: over http:// anybody on the way could replace the keys")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def claim(claims: dict[str, Any], path: str | None) -> Any:
    """The claim at ``path``; None: there is none."""
    if path is None:
        return None
    if path in claims:
        return claims[path]
    found: Any = claims
    for step in path.split("."):
        if not isinstance(found, dict):
            return None
        found = found.get(step)
    return found


def texts(claims: dict[str, Any], path: str | None) -> list[str] | None:
    """A claim with several texts: a list, or one text with spaces between them. Raises ClaimsError."""
    found = claim(claims, path)
    if found is None:
        return None
    listed = found.split() if isinstance(found, str) else found
    if not isinstance(listed, list) or not all(isinstance(each, str) and each for each in listed):
        raise ClaimsError(f"its claim {path} is neither a text nor a list of texts")
    if len(listed) > MAX_PATTERNS or any(len(each) > 256 for each in listed):
        raise ClaimsError(f"its claim {path} has more than {MAX_PATTERNS} texts, or one is longer than 256")
    return listed


def is_name(found: Any) -> bool:
    """Whether this may name a client in logs and metrics."""
    return isinstance(found, str) and 0 < len(found) <= MAX_NAME and found.isprintable()


def _required_name(claims: dict[str, Any], path: str) -> str:
    found: Any = claim(claims, path)
    if not is_name(found):
        raise ClaimsError(f"its claim {path}, the name, is no text of 1 to {MAX_NAME} printable characters")
    return str(found)


def _team(claims: dict[str, Any], path: str | None) -> str | None:
    found = claim(claims, path)
    if found is None:
        return None
    if not is_name(found):
        raise ClaimsError(f"its claim {path}, the team, is no text of 1 to {MAX_NAME} printable characters")
    return str(found)


def _priority(claims: dict[str, Any], path: str | None) -> int | None:
    found = claim(claims, path)
    if found is not None and (type(found) is not int or not -100 <= found <= 100):
        raise ClaimsError(f"its claim {path}, the priority, is no integer from -100 to 100")
    return found


def _budgets(claims: dict[str, Any], path: str | None) -> BudgetTerms | None:
    found = claim(claims, path)
    if found is None:
        return None
    try:
        return convert_document(found, BudgetTerms)
    except ValueError:
        raise ClaimsError(f"its claim {path} has no budgets as the keys file does") from None
