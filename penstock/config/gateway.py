"""Options of ``penstock gateway``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.config.describe import option
from penstock.config.groups import http

Url = Annotated[str, Meta(pattern=r"^https?://[^/@?#]+/?$")]
"""Of an endpoint: a scheme, a host and perhaps a port."""


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``penstock gateway`` runs with."""

    endpoints: Annotated[
        list[Url] | None,
        option(
            "Model servers, http://HOST:PORT each; a name that has several addresses stands for all of them.",
            "Endpoints",
            metavar="URL",
        ),
    ] = None
    endpoints_file: Annotated[
        str | None,
        option(
            "File with further endpoints, YAML or one on each line; read again when it changes.", "Endpoints"
        ),
    ] = None
    resolve_interval: Annotated[
        float, option("Seconds between look-ups of the endpoints' names.", "Endpoints", gt=0)
    ] = 30.0
    scrape_interval: Annotated[
        float,
        option(
            "Seconds between readings of every endpoint's /metrics; 0: only own requests are counted.",
            "Endpoints",
            ge=0,
        ),
    ] = 0.5

    host: http.Host = "127.0.0.1"
    port: http.Port = 8080
    ext_proc_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        option(
            "Port of Envoy's external processor (gRPC); 0 takes a free one and prints it; default: none.",
            "Envoy",
        ),
    ] = None
    ext_proc_cert_file: Annotated[
        str | None,
        option("Certificate chain of the external processor, PEM; default: it speaks without TLS.", "Envoy"),
    ] = None
    ext_proc_key_file: Annotated[
        str | None, option("Private key of that certificate, PEM.", "Envoy", metavar="FILE")
    ] = None
    api_key: Annotated[
        list[str] | None,
        option("Keys that clients may present; default: none is needed.", "HTTP server", secret=True),
    ] = None
    api_key_file: http.ApiKeyFile = None
    endpoint_api_key: Annotated[
        str | None,
        option("Key to present to the endpoints; default: the client's own.", "HTTP server", secret=True),
    ] = None
    max_request_bytes: http.MaxRequestBytes = 64 << 20
    max_connections: Annotated[int, option("Most client connections.", "HTTP server", ge=1)] = 65536

    scorers: Annotated[
        str,
        option(
            "Scorers and their weights, of queue, running, kv, tokens, prefix, session, lora, slo.",
            "Picking",
            metavar="NAME=WEIGHT,...",
        ),
    ] = "queue=2,running=1,kv=1,prefix=2,session=2"
    picker: Annotated[
        Literal["max-score", "power-of-two"],
        option(
            "max-score: the best endpoint; power-of-two: the better one of two drawn at random.", "Picking"
        ),
    ] = "max-score"
    session_header: Annotated[
        str, option("Header whose value names the session of session affinity.", "Picking")
    ] = "x-session-id"
    affinity_excess: Annotated[
        float,
        option(
            "Affinity ends where an endpoint has more requests than this times the least loaded one, plus 8.",
            "Picking",
            ge=1,
        ),
    ] = 1.5
    saturated_waiting: Annotated[
        int,
        option(
            "Waiting requests that saturate an endpoint, so that low priorities are refused.",
            "Picking",
            ge=1,
        ),
    ] = 5
    saturated_kv_used: Annotated[
        float, option("Share of the KV cache in use that saturates an endpoint.", "Picking", gt=0, le=1)
    ] = 0.95
    ttft_slo: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        option("Time to first token in seconds that the scorer slo aims at.", "Picking"),
    ] = None
    model_rewrite: Annotated[
        list[Annotated[str, Meta(pattern=r"^[^=]+=[^=:]+(:[0-9.]+)?(,[^=:,]+(:[0-9.]+)?)*$")]] | None,
        option(
            "Model names and what is asked for instead, several by weight: chat=small:9,large:1.",
            "Picking",
            metavar="NAME=MODEL[:WEIGHT],...",
        ),
    ] = None

    include_usage: Annotated[
        Literal["auto", "off", "require"],
        option(
            "auto: asks for usage in streams when the client is silent, and takes it out again; off: never; "
            "require: also when the client declines or the endpoint refuses.",
            "Relaying",
        ),
    ] = "auto"
    max_attempts: Annotated[
        int,
        option("Endpoints tried for a request while nothing has been relayed.", "Relaying", ge=1, le=16),
    ] = 3
    connect_timeout: Annotated[float, option("Seconds to connect to an endpoint.", "Relaying", gt=0)] = 5.0
    first_token_timeout: Annotated[
        float, option("Seconds from sending a request to its first token.", "Relaying", gt=0)
    ] = 300.0
    event_timeout: Annotated[
        float,
        option("Seconds that a reply may pause once it has begun, or its client not read.", "Relaying", gt=0),
    ] = 60.0
    request_timeout: Annotated[float, option("Seconds that a reply may take in all.", "Relaying", gt=0)] = (
        3600.0
    )

    metrics_compat: Annotated[
        Literal["none", "llm-d", "gie"],
        option(
            "Names and labels of the metrics beside our own: llm-d: of the llm-d Router's endpoint picker; "
            "gie: of that of the Gateway API Inference Extension.",
            "Metrics",
        ),
    ] = "none"
    metrics_max_models: Annotated[
        int,
        option(
            "Models that are told apart in metrics, besides those of --model-rewrite; the rest is 'other'.",
            "Metrics",
            ge=0,
        ),
    ] = 64
    metrics_pool_name: Annotated[
        str, option("What the pool of endpoints is called in metrics of --metrics-compat.", "Metrics")
    ] = "penstock"

    otlp_endpoint: Annotated[
        Annotated[str, Meta(pattern=r"^https?://[^/@?#]+(/[^?#]*)?$")] | None,
        option(
            "OpenTelemetry collector to send spans to, OTLP over HTTP: http://HOST:4318; default: no spans.",
            "Tracing",
            metavar="URL",
        ),
    ] = None
    otlp_sampling_ratio: Annotated[
        float,
        option(
            "Share of the traces that begin here whose spans are sent; for others their traceparent says it.",
            "Tracing",
            ge=0,
            le=1,
        ),
    ] = 1.0
    otlp_service_name: Annotated[
        str, option("What the gateway is called in spans (service.name).", "Tracing")
    ] = "penstock-gateway"

    drain_timeout: Annotated[
        float, option("Seconds that running requests have to finish after SIGTERM.", "Process", ge=0)
    ] = 60.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], option("How much is logged.", "Process")
    ] = "info"
    access_log: Annotated[
        Literal["none", "errors", "all"],
        option("Requests to log when they have ended, one JSON line each.", "Process"),
    ] = "errors"
    access_log_file: Annotated[
        str | None,
        option(
            "File to write those lines to, nothing else; default: standard error, among others.", "Process"
        ),
    ] = None
