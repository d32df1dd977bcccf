"""The config of ``penstock gateway``: its own groups of options, those that it shares with ``serve``, and
checks of their combinations."""

from __future__ import annotations

from typing import Annotated, Literal

from penstock.config.describe import option, option_group
from penstock.config.errors import Problems
from penstock.config.gateway_options.endpoints import EndpointOptions
from penstock.config.gateway_options.flow_control import FlowControlOptions
from penstock.config.gateway_options.listeners import EnvoyOptions, RouteOptions
from penstock.config.gateway_options.metrics import MetricsOptions
from penstock.config.gateway_options.models import ModelRoutingOptions
from penstock.config.gateway_options.picking import PickingOptions
from penstock.config.gateway_options.processes import WorkerOptions
from penstock.config.gateway_options.relaying import RelayingOptions
from penstock.config.options.keys import KeyOptions
from penstock.config.options.listen import ListenOptions, MaxRequestBytes, Port
from penstock.config.options.logs import LogOptions
from penstock.config.options.shutdown import DrainTimeout, ShutdownOptions
from penstock.config.options.tls import TlsOptions
from penstock.config.options.tracing import OtlpServiceName, TracingOptions
from penstock.config.rules.gateway_rules import GATEWAY_RULES
from penstock.config.rules.rule import check
from penstock.config.rules.shared_rules import SHARED_RULES


@option_group
class GatewayConfig(
    EndpointOptions,
    ListenOptions,
    KeyOptions,
    RouteOptions,
    TlsOptions,
    EnvoyOptions,
    PickingOptions,
    ModelRoutingOptions,
    FlowControlOptions,
    RelayingOptions,
    WorkerOptions,
    ShutdownOptions,
    LogOptions,
    MetricsOptions,
    TracingOptions,
):
    """The options of ``penstock gateway``."""

    port: Port = 8080
    max_request_bytes: MaxRequestBytes = 64 << 20
    drain_timeout: DrainTimeout = 60.0
    otlp_service_name: OtlpServiceName = "penstock-gateway"
    check: Annotated[
        Literal["off", "on", "json"],
        option(
            "Do not start: read every file, look up host names, and print all errors and what the options "
            "come to; json: as one object. The exit code is 0, or 2 with an error.",
            "Check",
        ),
    ] = "off"

    def __post_init__(self) -> None:
        """Raise ValueError for options that contradict each other, and for one without effect."""
        problems = Problems()
        with problems.collected():
            check(self, SHARED_RULES)
        with problems.collected():
            check(self, GATEWAY_RULES)
        problems.raise_all(ValueError)

    @property
    def envoy_host(self) -> str:
        """Where the server for Envoy listens."""
        return self.ext_proc_host or self.host
