"""What the options of ``penstock gateway`` need and exclude."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from penstock.config.rules.rule import Rule, excludes, needs

if TYPE_CHECKING:
    from penstock.config.gateway import GatewayConfig


def _is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach ``host``; a name may be any address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _may_have_https(config: GatewayConfig) -> bool:
    """Whether an endpoint has, or may get, TLS. Pods of InferencePools have none."""
    return config.endpoints_file is not None or any(
        url.startswith("https:") for url in config.endpoints or ()
    )


GATEWAY_RULES: tuple[Rule[GatewayConfig], ...] = (
    # -- endpoints
    needs(
        "kubernetes_config",
        lambda config: bool(config.kubernetes_pool),
        "needs --kubernetes-pool, the pools that the API server is asked for",
    ),
    excludes(
        "kubernetes_pool",
        lambda config: config.ext_proc_port is not None and len(config.kubernetes_pool or ()) > 1,
        "--ext-proc-port takes one pool, as Envoy does not say for which pool a request is",
    ),
    needs(
        "resolve_interval",
        lambda config: bool(config.endpoints or config.endpoints_file),
        "needs --endpoints or --endpoints-file: pods of Kubernetes are not looked up by name",
    ),
    needs(
        "upstream_ca_file upstream_cert_file upstream_server_name",
        _may_have_https,
        "needs https:// in --endpoints, or --endpoints-file",
    ),
    needs(
        "upstream_key_file",
        lambda config: config.upstream_cert_file is not None,
        "needs --upstream-cert-file, its certificate",
    ),
    needs(
        "unknown_models",
        lambda config: config.models_interval > 0 or config.endpoints_file is not None,
        "needs --models-interval above 0, or --endpoints-file with pools that name their models: no model is "
        "known without",
    ),
    needs(
        "kv_events_ranks",
        lambda config: bool(config.kv_events),
        "needs --kv-events, the port of the first rank",
    ),
    # -- budgets and flow control
    needs(
        "budget_store",
        lambda config: config.client_keys_file is not None,
        "needs --client-keys-file, which has the budgets",
    ),
    needs(
        "budget_state_file",
        lambda config: config.client_keys_file is not None,
        "needs --client-keys-file, which has the budgets",
    ),
    excludes(
        "budget_state_file",
        lambda config: config.budget_store != "memory",
        "--budget-store keeps them elsewhere",
    ),
    needs(
        "budget_store_timeout budget_store_outage",
        lambda config: config.budget_store != "memory",
        "needs --budget-store URL: budgets in memory are always there",
    ),
    needs(
        "max_requests_per_endpoint max_queued_requests queue_timeout fairness_header",
        lambda config: config.flow_control,
        "needs --flow-control, without which no request waits in the gateway",
    ),
    # -- the access log
    excludes(
        "access_log_file log_content",
        lambda config: config.access_log == "none",
        "needs --access-log errors or all",
    ),
    # -- Envoy
    needs(
        "ext_proc_host ext_proc_cert_file ext_proc_key_file ext_proc_client_ca_file ext_proc_insecure",
        lambda config: config.ext_proc_port is not None,
        "needs --ext-proc-port, where Envoy connects",
    ),
    excludes(
        "ext_proc_port",
        lambda config: (
            config.ext_proc_client_ca_file is None
            and not (config.ext_proc_insecure or _is_loopback(config.envoy_host))
        ),
        "whoever reaches it on {0.envoy_host} can report outcomes and gets the endpoints' addresses and key, "
        "so Envoy has to prove who it is: --ext-proc-cert-file, --ext-proc-key-file and "
        "--ext-proc-client-ca-file. Or listen on this machine alone (--ext-proc-host 127.0.0.1), or trust "
        "everybody (--ext-proc-insecure)",
    ),
    excludes(
        "ext_proc_insecure",
        lambda config: config.ext_proc_client_ca_file is not None,
        "does not go with --ext-proc-client-ca-file {0.ext_proc_client_ca_file}, which asks for certificates",
    ),
    needs(
        "ext_proc_key_file ext_proc_client_ca_file",
        lambda config: config.ext_proc_cert_file is not None,
        "needs --ext-proc-cert-file, the server's certificate",
    ),
    needs(
        "ext_proc_cert_file",
        lambda config: config.ext_proc_key_file is not None,
        "needs --ext-proc-key-file, its private key",
    ),
)
