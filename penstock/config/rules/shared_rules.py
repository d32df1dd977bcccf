"""What options need and exclude that ``serve`` and ``gateway`` share."""

from __future__ import annotations

from typing import Protocol

from penstock.config.rules.rule import Rule, needs


class SharedOptions(Protocol):
    """The options that the rules ask for."""

    @property
    def otlp_endpoint(self) -> str | None: ...
    @property
    def ssl_certfile(self) -> str | None: ...
    @property
    def ssl_ca_certs(self) -> str | None: ...
    @property
    def ssl_cert_reqs(self) -> int: ...


SHARED_RULES: tuple[Rule[SharedOptions], ...] = (
    needs(
        "ssl_keyfile ssl_ca_certs ssl_cert_reqs enable_ssl_refresh",
        lambda config: config.ssl_certfile is not None,
        "needs --ssl-certfile, the certificate of the server",
    ),
    needs(
        "ssl_ca_certs",
        lambda config: config.ssl_cert_reqs != 0,
        "needs --ssl-cert-reqs 1 or 2, with which clients are asked for certificates",
    ),
    needs(
        "ssl_cert_reqs",
        lambda config: config.ssl_ca_certs is not None,
        "needs --ssl-ca-certs, the authorities that issue the clients' certificates",
    ),
    needs(
        "otlp_sampling_ratio otlp_metrics_interval otlp_service_name",
        lambda config: config.otlp_endpoint is not None,
        "needs --otlp-endpoint, without which nothing is exported",
    ),
)
