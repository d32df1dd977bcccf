"""The connection records of pools: from the options, and from what the endpoints file says of each pool."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from penstock.config.describe import ALLOWED_KEY, KEY_PATTERN
from penstock.config.errors import ConfigError, Problems
from penstock.config.gateway import GatewayConfig
from penstock.config.watched_file import WatchedFile
from penstock.gateway.models.pools import SILENT, Pool, PoolKey, PoolTimeouts, PoolTls
from penstock.gateway.upstream.exchange import REPLACED, without_hop_by_hop
from penstock.gateway.upstream.request_form import CREDENTIALS, OF_PROXIES, RequestForm
from penstock.gateway.upstream.timeouts import Timeouts
from penstock.gateway.upstream.tls import UpstreamTls
from penstock.gateway.upstream.upstream import Upstream

AUTHORIZATION = "authorization"
KEY_FORMS = "{file: FILE}, {env: NAME}, client (that of each client) or none"
Key = str | None
_is_key = re.compile(KEY_PATTERN).match


def default_upstream(config: GatewayConfig) -> Upstream:
    """How servers are reached of which nothing else is said. Raises ConfigError."""
    key = config.endpoint_api_key
    return Upstream(
        timeouts=Timeouts(
            connect=config.connect_timeout,
            first_token=config.first_token_timeout,
            event=config.event_timeout,
            total=config.request_timeout,
        ),
        http2=config.upstream_http2,
        tls=UpstreamTls(
            ca_file=config.upstream_ca_file,
            cert_file=config.upstream_cert_file,
            key_file=config.upstream_key_file,
            server_name=config.upstream_server_name,
        ),
        max_attempts=config.max_attempts,
        form=RequestForm(None if key is None else _key_header(AUTHORIZATION, key)),
        key_source="" if key is None else "--endpoint-api-key",
    )


class PoolUpstreams:
    """The records of all pools. One stays the same object as long as the file says the same of its pool."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises ConfigError."""
        self.default = default_upstream(config)
        self._endpoint_api_key = config.endpoint_api_key
        self._root_path = config.root_path
        self._knows_queues = config.scrape_interval > 0 or config.flow_control
        self._made: dict[str, tuple[tuple[object, ...], dict[str, Upstream]]] = {}
        """By pool: what was said of its connections, and the records by the path of URLs."""

    def of(self, pools: Iterable[Pool]) -> dict[str, dict[str, Upstream]]:
        """By pool the records by the path of URLs, empty: of URLs without one. Raises ValueError with all
        that is wrong, a line each."""
        made, problems = dict[str, dict[str, Upstream]](), Problems()
        for pool in pools:
            with problems.collected():
                made[pool.name] = self._of(pool)
        problems.raise_all(ValueError)
        return made

    def keep(self, pools: Iterable[Pool], made: dict[str, dict[str, Upstream]]) -> None:
        """These records are in effect."""
        self._made = {pool.name: (pool.connection, made[pool.name]) for pool in pools}

    def refresh(self) -> None:
        """Look at the files with keys."""
        for _, records in self._made.values():
            for upstream in records.values():
                upstream.refresh()

    def _of(self, pool: Pool) -> dict[str, Upstream]:
        """Raises ValueError."""
        if pool.overflow is not None and (pool.hosted or not self._knows_queues):
            raise ValueError(
                f"pool {pool.name}: overflow needs the queues of its servers: --scrape-interval above 0 or "
                "--flow-control, and no hosted API"
            )
        said, known = self._made.get(pool.name, (None, {}))
        paths = dict.fromkeys(["", *(urlsplit(url).path for url in pool.endpoints)])
        if said != pool.connection:
            known = {}
        if missing := [path for path in paths if path not in known]:
            known = {**known, **self._make(pool, missing)}
        return {path: known[path] for path in paths}

    def _make(self, pool: Pool, paths: Iterable[str]) -> dict[str, Upstream]:
        """Raises ValueError."""
        if pool.hosted and pool.key is None:
            raise ValueError(
                f"pool {pool.name}: a hosted API needs key, so that it gets none that is meant for others: "
                f"{KEY_FORMS}"
            )
        default, tls, problems = self.default, self.default.tls, Problems()
        read_key: Callable[[], Key] = lambda: None  # noqa: E731
        with problems.collected():
            read_key = self._key_reader(pool)
        with problems.collected():
            _check_headers(pool)
        with problems.collected():
            tls = _tls(pool, default.tls)
        problems.raise_all(ValueError)
        common = Upstream(
            timeouts=_timeouts(pool, default.timeouts),
            http2=pool.http2 or default.http2,
            tls=tls,
            max_attempts=pool.max_attempts or default.max_attempts,
            hosted=pool.hosted,
            key_source=_key_source(pool, default.key_source),
        )
        made: dict[str, Upstream] = {}
        for path in paths:
            if not path and pool.connection == SILENT:
                made[path] = default
            else:
                made[path] = common.with_form(self._form_maker(pool, path, read_key))
        return made

    def _form_maker(self, pool: Pool, path: str, read_key: Callable[[], Key]) -> Callable[[], RequestForm]:
        header = pool.key.header.lower() if isinstance(pool.key, PoolKey) else AUTHORIZATION
        without = CREDENTIALS if pool.key == "none" else ()
        if pool.hosted:
            without = (*without, *OF_PROXIES)
        made: tuple[Key, RequestForm] | None = None

        def make() -> RequestForm:
            nonlocal made
            key = read_key()
            if made is None or made[0] != key:
                form = RequestForm(
                    None if key is None else _key_header(header, key),
                    without=without,
                    headers=pool.headers,
                    query=pool.query,
                    prefix=path,
                    root_path=self._root_path if path or pool.hosted else "",
                )
                made = key, form
            return made[1]

        return make

    def _key_reader(self, pool: Pool) -> Callable[[], Key]:
        """Raises ValueError."""
        key = pool.key
        if key is None:
            return lambda: self._endpoint_api_key
        if not isinstance(key, PoolKey):
            if key not in ("client", "none"):  # which may be a key, and is not repeated
                raise ValueError(f"pool {pool.name}: key takes {KEY_FORMS}; the file itself may have no key")
            return lambda: None
        if (key.file is None) == (key.env is None):
            raise ValueError(f"pool {pool.name}: key needs either file or env")
        if key.env is not None:
            value = _check_key(os.environ.get(key.env, ""), f"pool {pool.name}: key.env {key.env}")
            return lambda: value
        assert key.file is not None
        try:
            return WatchedFile(
                f"pool {pool.name}: key.file", key.file, _check_key, lambda key: "its contents"
            ).latest
        except ConfigError as error:
            raise ValueError(str(error)) from None


def _check_key(text: str, where: str = "") -> str:
    """The key of a file or variable, without the line's end. Raises ValueError, whose text has no key."""
    key, where = text.strip(), f"{where}: " if where else ""
    if not key:
        raise ValueError(f"{where}it has no key")
    if _is_key(key) is None:
        raise ValueError(f"{where}its key has other characters than {ALLOWED_KEY}")
    return key


def _key_header(header: str, key: str) -> tuple[bytes, bytes]:
    scheme = "Bearer " if header == AUTHORIZATION else ""
    return header.encode(), f"{scheme}{key}".encode()


def _key_source(pool: Pool, default: str) -> str:
    key = pool.key
    if not isinstance(key, PoolKey):
        return default if key is None else ""
    said = f"key.file {key.file}" if key.env is None else f"key.env {key.env}"
    return f"pool {pool.name} ({said})"


def _timeouts(pool: Pool, default: Timeouts) -> Timeouts:
    """Raises ValueError."""
    said: PoolTimeouts = pool.timeouts
    if said.total is not None and said.total > default.total:
        raise ValueError(
            f"pool {pool.name}: timeouts.total {said.total:g} is more than --request-timeout "
            f"{default.total:g}, which bounds all requests"
        )
    return Timeouts(
        connect=said.connect or default.connect,
        first_token=said.first_token or default.first_token,
        event=said.event or default.event,
        total=said.total or default.total,
    )


def _tls(pool: Pool, default: UpstreamTls) -> UpstreamTls:
    """A hosted API has nothing to do with the authorities and certificates of own servers. Raises
    ValueError."""
    if pool.tls is None and not pool.hosted:
        return default
    said = pool.tls or PoolTls()
    if said.key_file is not None and said.cert_file is None:
        raise ValueError(f"pool {pool.name}: tls.key-file needs tls.cert-file, its certificate")
    try:
        return UpstreamTls(
            ca_file=said.ca_file,
            cert_file=said.cert_file,
            key_file=said.key_file,
            server_name=said.server_name,
            pool=pool.name,
        )
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _check_headers(pool: Pool) -> None:
    """Raises ValueError."""
    of_key = pool.key.header.lower() if isinstance(pool.key, PoolKey) else AUTHORIZATION
    if _is_set_by_gateway(of_key):
        raise ValueError(f"pool {pool.name}: key.header {of_key}: the gateway sets it itself")
    for name in pool.headers:
        if name.lower() == of_key or name.lower().encode() in CREDENTIALS:
            raise ValueError(f"pool {pool.name}: headers may not have {name}: key says where its key is")
        if _is_set_by_gateway(name):
            raise ValueError(f"pool {pool.name}: headers may not have {name}, which the gateway sets itself")


def _is_set_by_gateway(name: str) -> bool:
    header = name.lower().encode()
    return header in REPLACED or not without_hop_by_hop([(header, b"")])
