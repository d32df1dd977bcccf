"""Options of the gateway: the model servers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from penstock.config.describe import option, option_group

Url = Annotated[str, Meta(pattern=r"^https?://[^/@?#\s]+/?\Z")]
"""URL of an endpoint: scheme, host and optional port."""


@option_group
class EndpointOptions:
    """Options of the gateway: the model servers."""

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
    kubernetes_pool: Annotated[
        list[Annotated[str, Meta(pattern=r"^([a-z0-9-]+/)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?\Z")]] | None,
        option(
            "InferencePools of Kubernetes, whose pods are further endpoints; their InferenceObjectives and "
            "InferenceModelRewrites apply too.",
            "Endpoints",
            allowed="NAME or NAMESPACE/NAME",
            metavar="[NAMESPACE/]NAME",
        ),
    ] = None
    kubernetes_config: Annotated[
        str | None,
        option(
            "File with address and credentials of the Kubernetes API server. Default: the pod's service "
            "account; outside of a cluster $KUBECONFIG or ~/.kube/config.",
            "Endpoints",
            metavar="FILE",
        ),
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

    upstream_ca_file: Annotated[
        str | None,
        option(
            "File with the CA certificates that https endpoints are verified with (PEM), reloaded when it "
            "changes. Default: the system's.",
            "TLS to endpoints",
            metavar="FILE",
        ),
    ] = None
    upstream_cert_file: Annotated[
        str | None,
        option(
            "File with the gateway's own certificate chain for https endpoints that ask for one (PEM), "
            "reloaded when it changes.",
            "TLS to endpoints",
            metavar="FILE",
        ),
    ] = None
    upstream_key_file: Annotated[
        str | None,
        option(
            "File with the private key of that certificate (PEM). Default: --upstream-cert-file holds it.",
            "TLS to endpoints",
            metavar="FILE",
        ),
    ] = None
    upstream_server_name: Annotated[
        str | None,
        option(
            "Name that certificates of https endpoints must have, and that is sent with the handshake (SNI). "
            "Default: the host of the endpoint's URL.",
            "TLS to endpoints",
        ),
    ] = None
