"""Options of spans and metrics for a collector, for ``serve`` and ``gateway`` alike."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from penstock.config.describe import option, option_group

OtlpServiceName: TypeAlias = Annotated[
    str, option("Service name in spans and metrics (service.name).", "Tracing")
]


@option_group
class TracingOptions:
    """Where spans and metrics are sent, and how many."""

    otlp_endpoint: Annotated[
        Annotated[str, Meta(pattern=r"^https?://[^/@?#\s]+(/[^@?#\s]*)?\Z")] | None,
        option(
            "OpenTelemetry collector for spans and metrics, OTLP over HTTP: http://HOST:4318. Default: none.",
            "Tracing",
            allowed="http://HOST:PORT or https://HOST:PORT, without a user",
            metavar="URL",
        ),
    ] = None
    otlp_sampling_ratio: Annotated[
        float,
        option(
            "Fraction of traces to sample; requests with a traceparent follow its sampled flag.",
            "Tracing",
            ge=0,
            le=1,
        ),
    ] = 1.0
    otlp_metrics_interval: Annotated[
        float,
        option(
            "Seconds between two exports of metrics named by OpenTelemetry's conventions; 0: none.",
            "Tracing",
            ge=0,
        ),
    ] = 60.0
    otlp_service_name: OtlpServiceName = "penstock"
