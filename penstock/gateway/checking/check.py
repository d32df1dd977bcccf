"""Checks the options and files of a gateway without starting it, and tells all that is wrong at once.

Files are read by the code that reads them at the start (:mod:`penstock.gateway.check_options`), so a gateway
whose check finds no error starts, but for ports that are taken. Host names are looked up; nothing listens,
and nothing is sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from penstock.config.errors import ConfigError, Problems, did_you_mean
from penstock.config.gateway import GatewayConfig
from penstock.config.origins import Origins
from penstock.config.watched_file import TextFiles
from penstock.gateway.admission.clients_file import KnownClients, clients_file
from penstock.gateway.check_options import check_options
from penstock.gateway.checking.certificate_dates import certificates
from penstock.gateway.checking.resolved import resolved_endpoints, resolved_keys, resolved_options
from penstock.gateway.discovery.endpoints_file import NONE, EndpointsDocument, EndpointSource
from penstock.gateway.models.directory import ModelDirectory
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_discovery import ResolvedEndpoint, resolve
from penstock.http.api_key_file import load_api_keys

Report = dict[str, Any]


def check(config: GatewayConfig, origins: Origins, problems: Sequence[str]) -> Report:
    """What is wrong and what holds. ``problems``: those of the options themselves."""
    found = Problems()
    with _warnings() as warnings:
        loaded = config
        with found.collected():
            loaded = load_api_keys(config, origins, TextFiles())
        with found.collected():
            check_options(loaded)
        document, clients = NONE, KnownClients({})
        with suppress(ConfigError):  # told already
            document = EndpointSource(loaded).document()
        with suppress(ConfigError):
            if loaded.client_keys_file is not None:
                clients = clients_file(loaded.client_keys_file).latest()
        targets = asyncio.run(_resolve_all(document.urls()))
        dates, expiring = certificates(loaded, document.pools)
    errors = list(dict.fromkeys([*problems, *found.found]))
    warnings += [*expiring, *_doubtful_names(loaded, document, targets)]
    return {
        "ok": not errors,
        "errors": errors,
        "warnings": list(dict.fromkeys(warnings)),
        **resolved_endpoints(document, targets),
        "kubernetes_pools": loaded.kubernetes_pool or [],
        "keys": resolved_keys(loaded, clients),
        "certificates": dates,
        "options": resolved_options(config, origins),
    }


async def _resolve_all(urls: Sequence[str]) -> list[ResolvedEndpoint]:
    """As at the start, but for all at the same time."""
    found = await asyncio.gather(*(resolve([url]) for url in urls))
    return [target for targets in found for target in targets]


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What would be logged as a warning in the block, which is not logged."""
    log, collector = logging.getLogger("penstock"), _Collector()
    before, log.propagate = log.propagate, False
    log.addHandler(collector)
    try:
        yield collector.messages
    finally:
        log.removeHandler(collector)
        log.propagate = before


def _doubtful_names(
    config: GatewayConfig, document: EndpointsDocument, targets: Sequence[ResolvedEndpoint]
) -> list[str]:
    """Names that stand in for others, and that nobody serves as far as is known without asking endpoints for
    their models. Pools of Kubernetes are not known."""
    if config.kubernetes_pool:
        return []
    directory = ModelDirectory(config.unknown_models)
    found = document.in_pools(targets)
    directory.update(
        [Endpoint(each.label, pool=each.pool) for each in found], document.pools, document.routes
    )
    if (unserved := directory.unserved()) is not None:
        return unserved
    pools = [pool.name for pool in document.pools]
    return [
        f"{what} {name!r} of {whose}: no pool has this name, so an endpoint must list such a model{hint}"
        for whose, what, name in directory.stand_ins()
        if name not in pools and not directory.names_model(name)
        for hint in [did_you_mean(name, pools)]
        if hint or whose.startswith("pool ")
    ]
