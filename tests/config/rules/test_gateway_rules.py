"""Options of the gateway that contradict each other, or would have no effect, are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.errors import ConfigError
from penstock.config.gateway import GatewayConfig
from penstock.config.sources import resolve

HTTP: dict[str, Any] = {"endpoints": ["http://a"]}
HTTPS: dict[str, Any] = {"endpoints": ["http://a", "https://b"]}
PODS: dict[str, Any] = {"kubernetes_pool": ["llama"]}
KEYS: dict[str, Any] = {"client_keys_file": "keys.yaml"}
WITHOUT_FLOW_CONTROL = "needs --flow-control"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kubernetes_config": "f"}, "--kubernetes-config f: needs --kubernetes-pool"),
        (PODS | {"resolve_interval": 5.0}, "--resolve-interval 5.0: needs --endpoints or"),
        (HTTP | {"upstream_ca_file": "ca"}, "--upstream-ca-file ca: needs https:// in --endpoints"),
        (HTTP | {"upstream_cert_file": "c"}, "--upstream-cert-file c: needs https://"),
        (PODS | {"upstream_server_name": "n"}, "--upstream-server-name n: needs https://"),
        (HTTPS | {"upstream_key_file": "k"}, "--upstream-key-file k: needs --upstream-cert-file"),
        (
            HTTP | {"unknown_models": "refuse", "models_interval": 0.0},
            "--unknown-models refuse: needs --models-interval above 0",
        ),
        ({"kv_events_ranks": 2}, "--kv-events-ranks 2: needs --kv-events"),
        ({"budget_store": "redis://u:secret@h"}, r"--budget-store \*\*\*: needs --client-keys-file"),
        ({"budget_state_file": "f"}, "--budget-state-file f: needs --client-keys-file"),
        (
            KEYS | {"budget_state_file": "f", "budget_store": "redis://h"},
            "--budget-state-file f: --budget-store keeps them elsewhere",
        ),
        (KEYS | {"budget_store_timeout": 1.0}, "--budget-store-timeout 1.0: needs --budget-store URL"),
        (KEYS | {"budget_store_outage": "refuse"}, "--budget-store-outage refuse: needs --budget-store URL"),
        ({"max_requests_per_endpoint": 3}, f"--max-requests-per-endpoint 3: {WITHOUT_FLOW_CONTROL}"),
        ({"max_queued_requests": 3}, f"--max-queued-requests 3: {WITHOUT_FLOW_CONTROL}"),
        ({"queue_timeout": 3.0}, f"--queue-timeout 3.0: {WITHOUT_FLOW_CONTROL}"),
        ({"fairness_header": "x-team"}, f"--fairness-header x-team: {WITHOUT_FLOW_CONTROL}"),
        ({"access_log": "none", "access_log_file": "f"}, "--access-log-file f: needs --access-log errors"),
        ({"access_log": "none", "log_content": True}, "--log-content: needs --access-log errors"),
        ({"ext_proc_host": "h"}, "--ext-proc-host h: needs --ext-proc-port"),
        # Those that serve has as well.
        ({"otlp_sampling_ratio": 0.5}, "--otlp-sampling-ratio 0.5: needs --otlp-endpoint"),
        ({"otlp_service_name": "n"}, "--otlp-service-name n: needs --otlp-endpoint"),
        ({"ssl_keyfile": "k"}, "--ssl-keyfile k: needs --ssl-certfile"),
    ],
)
def test_an_option_without_effect_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{problem}"):
        GatewayConfig(**options)


@pytest.mark.parametrize(
    "options",
    [
        HTTPS | {"upstream_ca_file": "ca", "upstream_cert_file": "c", "upstream_key_file": "k"},
        {"endpoints_file": "e", "upstream_server_name": "n", "resolve_interval": 5.0},
        KEYS | {"budget_store": "redis://h", "budget_store_timeout": 1.0, "budget_store_outage": "refuse"},
        {"flow_control": True, "queue_timeout": 3.0, "fairness_header": "x-team"},
        {"otlp_endpoint": "http://c:4318", "otlp_sampling_ratio": 0.5},
    ],
)
def test_what_goes_together(options: dict[str, Any]) -> None:
    GatewayConfig(**options)


def test_a_secret_is_not_shown() -> None:
    with pytest.raises(ConfigError) as problem:
        resolve(GatewayConfig, {"budget_store": "redis://u:p?password=secret"}, {})
    assert "--budget-store" in str(problem.value)
    assert "secret" not in str(problem.value)
