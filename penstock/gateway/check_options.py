"""Checks what workers will do with the options, before one is started: files, addresses and libraries."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from penstock.config import yaml_file
from penstock.config.errors import ConfigError, Problems
from penstock.config.gateway import GatewayConfig
from penstock.config.secret_files import warn_if_open_to_others
from penstock.config.watched_file import check_regular, read_regular, reason
from penstock.distribution import pip_install
from penstock.gateway.admission.clients_file import clients_file
from penstock.gateway.admission.envoy_certificates import certificate_files
from penstock.gateway.admission.oidc.issuer_entry import IssuerEntry
from penstock.gateway.billing.billing_file import check_journal_folder
from penstock.gateway.discovery.endpoints_file import EndpointSource
from penstock.gateway.kv_events.event_ports import EventPorts
from penstock.gateway.scorer_weights import read_weights
from penstock.gateway.workers.budget_state import read_budget_state
from penstock.http.sockets.listener import check_host
from penstock.http.tls import server_context
from penstock.telemetry.spans import check_tracing


def check_options(config: GatewayConfig) -> None:
    """Raise ConfigError for options that no worker could run, with a line for each problem. Nothing is kept:
    workers read files on their own. Warn of secrets that others can read."""
    problems = Problems()
    for check in CHECKS:
        with problems.collected():
            check(config)
    problems.raise_all()


def _check_hosts(config: GatewayConfig) -> None:
    problems = Problems()
    with problems.collected():
        check_host(config.host, config.port)
    if config.ext_proc_port is not None:
        with problems.collected():
            check_host(config.envoy_host, config.ext_proc_port, "--ext-proc-port")
    problems.raise_all()


def _check_envoy(config: GatewayConfig) -> None:
    if config.ext_proc_key_file is not None:
        warn_if_open_to_others("--ext-proc-key-file", config.ext_proc_key_file)
    if config.ext_proc_port is not None:
        _check_library("--ext-proc-port", "grpc", "envoy")


def _check_endpoints(config: GatewayConfig) -> None:
    endpoints = EndpointSource(config)
    endpoints.warn_of_open_files()
    if config.ext_proc_port is not None:
        endpoints.warn_of_envoy()


def _check_client_keys(config: GatewayConfig) -> None:
    if config.client_keys_file is not None:
        warn_if_open_to_others("--client-keys-file", config.client_keys_file)
        problems = Problems()
        for entry in clients_file(config.client_keys_file).latest().issuers:
            with problems.collected():
                _check_issuer(f"--client-keys-file {config.client_keys_file}: issuer {entry.issuer}", entry)
        problems.raise_all()


def _check_issuer(where: str, entry: IssuerEntry) -> None:
    """Whether its files can be used; the issuer itself is asked by the workers."""
    from penstock.gateway.admission.oidc.key_source import check_files

    try:
        check_files(entry)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_kubernetes(config: GatewayConfig) -> None:
    """Whether the file can be read; who it names is asked by the workers."""
    if config.kubernetes_pool:
        _check_library("--kubernetes-pool", "kubernetes", "kubernetes")
    if (path := config.kubernetes_config) is not None:
        try:
            check_regular(path)
            said = yaml_file.load(read_regular(path))
            if not isinstance(said, dict):
                raise ValueError("it is no file of kubectl's, which has contexts")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--kubernetes-config {path}: {reason(error)}") from None


def _check_access_log(config: GatewayConfig) -> None:
    if config.access_log_file is not None:
        _check_appendable("--access-log-file", config.access_log_file)


def _check_billing_file(config: GatewayConfig) -> None:
    if config.billing_file is not None:
        _check_appendable("--billing-file", config.billing_file)
        check_journal_folder(config.billing_file)


def _check_appendable(option: str, path: str) -> None:
    try:
        with open(path, "a"):
            pass
    except OSError as error:
        raise ConfigError(f"{option} {path}: {reason(error)}") from None


def _check_tracing(config: GatewayConfig) -> None:
    if config.otlp_endpoint is not None:
        check_tracing(config.otlp_endpoint)


def _check_budget_store(config: GatewayConfig) -> None:
    if config.budget_state_file is not None:
        read_budget_state(config.budget_state_file)
    if config.budget_store == "memory":
        return
    _check_library("--budget-store", "redis", "redis")
    from redis.asyncio.connection import parse_url

    try:
        parse_url(config.budget_store)
    except ValueError:  # its text may have a part of the password
        raise ConfigError(
            "--budget-store: the URL is not valid: check its port, and write special characters of its "
            "password as %2F"
        ) from None


def _check_library(option: str, module: str, extra: str) -> None:
    if find_spec(module) is None:
        raise ConfigError(f"{option} needs the package {module}: {pip_install(extra)}")


CHECKS: tuple[Callable[[GatewayConfig], object], ...] = (
    _check_hosts,
    server_context,
    certificate_files,
    _check_envoy,
    _check_endpoints,
    lambda config: read_weights(config.scorers, config.ttft_slo),
    lambda config: EventPorts(config.kv_events or (), config.kv_events_ranks),
    _check_client_keys,
    _check_access_log,
    _check_billing_file,
    _check_tracing,
    _check_budget_store,
    _check_kubernetes,
)
"""Each raises ConfigError for what it finds."""
