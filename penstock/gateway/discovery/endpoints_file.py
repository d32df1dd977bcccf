"""Endpoints, their pools and routes of model names from ``--endpoints`` and ``--endpoints-file``."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from penstock.config.document import convert_document
from penstock.config.errors import Problems
from penstock.config.gateway import GatewayConfig
from penstock.config.gateway_options.endpoints import Url
from penstock.config.hidden import hide_credentials
from penstock.config.secret_files import warn_if_open_to_others
from penstock.config.watched_file import WatchedFile
from penstock.gateway.billing.prices import Currency, Prices, check_prices
from penstock.gateway.discovery.pool_upstreams import PoolUpstreams
from penstock.gateway.models.model_routes import ModelRoute, check_route, read_routes
from penstock.gateway.models.pools import ModelName, Pool, PoolKey, PoolTimeouts
from penstock.gateway.routing.endpoint_discovery import ResolvedEndpoint
from penstock.gateway.upstream.exchange import port_of
from penstock.gateway.upstream.upstream import Upstream

log = logging.getLogger(__name__)

Share = Annotated[float, Meta(gt=0, le=1)]


class _Route(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    targets: dict[ModelName, float] | ModelName | None = None
    fallback: list[ModelName] = []
    shadow: dict[ModelName, Share] = {}
    prices: Prices | None = None

    @property
    def is_route(self) -> bool:
        """Whether it says something else than prices, or nothing."""
        return self.prices is None or bool(self.targets or self.fallback or self.shadow)


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    endpoints: list[str] = []
    pools: list[Pool] = []
    models: dict[ModelName, _Route] = {}
    currency: Currency | None = None


class EndpointsDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of an endpoints file."""

    endpoints: tuple[str, ...] = ()
    """URLs of endpoints of no pool."""
    pools: tuple[Pool, ...] = ()
    routes: dict[str, ModelRoute] = {}
    """What is said under ``models``, by the name or pattern that clients use."""
    currency: str = ""
    """Of the prices; empty: there are none."""
    prices: dict[str, Prices] = {}
    """Prices under ``models``, by name or pattern."""
    upstreams: dict[str, dict[str, Upstream]] = {}
    """How pools are reached, by their names and the paths of their URLs; missing: as the options say."""

    def urls(self) -> list[str]:
        return [*dict.fromkeys((*self.endpoints, *(url for pool in self.pools for url in pool.endpoints)))]

    def looked_up(self) -> list[str]:
        """URLs whose names are looked up: an API of others knows itself what is behind its name."""
        return [*self.endpoints, *(url for pool in self.pools if not pool.hosted for url in pool.endpoints)]

    def hosted(self) -> list[ResolvedEndpoint]:
        """The endpoints of APIs of others, one for each URL of a pool."""
        return [
            _in_pool(ResolvedEndpoint(url), pool)
            for pool in self.pools
            if pool.hosted
            for url in pool.endpoints
        ]

    def in_pools(self, targets: Iterable[ResolvedEndpoint]) -> list[ResolvedEndpoint]:
        """The endpoints with the names of their pools, and their roles."""
        pools = self.pool_of()
        return [_in_pool(each, pools.get(each.url)) for each in targets]

    def reached(self, targets: Iterable[ResolvedEndpoint]) -> list[ResolvedEndpoint]:
        """The endpoints with how those of their pools are reached."""
        none: dict[str, Upstream] = {}
        return [
            replace(each, upstream=self.upstreams.get(each.pool, none).get(urlsplit(each.url).path))
            for each in targets
        ]

    def pool_of(self) -> dict[str, Pool]:
        """The pools of URLs that have one."""
        return {url: pool for pool in self.pools for url in pool.endpoints}


def _in_pool(target: ResolvedEndpoint, pool: Pool | None) -> ResolvedEndpoint:
    if pool is None:
        return replace(target, pool="", role="both", apis=None)
    return replace(target, pool=pool.name, role=pool.role, apis=pool.spoken)


def read_endpoints(text: str) -> EndpointsDocument:
    """Read an endpoints file: a YAML list of URLs; a YAML mapping with such a list as ``endpoints``, and with
    ``pools`` and ``models``; or plain text with one URL on each line. Raises ValueError with all that is
    wrong, a line each."""
    from penstock.config import yaml_file  # takes tens of milliseconds, needed only with such a file

    said = yaml_file.load(_COMMENT.sub("", text))  # YAML allows no comments between the lines of a scalar
    if not isinstance(said, dict):
        said = {"endpoints": said.split() if isinstance(said, str) else said or []}
    document = convert_document(said, _Document)
    problems = Problems()
    pools = tuple(
        msgspec.structs.replace(pool, endpoints=_urls(pool.endpoints, problems, _PATH))
        for pool in document.pools
    )
    endpoints = tuple(dict.fromkeys(_urls(document.endpoints, problems)))
    problems.found += _pool_problems(pools)
    problems.found += _endpoint_problems(endpoints, pools)
    routes: dict[str, ModelRoute] = {}
    for name, said in document.models.items():
        if said.is_route:
            with problems.collected():
                routes[name] = _route(name, said)
    prices: dict[str, Prices] = {}
    with problems.collected():
        prices = _prices(document)
    problems.raise_all(ValueError)
    if any(pool.apis is not None for pool in pools):
        import_module("penstock.gateway.translation.translation")  # 0.2 s, before requests wait for it
    return EndpointsDocument(
        endpoints=endpoints,
        pools=pools,
        routes=routes,
        currency=document.currency or "",
        prices=prices,
    )


_COMMENT = re.compile(r"(^|[ \t])#.*$", re.MULTILINE)


_PATH = re.compile(r"(?<=[^/:])(/[^/?#%\s]+)+/?\Z")
"""The path of a URL, which those of pools may have."""


def _url(url: str, path: re.Pattern[str] | None = None) -> str:
    """``path``: what it may end with. Raises ValueError."""
    try:
        port_of(msgspec.convert(url if path is None else path.sub("", url), Url))
    except ValueError:  # ValidationError is one
        what = "http://HOST:PORT" if path is None else "http://HOST:PORT or http://HOST:PORT/PATH"
        raise ValueError(f"{hide_credentials(url)!r} is not {what}") from None
    return url.rstrip("/")


def _urls(urls: Iterable[str], problems: Problems, path: re.Pattern[str] | None = None) -> list[str]:
    """Those of ``urls`` that are some; ``path``: see :func:`_url`."""
    found = []
    for url in urls:
        with problems.collected():
            found.append(_url(url, path))
    return found


def _pool_problems(pools: Iterable[Pool]) -> list[str]:
    itself = [f"pool {pool.name!r}: its fallback is itself" for pool in pools if pool.name in pool.fallback]
    return [*_twice("pool", [pool.name for pool in pools]), *itself]


def _endpoint_problems(endpoints: Iterable[str], pools: Iterable[Pool]) -> list[str]:
    """Pools of an API of others may be several accounts there; own servers are in one pool."""
    once, hosted = [*endpoints], dict[str, None]()
    for pool in pools:
        if pool.hosted and len(set(pool.endpoints)) == len(pool.endpoints):
            hosted.update(dict.fromkeys(pool.endpoints))
        else:
            once += pool.endpoints
    return _twice("endpoint", [*once, *hosted])


def _twice(what: str, values: list[str]) -> list[str]:
    return [f"{what} {value!r} is given twice" for value, count in Counter(values).items() if count > 1]


def _route(name: str, said: _Route) -> ModelRoute:
    """Raises ValueError."""
    targets = said.targets
    if isinstance(targets, str):
        targets = {targets: 1.0}
    route = ModelRoute(targets=targets or {}, fallback=tuple(said.fallback), shadow=said.shadow)
    check_route(f"models: {name}", name, route)
    return route


def _prices(document: _Document) -> dict[str, Prices]:
    """Raises ValueError."""
    found = {name: said.prices for name, said in document.models.items() if said.prices is not None}
    for name, prices in found.items():
        check_prices(f"models.{name}.prices", prices)
    if found and document.currency is None:
        raise ValueError("currency: it is missing, but there are prices; give three letters, such as USD")
    return found


NONE = EndpointsDocument()


def endpoints_file(path: str, upstreams: PoolUpstreams | None = None) -> WatchedFile[EndpointsDocument]:
    """See :func:`read_endpoints`; ``upstreams`` are those of its pools, which are valid as well. Raises
    ConfigError."""

    def read(text: str) -> EndpointsDocument:
        document = read_endpoints(text)
        if upstreams is None:
            return document
        return msgspec.structs.replace(document, upstreams=upstreams.of(document.pools))

    return WatchedFile("--endpoints-file", path, read, _amount)


def _amount(document: EndpointsDocument) -> str:
    counts = len(document.urls()), len(document.pools), len(document.routes.keys() | document.prices.keys())
    return "{} endpoints, {} pools and {} names of models".format(*counts)


class EndpointSource:
    """Endpoints, pools and routes of model names, from the options and the file together."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises ConfigError, with a line for each problem."""
        self._listed = [url.rstrip("/") for url in config.endpoints or ()]
        upstreams, problems = None, Problems()
        self._file, self._routes = None, dict[str, ModelRoute]()
        with problems.collected():
            upstreams = PoolUpstreams(config)
        if config.endpoints_file is not None:
            with problems.collected():
                self._file = endpoints_file(config.endpoints_file, upstreams)
        elif not self._listed and not config.kubernetes_pool:
            problems.found.append(
                "there are no endpoints: --endpoints http://127.0.0.1:8000, --endpoints-file FILE, or "
                "--kubernetes-pool NAME"
            )
        for url in self._listed:
            try:
                port_of(url)
            except ValueError as error:
                problems.found.append(f"--endpoints {url}: {error}")
        with problems.collected():
            self._routes = read_routes(
                config.model_rewrite or (), config.model_fallback or (), config.model_shadow or ()
            )
        problems.raise_all()
        assert upstreams is not None, "its problems are raised"
        self.upstreams = upstreams
        self._read: EndpointsDocument | None = None
        self._document = self.document()

    def document(self) -> EndpointsDocument:
        """All of them; the same object until the file changes. What the file says of a URL or a name comes
        before the options."""
        read = NONE if self._file is None else self._file.latest()
        self.upstreams.refresh()
        if read is not self._read:
            self._read = read
            self.upstreams.keep(read.pools, read.upstreams)
            pooled = read.pool_of()
            listed = dict.fromkeys((*self._listed, *read.endpoints))
            self._document = EndpointsDocument(
                endpoints=tuple(url for url in listed if url not in pooled),
                pools=read.pools,
                routes={**self._routes, **read.routes},
                currency=read.currency,
                prices=read.prices,
                upstreams=read.upstreams,
            )
        return self._document

    def warn_of_envoy(self) -> None:
        """Warn of what does not hold where Envoy connects to the servers itself."""
        for pool in self._document.pools:
            if pool.hosted or any(
                each.form.rewrites for each in self._document.upstreams[pool.name].values()
            ):
                log.warning(
                    "pool %s: Envoy gets no endpoints of a hosted API, or with a path or query", pool.name
                )
            elif pool.tls is not None or pool.http2 is not None or pool.timeouts != PoolTimeouts():
                log.warning("pool %s: tls, http2 and timeouts are those of Envoy's cluster there", pool.name)

    def warn_of_open_files(self) -> None:
        """Warn of keys that others can read."""
        for pool in self._document.pools:
            if isinstance(pool.key, PoolKey) and pool.key.file is not None:
                warn_if_open_to_others(f"pool {pool.name}: key.file", pool.key.file)
