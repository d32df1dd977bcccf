"""Checks what workers will do with the options, before one is started: files, addresses and libraries."""

from __future__ import annotations

from importlib.util import find_spec

from penstock.config.errors import ConfigError
from penstock.config.gateway import GatewayConfig
from penstock.config.secret_files import warn_if_open_to_others
from penstock.config.watched_file import check_regular, reason
from penstock.distribution import pip_install
from penstock.gateway.admission.envoy_certificates import certificate_files
from penstock.gateway.admission.keys_file import keys_file
from penstock.gateway.discovery.endpoints_file import EndpointSource
from penstock.gateway.kv_events.event_ports import EventPorts
from penstock.gateway.scorer_weights import read_weights
from penstock.http.tls import server_context
from penstock.telemetry.spans import check_tracing


def check_options(config: GatewayConfig) -> None:
    """Raise ConfigError for options that no worker could run. Nothing is kept: workers read files on their
    own. Warn of secrets that others can read."""
    server_context(config)
    certificate_files(config)
    for option, path in (
        ("--ext-proc-key-file", config.ext_proc_key_file),
        ("--client-keys-file", config.client_keys_file),
    ):
        if path is not None:
            warn_if_open_to_others(option, path)
    endpoints = EndpointSource(config)
    endpoints.warn_of_open_files()
    if config.ext_proc_port is not None:
        endpoints.warn_of_envoy()
    read_weights(config.scorers, config.ttft_slo)
    EventPorts(config.kv_events or (), config.kv_events_ranks)
    if config.client_keys_file is not None:
        keys_file(config.client_keys_file)
    if config.access_log_file is not None:
        _check_appendable("--access-log-file", config.access_log_file)
    if config.otlp_endpoint is not None:
        check_tracing(config.otlp_endpoint)
    if config.budget_store != "memory":
        _check_budget_store(config.budget_store)
    if config.ext_proc_port is not None:
        _check_library("--ext-proc-port", "grpc", "envoy")
    if config.kubernetes_pool:
        _check_library("--kubernetes-pool", "kubernetes", "kubernetes")
    if config.kubernetes_config is not None:
        _check_file("--kubernetes-config", config.kubernetes_config)


def _check_library(option: str, module: str, extra: str) -> None:
    if find_spec(module) is None:
        raise ConfigError(f"{option} needs the package {module}: {pip_install(extra)}")


def _check_budget_store(url: str) -> None:
    _check_library("--budget-store", "redis", "redis")
    from redis.asyncio.connection import parse_url

    try:
        parse_url(url)
    except ValueError:  # its text may have a part of the password
        raise ConfigError(
            "--budget-store: the URL is not valid: check its port, and write special characters of its "
            "password as %2F"
        ) from None


def _check_appendable(option: str, path: str) -> None:
    try:
        with open(path, "a"):
            pass
    except OSError as error:
        raise ConfigError(f"{option} {path}: {reason(error)}") from None


def _check_file(option: str, path: str) -> None:
    try:
        check_regular(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path}: {reason(error)}") from None
