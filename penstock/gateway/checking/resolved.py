"""What the options and files of a gateway come to, without secrets."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from penstock.config.gateway import GatewayConfig
from penstock.config.introspect import options_of, without_secrets
from penstock.config.origins import Origins
from penstock.gateway.admission.budget_terms import in_words
from penstock.gateway.admission.clients_file import KnownClients
from penstock.gateway.discovery.endpoints_file import EndpointsDocument
from penstock.gateway.models.pools import Pool
from penstock.gateway.requests.caller import Caller
from penstock.gateway.routing.endpoint_discovery import ResolvedEndpoint

SHOWN = ("name", "role", "models", "fallback", "apis")
"""Fields of a pool that are shown. Others may have secrets: of them only the name is, where they are set."""


def resolved_endpoints(document: EndpointsDocument, targets: Iterable[ResolvedEndpoint]) -> dict[str, Any]:
    """Pools and other endpoints with their addresses, and names of models."""
    addresses: dict[str, list[str]] = defaultdict(list)
    for each in targets:
        if each.destination:
            addresses[each.url].append(each.destination)

    def listed(urls: Iterable[str]) -> list[dict[str, Any]]:
        return [{"url": url, "addresses": addresses[url]} for url in urls]

    return {
        "pools": [_pool(pool) | {"endpoints": listed(pool.endpoints)} for pool in document.pools],
        "endpoints": listed(document.endpoints),
        "names": {
            name: {"targets": route.targets, "fallback": route.fallback, "shadow": route.shadow}
            for name, route in document.routes.items()
        },
    }


def _pool(pool: Pool) -> dict[str, Any]:
    plain, hidden = Pool(name=pool.name), (*SHOWN, "endpoints")
    others = zip(pool.__struct_fields__, pool.__struct_encode_fields__, strict=True)
    also = [
        said for name, said in others if name not in hidden and getattr(pool, name) != getattr(plain, name)
    ]
    return {name: getattr(pool, name) for name in SHOWN} | {"also_set": also}


def resolved_keys(config: GatewayConfig, clients: KnownClients) -> dict[str, Any]:
    """Who may use the gateway: names, and how many keys have none."""
    now = time.time()
    states: dict[Caller, list[str]] = defaultdict(list)
    for grant in clients.grants.values():
        states[grant.caller].append(grant.refusal(now))
    return {
        "needed": bool(config.api_key or config.client_keys_file),
        "unnamed": len(config.api_key or ()),
        "administrators": len(config.admin_api_key or ()),
        "issuers": [entry.issuer for entry in clients.issuers],
        "named": [
            {
                "name": caller.name,
                "keys": len(refusals),
                "refused": list(filter(None, refusals)),
                "priority": caller.priority,
                "weight": caller.weight,
                "models": caller.models,
                "budgets": in_words(caller.budgets, caller.name)
                | ({"concurrent-requests": most} if (most := caller.most_concurrent) else {}),
            }
            for caller, refusals in states.items()
        ],
    }


def resolved_options(config: GatewayConfig, origins: Origins) -> dict[str, Any]:
    """Options that are not at their defaults, and where they were set."""
    values = without_secrets(config)
    return {
        option.flag: {"value": values[option.field], "set_by": str(origins.get(option.field, ""))}
        for option in options_of(type(config))
        if getattr(config, option.field) != option.default and option.field != "check"
    }
