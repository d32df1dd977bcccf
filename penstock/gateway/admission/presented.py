"""Tells who a key or a token is, and what it is granted, as the gateway would see it now."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from penstock.gateway.admission.budget_terms import in_words
from penstock.gateway.admission.clients_file import KnownClients
from penstock.gateway.requests.caller import Caller


def examine(presented: bytes, known: KnownClients, now: float) -> dict[str, Any]:
    """A description without the secret; with ``refused`` if it is no good. Keys of a token's issuer are
    fetched."""
    grant = known.grants.get(sha256(presented).digest())
    if grant is not None:
        found = {"kind": "key", **_described(grant.caller, grant.expires)}
        refusal = grant.refusal(now)
        return found | {"refused": f"key_{refusal}"} if refusal else found
    if not known.issuers or not presented.startswith(b"eyJ") or presented.count(b".") != 2:
        return {"kind": "key", "refused": "invalid_api_key", "reason": "The file does not have this key."}
    return asyncio.run(_examine_token(presented, known, now))


async def _examine_token(token: bytes, known: KnownClients, now: float) -> dict[str, Any]:
    from penstock.gateway.admission.oidc.key_source import KeyFetchError, KeySource
    from penstock.gateway.admission.oidc.token_check import TokenCheck, TokenRefused, UnknownKeyError

    sources = {entry.issuer: KeySource(entry, lambda: now) for entry in known.issuers}
    entries = {issuer: source.entry for issuer, source in sources.items()}
    check = TokenCheck(entries, lambda issuer: sources[issuer].current(), known.names)
    problem = ""
    try:
        try:
            good = check.check(token, now)
        except UnknownKeyError as unknown:
            try:
                await sources[unknown.issuer].read()
            except KeyFetchError as error:
                problem = f" {error}"
            good = check.check(token, now)
    except TokenRefused as refusal:
        return {"kind": "token", "refused": refusal.code, "reason": refusal.text + problem}
    return {
        "kind": "token",
        "issuer": good.issuer.issuer,
        **_described(known.shared.added_to(good.caller), good.expires),
    }


def _described(caller: Caller, expires: float) -> dict[str, Any]:
    budgets = in_words(caller.budgets, caller.name)
    if caller.most_concurrent is not None:
        budgets["concurrent-requests"] = caller.most_concurrent
    never = expires == float("inf")
    return {
        "name": caller.name,
        "team": caller.team,
        "expires": "never" if never else datetime.fromtimestamp(expires, UTC).isoformat(),
        "models": list(caller.models) or ["*"],
        "priority": caller.priority,
        "weight": caller.weight,
        "budgets": budgets,
    }
