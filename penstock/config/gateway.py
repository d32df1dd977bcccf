"""Options of ``penstock gateway``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.config.describe import option
from penstock.config.options import http
from penstock.config.options.tracing import OtlpEndpoint, OtlpSamplingRatio, OtlpServiceName

Url = Annotated[str, Meta(pattern=r"^https?://[^/@?#]+/?$")]
"""URL of an endpoint: scheme, host and optional port."""


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``penstock gateway``."""

    endpoints: Annotated[
        list[Url] | None,
        option(
            "Model servers, http://HOST:PORT each. Every address that HOST resolves to is an endpoint.",
            "Endpoints",
            allowed="http://HOST:PORT or https://HOST:PORT, without a path such as /v1",
            metavar="URL",
        ),
    ] = None
    endpoints_file: Annotated[
        str | None,
        option("File with further endpoints, YAML or one per line; reloaded when it changes.", "Endpoints"),
    ] = None
    resolve_interval: Annotated[
        float, option("Time between DNS look-ups of the endpoints, in seconds.", "Endpoints", gt=0)
    ] = 30.0
    scrape_interval: Annotated[
        float,
        option(
            "Time between scrapes of each endpoint's /metrics, in seconds; 0: off, only the "
            "gateway's own requests count.",
            "Endpoints",
            ge=0,
        ),
    ] = 0.5

    host: http.Host = "127.0.0.1"
    port: http.Port = 8080
    ext_proc_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        option(
            "Port of the gRPC server for Envoy's external processing; 0: a free port, which is "
            "printed. Default: off.",
            "Envoy",
        ),
    ] = None
    ext_proc_cert_file: Annotated[
        str | None,
        option("Certificate chain of that server (PEM). Default: no TLS.", "Envoy"),
    ] = None
    ext_proc_key_file: Annotated[
        str | None, option("Private key of that certificate (PEM).", "Envoy", metavar="FILE")
    ] = None
    api_key: Annotated[
        list[str] | None,
        option(
            "API keys; clients must send one of them as a bearer token. Default: no authentication.",
            "HTTP server",
            secret=True,
        ),
    ] = None
    api_key_file: http.ApiKeyFile = None
    endpoint_api_key: Annotated[
        str | None,
        option("API key to send to the endpoints. Default: the client's own.", "HTTP server", secret=True),
    ] = None
    max_request_bytes: http.MaxRequestBytes = 64 << 20
    max_header_bytes: http.MaxHeaderBytes = 64 << 10
    header_timeout: http.HeaderTimeout = 30.0
    keep_alive_timeout: http.KeepAliveTimeout = 75.0
    max_connections: Annotated[
        int,
        option(
            "Maximum client connections, and HTTP/2 requests at a time; further ones get 503. "
            "For want of open files (ulimit -n), further ones wait.",
            "HTTP server",
            ge=1,
        ),
    ] = 65536

    scorers: Annotated[
        str,
        option(
            "Scorers and their weights: queue, running, kv, tokens, prefix, session, lora, slo.",
            "Picking",
            metavar="NAME=WEIGHT,...",
        ),
    ] = "queue=2,running=1,kv=1,prefix=2,session=2"
    picker: Annotated[
        Literal["max-score", "power-of-two"],
        option(
            "How an endpoint is chosen. max-score: the best score; power-of-two: the better of two "
            "random ones.",
            "Picking",
        ),
    ] = "max-score"
    session_header: Annotated[
        str, option("Request header with the session id, for the session scorer.", "Picking")
    ] = "x-session-id"
    affinity_excess: Annotated[
        float,
        option(
            "Prefix and session affinity skip an endpoint with more requests than this multiple of "
            "the least loaded one's, plus 8.",
            "Picking",
            ge=1,
        ),
    ] = 1.5
    saturated_waiting: Annotated[
        int,
        option(
            "Waiting requests at which an endpoint counts as saturated. Low priorities are refused "
            "when all endpoints are.",
            "Picking",
            ge=1,
        ),
    ] = 5
    saturated_kv_used: Annotated[
        float,
        option(
            "KV cache usage at which an endpoint counts as saturated, as a fraction.", "Picking", gt=0, le=1
        ),
    ] = 0.95
    ttft_slo: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        option("Target time to first token of the slo scorer, in seconds.", "Picking"),
    ] = None
    model_rewrite: Annotated[
        list[Annotated[str, Meta(pattern=r"^[^=]+=[^=:]+(:[0-9.]+)?(,[^=:,]+(:[0-9.]+)?)*$")]] | None,
        option(
            "Model names to replace, optionally by weight: chat=small:9,large:1.",
            "Picking",
            allowed="NAME=MODEL, or NAME=MODEL:WEIGHT,MODEL:WEIGHT",
            metavar="NAME=MODEL[:WEIGHT],...",
        ),
    ] = None

    include_usage: Annotated[
        Literal["auto", "off", "require"],
        option(
            "Token usage in streams. auto: the gateway asks for it where the client does not say, "
            "and removes it from the reply; off: it never asks; require: it asks even if the client "
            "declines or the endpoint refuses.",
            "Relaying",
        ),
    ] = "auto"
    upstream_http2: Annotated[
        Literal["auto", "off", "require"],
        option(
            "HTTP/2 to endpoints. auto: where they speak it, which the gateway finds out once per "
            "endpoint (by ALPN with https; with http by the beginning of HTTP/2 on a connection of its own, "
            "which others refuse); off: never; require: endpoints that do not speak it get no requests.",
            "Relaying",
        ),
    ] = "auto"
    max_attempts: Annotated[
        int,
        option(
            "Maximum endpoints tried per request, until the first byte of the response is relayed.",
            "Relaying",
            ge=1,
            le=16,
        ),
    ] = 3
    connect_timeout: Annotated[
        float, option("Maximum time to connect to an endpoint, in seconds.", "Relaying", gt=0)
    ] = 5.0
    first_token_timeout: Annotated[
        float, option("Maximum time from sending a request to its first token, in seconds.", "Relaying", gt=0)
    ] = 300.0
    event_timeout: Annotated[
        float,
        option(
            "Maximum time between two events of a response, or without the client reading, in seconds.",
            "Relaying",
            gt=0,
        ),
    ] = 60.0
    request_timeout: Annotated[
        float, option("Maximum time of a request in total, in seconds.", "Relaying", gt=0)
    ] = 3600.0

    metrics_compat: Annotated[
        Literal["none", "llm-d", "gie"],
        option(
            "Additional metric names and labels. llm-d: of the llm-d Router's endpoint picker; gie: "
            "of the Gateway API Inference Extension's.",
            "Metrics",
        ),
    ] = "none"
    metrics_max_models: Annotated[
        int,
        option(
            "Maximum models with metrics of their own, besides those of --model-rewrite; others "
            "count as 'other'.",
            "Metrics",
            ge=0,
        ),
    ] = 64
    metrics_pool_name: Annotated[
        str, option("Name of the endpoint pool in metrics of --metrics-compat.", "Metrics")
    ] = "penstock"

    otlp_endpoint: OtlpEndpoint = None
    otlp_sampling_ratio: OtlpSamplingRatio = 1.0
    otlp_service_name: OtlpServiceName = "penstock-gateway"

    drain_timeout: Annotated[
        float,
        option("Maximum time for running requests to finish after SIGTERM, in seconds.", "Process", ge=0),
    ] = 60.0
    drain_grace: Annotated[
        float,
        option(
            "Time between SIGTERM and the shutdown, in seconds: /ready answers 503, but requests are relayed "
            "until load balancers have noticed. SIGINT (Ctrl-C) and a second signal end it.",
            "Process",
            ge=0,
        ),
    ] = 0.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], option("Minimum severity of log messages.", "Process")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        option(
            "Format of log lines. json: one object per line, from the gateway, with time, level, process, "
            "logger, message, and exception or fields.",
            "Process",
        ),
    ] = "text"
    access_log: Annotated[
        Literal["none", "errors", "all"],
        option("Requests to log when they finish, one JSON line each. errors: those that failed.", "Process"),
    ] = "errors"
    access_log_file: Annotated[
        str | None,
        option("File for the access log. Default: standard error, with other log messages.", "Process"),
    ] = None
