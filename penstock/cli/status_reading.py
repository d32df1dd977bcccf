"""Readings of a server's ``/status`` or a gateway's ``/metrics``, and what two of them say together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

if TYPE_CHECKING:  # httpx is not imported at startup
    from penstock.client import Client

Samples = dict[str, list[tuple[dict[str, str], float]]]
"""Labels and values of a text in Prometheus' format, by sample name."""
Row = dict[str, Any]
Status = TypeVar("Status")

_GATEWAY = "penstock_gateway_"
_ENDPOINT_GAUGES = {
    "up": f"{_GATEWAY}endpoint_up",
    "in_flight": f"{_GATEWAY}endpoint_in_flight",
    "waiting": f"{_GATEWAY}endpoint_waiting",
    "running": f"{_GATEWAY}endpoint_running",
    "kv_used": f"{_GATEWAY}endpoint_kv_used",
}


class EngineFigures(msgspec.Struct, kw_only=True):
    """One engine, as far as the command shows it."""

    engine: str
    state: str
    weight_version: str | None = None
    host: str | None = None
    running: int
    waiting: int
    kv_used: float
    prompt_tokens: int
    tokens: int
    restarts: int
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class ServerFigures(msgspec.Struct, kw_only=True):
    """One API server."""

    server: str
    connections: int
    streams: int
    bytes_queued: int
    tokens: int
    restarts: int


class AdapterFigures(msgspec.Struct, kw_only=True):
    """One LoRA adapter."""

    name: str
    rank: int
    path: str
    engines: list[int]
    missing: dict[str, str] = {}
    """Why engines lack it, by rank."""


class ImageFigures(msgspec.Struct, kw_only=True, frozen=True):
    """Pictures of requests since the start, by what was done for them."""

    remembered: int = 0
    found: int = 0
    decoded: int = 0
    refused: int = 0
    cache_bytes: int = 0
    workers: int = 0

    @property
    def known(self) -> int:
        """Those that nobody had to decode."""
        return self.remembered + self.found

    @property
    def seen(self) -> bool:
        """Whether a request has had one."""
        return self.known + self.decoded + self.refused > 0


class Reading(msgspec.Struct, kw_only=True):
    """A reply of ``/status``."""

    version: str
    models: list[str]
    time: float
    started: float | None
    engines: list[EngineFigures]
    api_servers: list[ServerFigures]
    requests: dict[str, int]
    rejected: dict[str, int]
    restarts: int
    adapters: list[AdapterFigures] = []
    images: ImageFigures = ImageFigures()

    @property
    def errors(self) -> int:
        """Requests that the server failed."""
        return self.requests.get("error", 0) + sum(
            times for code, times in self.rejected.items() if code >= "500"
        )


class EndpointReading(msgspec.Struct, kw_only=True):
    """One endpoint of a gateway's ``/status``, as far as the command shows it."""

    endpoint: str
    obstacles: list[str]
    failures: list[Row]


class GatewayStatus(msgspec.Struct, kw_only=True):
    """A gateway's ``/status``, as far as the command shows it."""

    endpoints: list[EndpointReading]


class GatewayReading(NamedTuple):
    """A gateway's ``/metrics``, and what ``/status`` says of its endpoints."""

    samples: Samples
    endpoints: list[EndpointReading] = []  # noqa: RUF012


class StatusSource:
    """Where readings come from: a server's ``/status``, or ``/metrics`` and ``/status`` of a gateway."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._server = False
        """Whether it is known to be a server."""

    def read(self) -> Reading | GatewayReading:
        """Raises ClientError."""
        from penstock.client import ClientError

        url = self._client.url
        if not self._server:
            # A gateway counts requests for what it does not have as rejected ones.
            samples = read_samples(self._client.get("/metrics").decode(errors="replace"))
            if f"{_GATEWAY}requests_in_flight" in samples:
                return GatewayReading(samples, self._read(GatewayStatus).endpoints)
            if "penstock:connections" not in samples:
                raise ClientError(f"{url}/metrics is neither a Penstock gateway's nor server's")
            self._server = True
        return self._read(Reading)

    def _read(self, kind: type[Status]) -> Status:
        """What ``/status`` says. Raises ClientError."""
        from penstock.client import ClientError

        try:
            return msgspec.json.decode(self._client.get("/status"), type=kind)
        except msgspec.DecodeError as error:
            raise ClientError(f"{self._client.url}/status cannot be read: {error}") from None


def read_samples(text: str) -> Samples:
    """The samples of a text in Prometheus' exposition format. Raises ClientError for any other text."""
    from prometheus_client.parser import text_string_to_metric_families

    from penstock.client import ClientError

    samples: Samples = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise ClientError(f"/metrics is not in Prometheus' text format: {error}") from None
    return samples


def status_of(earlier: Reading | GatewayReading, later: Reading | GatewayReading) -> dict[str, Any]:
    """The output of ``--json``. Rates are those between both readings of a server, and are left out if both
    are the same or of different starts."""
    if isinstance(later, GatewayReading):
        return _gateway_status(later)
    before = earlier if isinstance(earlier, Reading) and earlier.started == later.started else later
    seconds = later.time - before.time
    old_engines = {each.engine: each for each in before.engines}
    old_servers = {each.server: each for each in before.api_servers}
    return {
        "kind": "server",
        "version": later.version,
        "models": later.models,
        "uptime_s": None if later.started is None else round(later.time - later.started, 1),
        "errors": later.errors,
        "restarts": later.restarts,
        **_speculation(later.engines, [old_engines.get(each.engine, each) for each in later.engines]),
        "engines": [_engine(each, old_engines.get(each.engine, each), seconds) for each in later.engines],
        "api_servers": [
            _server(each, old_servers.get(each.server, each), seconds) for each in later.api_servers
        ],
        "adapters": [_adapter(each) for each in later.adapters],
        "images": [_images(later.images, before.images, seconds)] if later.images.seen else [],
    }


def _engine(now: EngineFigures, before: EngineFigures, seconds: float) -> Row:
    row = {name: getattr(now, name) for name in ("engine", "state", "host", "running", "waiting", "kv_used")}
    if seconds > 0:
        row["tokens_per_s"] = _rate(now.tokens - before.tokens, seconds)
        row["prompt_tokens_per_s"] = _rate(now.prompt_tokens - before.prompt_tokens, seconds)
    if now.weight_version is not None:
        row["weights"] = now.weight_version
    return row | _speculation([now], [before]) | {"restarts": now.restarts}


def _speculation(now: Sequence[EngineFigures], before: Sequence[EngineFigures]) -> Row:
    """Acceptance, as a share of draft tokens, and the mean of tokens per stream and step with a draft:
    between both readings, or since the start if there was no draft between them. Empty if there was none."""

    def added(name: str) -> list[int]:
        return [max(0, getattr(one, name) - getattr(two, name)) for one, two in zip(now, before, strict=True)]

    names = ("drafts", "draft_tokens", "accepted_tokens")
    drafts, drafted, accepted = (sum(added(name)) for name in names)
    if not drafted:
        drafts, drafted, accepted = (sum(getattr(each, name) for each in now) for name in names)
    if not drafts or not drafted:
        return {}
    return {"acceptance": round(accepted / drafted, 4), "tokens_per_step": round(1 + accepted / drafts, 3)}


def _server(now: ServerFigures, before: ServerFigures, seconds: float) -> Row:
    row = {name: getattr(now, name) for name in ("server", "connections", "streams", "bytes_queued")}
    if seconds > 0:
        row["tokens_per_s"] = _rate(now.tokens - before.tokens, seconds)
    return row | {"restarts": now.restarts}


def _adapter(each: AdapterFigures) -> Row:
    return {
        "adapter": each.name,
        "rank": each.rank,
        "path": each.path,
        "engines": each.engines,
        "missing": [f"{rank}: {reason}" for rank, reason in each.missing.items()],
    }


def _images(now: ImageFigures, before: ImageFigures, seconds: float) -> Row:
    prepared = now.known + now.decoded
    row: Row = {"images": prepared}
    if seconds > 0:
        row["images_per_s"] = _rate(prepared - before.known - before.decoded, seconds)
        row["decoded_per_s"] = _rate(now.decoded - before.decoded, seconds)
    row["known"] = round(now.known / max(1, prepared), 4)
    return row | {"refused": now.refused, "cache_mb": now.cache_bytes / 1e6, "media_workers": now.workers}


def _rate(gained: int, seconds: float) -> float:
    return round(max(0, gained) / seconds, 1)


def _gateway_status(reading: GatewayReading) -> dict[str, Any]:
    samples = reading.samples
    outcomes: dict[str, float] = {}
    for labels, value in samples.get(f"{_GATEWAY}request_total", ()):
        outcomes[labels["outcome"]] = outcomes.get(labels["outcome"], 0) + value
    rows: dict[str, Row] = {
        labels["endpoint"]: {name: labels[name] for name in ("endpoint", "pool")}
        | dict.fromkeys(_ENDPOINT_GAUGES)
        for labels, _ in samples.get(_ENDPOINT_GAUGES["up"], ())
    }
    for column, name in _ENDPOINT_GAUGES.items():
        for labels, value in samples.get(name, ()):
            rows[labels["endpoint"]][column] = value
    for each in reading.endpoints:
        if each.endpoint in rows:
            rows[each.endpoint]["state"] = ", ".join(each.obstacles) or "ready"
    failures = [{"endpoint": each.endpoint, **row} for each in reading.endpoints for row in each.failures]
    return {
        "kind": "gateway",
        "in_flight": sum(value for _, value in samples[f"{_GATEWAY}requests_in_flight"]),
        "models": _models(samples),
        "endpoints": list(rows.values()),
        "failures": sorted(failures, key=lambda row: str(row["at"])),
        "costs": _costs(samples, "cost", ("target_model", "pool")),
        "key_costs": _costs(samples, "key_cost", ("key", "team")),
        "requests": outcomes,
    }


def _costs(samples: Samples, name: str, labels: Sequence[str]) -> list[Row]:
    """What requests have cost since the start of the gateway, by ``labels`` and currency, the most first."""
    sums: dict[tuple[str, ...], float] = {}
    for found, value in samples.get(f"{_GATEWAY}{name}_total", ()):
        key = tuple(found[label] for label in (*labels, "currency"))
        sums[key] = sums.get(key, 0.0) + value
    columns = [label.replace("target_", "") for label in (*labels, "currency")]
    return [
        dict(zip(columns, key, strict=True)) | {"cost": round(cost, 9)}
        for key, cost in sorted(sums.items(), key=lambda each: (-each[1], each[0]))
    ]


def _models(samples: Samples) -> list[Row]:
    """The models that endpoints serve, and those that have requests."""
    rows: dict[str, Row] = {}

    def row(model: str) -> Row:
        none = {"pools": [], "ready": 0, "endpoints": 0, "in_flight": 0, "queued": 0}
        return rows.setdefault(model, {"model": model, **none})

    for labels, value in samples.get(f"{_GATEWAY}model_endpoints", ()):
        row(labels["model"])["pools"].append(labels["pool"])
        row(labels["model"])["endpoints"] += value
    for labels, value in samples.get(f"{_GATEWAY}model_ready_endpoints", ()):
        row(labels["model"])["ready"] += value
    for column, name in (("in_flight", "model_requests_in_flight"), ("queued", "model_queued_requests")):
        for labels, value in samples.get(_GATEWAY + name, ()):
            if value or labels["model"] in rows:
                row(labels["model"])[column] += value
    return [rows[model] for model in sorted(rows)]
