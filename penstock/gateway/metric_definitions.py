"""Definitions of the gateway's metrics: one row for each metric, with its name in each naming scheme.

A naming scheme is a set of metric names and labels that dashboards and autoscalers use. Besides our own there
are those of endpoint pickers that the gateway can replace:

- ``llm-d``: the picker of the llm-d Router, ``docs/metrics.md`` and ``pkg/epp/metrics`` of its release 0.10.
- ``gie``: the picker of the Gateway API Inference Extension, ``pkg/epp/metrics`` of its repository at commit
  382cda8d4597, before the picker moved to the llm-d Router.

``otel`` has OpenTelemetry's histograms, which are exported, and not part of ``/metrics``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import Literal, NamedTuple

from penstock.metrics.bounds import E2E_BOUNDS, ITL_BOUNDS, TOKEN_BOUNDS, TTFT_BOUNDS
from penstock.metrics.families import MetricFamily, MetricKind
from penstock.telemetry.gen_ai_metrics import (
    REQUEST_DURATION,
    TIME_PER_OUTPUT_TOKEN,
    TIME_TO_FIRST_TOKEN,
    TOKEN_USAGE,
    GenAiHistogram,
)

NamingScheme = Literal["own", "llm-d", "gie", "otel"]


class Figure(NamedTuple):
    """A value of a counter or gauge."""

    metric: Metric
    value: float
    labels: dict[str, str] = {}  # noqa: RUF012 - nobody changes it


@dataclass(frozen=True, slots=True)
class MetricName:
    """A family's name (without the ``_total`` of a counter), its labels, and a histogram's bucket bounds."""

    name: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


@dataclass(slots=True, eq=False)
class Metric:
    """One metric in all naming schemes. Compared by identity."""

    kind: MetricKind
    unit: str
    help: str
    own: InitVar[MetricName]
    llm_d: InitVar[MetricName | None] = None
    gie: InitVar[MetricName | None] = None
    otel: InitVar[GenAiHistogram | None] = None
    of_host: bool = False
    """For gauges: every worker of the gateway knows the same value. Other gauges, counters and histograms are
    added up over the workers."""
    exported: GenAiHistogram | None = field(init=False)
    names: Mapping[NamingScheme, MetricName] = field(init=False)
    """Names by naming scheme; a naming scheme without this metric is missing."""
    bounds: tuple[float, ...] = field(init=False)
    """Bucket bounds of all naming schemes, so that one histogram has the buckets of each of them."""

    def __post_init__(
        self,
        own: MetricName,
        llm_d: MetricName | None,
        gie: MetricName | None,
        otel: GenAiHistogram | None,
    ) -> None:
        names: dict[NamingScheme, MetricName | None] = {"own": own, "llm-d": llm_d, "gie": gie}
        names["otel"] = None if otel is None else MetricName(otel.name, _OTEL, otel.bounds)
        self.exported = otel
        self.names = {scheme: name for scheme, name in names.items() if name is not None}
        self.bounds = tuple(sorted({bound for name in self.names.values() for bound in name.bounds}))

    def family(self, scheme: NamingScheme) -> MetricFamily | None:
        name = self.names.get(scheme)
        if name is None:
            return None
        return MetricFamily(name.name, self.kind, self.help, name.labels, self.unit, name.bounds)

    def first_buckets(self, scheme: NamingScheme) -> list[int]:
        """Index of the histogram's bucket that each bucket of a naming scheme starts with."""
        return [0, *(bisect_right(self.bounds, bound) for bound in self.names[scheme].bounds)]


LABEL_ALIASES = {
    "model_name": "model",
    "target_model_name": "target_model",
    "name": "pool",
    "model_server_pod": "endpoint",
    "model_server_endpoint": "endpoint",
    "inference_pool": "pool",
}
"""Labels of other naming schemes, and ours of the same meaning; missing labels have the same name."""

CONSTANT_LABELS = {"fairness_id": "default-flow", "streaming": "true"}
"""Labels with one value in the gateway: flows have no series, for clients can invent them, and only streams
have a time to first token."""

_OWN = ("model", "target_model", "api", "outcome", "pool")
_OTEL = ("model", "target_model", "api", "outcome")
_GIE = ("model_name", "target_model_name")
_LLM_D = ("model_name", "target_model_name", "fairness_id", "priority")
_POOL = ("name",)
_ENDPOINT = ("endpoint", "pool")


def _own(name: str, bounds: tuple[float, ...] = (), labels: tuple[str, ...] = _OWN) -> MetricName:
    return MetricName("penstock_gateway_" + name, labels, bounds)


def _llm_d(name: str, bounds: tuple[float, ...] = (), labels: tuple[str, ...] = _LLM_D) -> MetricName:
    return MetricName("llm_d_epp_" + name, labels, bounds)


def _gie(name: str, bounds: tuple[float, ...] = (), labels: tuple[str, ...] = _GIE) -> MetricName:
    return MetricName("inference_" + name, labels, bounds)


# Bucket bounds of the pickers' metrics.
_EPP_DURATION_BOUNDS = (
    *(0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0),
    *(8.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0),
    *(600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0),
)
_EPP_TPOT_BOUNDS = (
    *(0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.6, 0.8, 1.0),
)
_EPP_NTPOT_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_EPP_ITL_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0)
_PICK_BOUNDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_EPP_REQUEST_BYTES = tuple(float(1 << power) for power in range(6, 31))
_EPP_RESPONSE_BYTES = tuple(float(1 << power) for power in (0, *range(3, 17)))
_EPP_TOKENS = tuple(float(1 << power) for power in (0, *range(3, 21)))
_GIE_RESPONSE_BYTES, _GIE_TOKENS = (
    tuple(32778.0 if bound == 32768.0 else bound for bound in bounds)
    for bounds in (_EPP_RESPONSE_BYTES, _EPP_TOKENS)
)
"""The original metrics have 32778 in place of 32768."""
_QUEUE_BOUNDS = (
    *(0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
_SIZE_BOUNDS = tuple(float(1 << power) for power in range(6, 31, 2))

# -- requests

REQUESTS = Metric(
    MetricKind.COUNTER,
    "requests",
    "Requests that ended.",
    _own("request"),
    _llm_d("request"),
    _gie("objective_request"),
)
ERRORS = Metric(
    MetricKind.COUNTER,
    "requests",
    "Requests that ended otherwise than ok, with the status that the client got; 0: none.",
    _own("request_error", labels=(*_OWN, "status")),
    _llm_d("request_error", labels=(*_LLM_D, "error_code")),
    _gie("objective_request_error", labels=(*_GIE, "error_code")),
)
RUNNING = Metric(
    MetricKind.GAUGE,
    "requests",
    "Requests that have not ended.",
    _own("requests_in_flight", labels=("model", "target_model")),
    _llm_d("request_running"),
    _gie("objective_running_requests", labels=("model_name",)),
)
REJECTIONS = Metric(
    MetricKind.COUNTER,
    "requests",
    "Requests the gateway refused itself.",
    _own("rejection", labels=("reason",)),
)
KEY_REQUESTS = Metric(
    MetricKind.COUNTER,
    "requests",
    "Requests that ended, by the name of their key in --client-keys-file.",
    _own("key_request", labels=("key", "outcome")),
)
KEY_TOKENS = Metric(
    MetricKind.COUNTER,
    "tokens",
    "Tokens of ended requests by the name of their key: input, output, cached, reasoning.",
    _own("key_tokens", labels=("key", "kind")),
)
KEY_COST = Metric(
    MetricKind.COUNTER,
    "units of the currency",
    "Cost of ended requests by the name of their key and its team, at the prices of the endpoints file.",
    _own("key_cost", labels=("key", "team", "currency")),
)
RETRIES = Metric(
    MetricKind.COUNTER,
    "requests",
    "Requests sent again: to another endpoint, or to the same one if an idle connection was closed.",
    _own("retry", labels=()),
)

FALLBACKS = Metric(
    MetricKind.COUNTER,
    "requests",
    "Requests that another model or pool got, as no endpoint of their own was ready, all refused, or all had "
    "a queue (overflow).",
    _own("fallback", labels=("model", "target_model")),
)
SHADOWS = Metric(
    MetricKind.COUNTER,
    "requests",
    "Copies of requests (--model-shadow), with their outcome; skipped: not sent.",
    _own("shadow_request", labels=("shadow", "outcome")),
)

SPANS = Metric(
    MetricKind.COUNTER,
    "spans",
    "Spans of requests: exported, failed (the collector did not take them), dropped (too many waited).",
    _own("spans", labels=("state",)),
)

# -- flow control

QUEUED = Metric(
    MetricKind.GAUGE,
    "requests",
    "Requests that wait in the gateway for a place at an endpoint (--flow-control).",
    _own("queued_requests", labels=("priority",)),
    _llm_d("flow_control_queue_size", labels=("fairness_id", "priority", "inference_pool")),
    _gie("extension_flow_control_queue_size", labels=("fairness_id", "priority", "inference_pool")),
)
QUEUED_BYTES = Metric(
    MetricKind.GAUGE,
    "bytes",
    "Size of the bodies of requests that wait.",
    _own("queued_bytes", labels=("priority",)),
    _llm_d("flow_control_queue_bytes", labels=("fairness_id", "priority", "inference_pool")),
    _gie("extension_flow_control_queue_bytes", labels=("fairness_id", "priority", "inference_pool")),
)
QUEUE_DURATION = Metric(
    MetricKind.HISTOGRAM,
    "seconds",
    "How long requests waited in the gateway, of those that had to.",
    _own("queue_duration_seconds", _QUEUE_BOUNDS),
    _llm_d("flow_control_request_queue_duration_seconds", _QUEUE_BOUNDS),
    _gie(
        "extension_flow_control_request_queue_duration_seconds",
        _QUEUE_BOUNDS,
        labels=("fairness_id", "priority", *_GIE),
    ),
)

# -- latencies

DURATION = Metric(
    MetricKind.HISTOGRAM,
    "seconds",
    "From the request to its end.",
    _own("request_duration_seconds", E2E_BOUNDS),
    _llm_d("request_duration_seconds", _EPP_DURATION_BOUNDS),
    _gie("objective_request_duration_seconds", _EPP_DURATION_BOUNDS),
    REQUEST_DURATION,
)
PICK = Metric(
    MetricKind.HISTOGRAM,
    "seconds",
    "What picking endpoints for a request took.",
    _own("pick_duration_seconds", _PICK_BOUNDS, labels=()),
    _llm_d("scheduler_e2e_duration_seconds", _PICK_BOUNDS, labels=()),
    _gie("extension_scheduler_e2e_duration_seconds", _PICK_BOUNDS, labels=()),
)
TTFT = Metric(
    MetricKind.HISTOGRAM,
    "seconds",
    "From the request to its first event with tokens.",
    _own("time_to_first_token_seconds", TTFT_BOUNDS),
    _llm_d("request_ttft_seconds", _EPP_DURATION_BOUNDS[:24], labels=(*_LLM_D, "streaming")),
    _gie("objective_request_ttft_seconds", _EPP_DURATION_BOUNDS),
    TIME_TO_FIRST_TOKEN,
)
TPOT = Metric(
    MetricKind.HISTOGRAM,
    "seconds",
    "Mean between a reply's first and last token.",
    _own("time_per_output_token_seconds", ITL_BOUNDS),
    _llm_d("request_streaming_tpot_seconds", (*_EPP_TPOT_BOUNDS, 2.0)),
    _gie(
        "objective_request_tpot_seconds",
        (
            *(*_EPP_TPOT_BOUNDS, 1.5, 2.0, 3.0, 4.5, 6.0, 12.0, 18.0, 24.0, 30.0),
            *(36.0, 48.0, 60.0, 90.0, 120.0, 180.0, 270.0, 360.0),
        ),
    ),
    TIME_PER_OUTPUT_TOKEN,
)
NTPOT = Metric(
    MetricKind.HISTOGRAM,
    "seconds",
    "Duration of a request by its output tokens.",
    _own("normalized_time_per_output_token_seconds", ITL_BOUNDS),
    _llm_d("request_ntpot_seconds", _EPP_NTPOT_BOUNDS),
    _gie("objective_normalized_time_per_output_token_seconds", _EPP_NTPOT_BOUNDS),
)
ITL = Metric(
    MetricKind.HISTOGRAM,
    "seconds",
    "Between a stream's events with tokens.",
    _own("inter_token_latency_seconds", (0.001, 0.0025, 0.005, *ITL_BOUNDS)),
    _llm_d("request_streaming_itl_seconds", _EPP_ITL_BOUNDS),
)

# -- sizes

REQUEST_SIZE = Metric(
    MetricKind.HISTOGRAM,
    "bytes",
    "Size of request bodies.",
    _own("request_size_bytes", _SIZE_BOUNDS),
    _llm_d("request_size_bytes", _EPP_REQUEST_BYTES),
    _gie("objective_request_sizes", _EPP_REQUEST_BYTES),
)
RESPONSE_SIZE = Metric(
    MetricKind.HISTOGRAM,
    "bytes",
    "Size of the bodies that clients were sent.",
    _own("response_size_bytes", _SIZE_BOUNDS),
    _llm_d("response_size_bytes", _EPP_RESPONSE_BYTES),
    _gie("objective_response_sizes", _GIE_RESPONSE_BYTES),
)
TOKENS = Metric(
    MetricKind.COUNTER,
    "tokens",
    "Tokens of ended requests: input, output, and of these cached and reasoning; source: the server's usage, "
    "or counted events.",
    _own("tokens", labels=("model", "target_model", "api", "kind", "source")),
)
COST = Metric(
    MetricKind.COUNTER,
    "units of the currency",
    "Cost of ended requests, at the prices of the endpoints file.",
    _own("cost", labels=("model", "target_model", "pool", "currency")),
)
INPUT_TOKENS = Metric(
    MetricKind.HISTOGRAM,
    "tokens",
    "Prompt tokens of a request, as the model server says.",
    _own("request_input_tokens", TOKEN_BOUNDS),
    _llm_d("request_input_tokens", _EPP_TOKENS),
    _gie("objective_input_tokens", _GIE_TOKENS),
    TOKEN_USAGE,
)
OUTPUT_TOKENS = Metric(
    MetricKind.HISTOGRAM,
    "tokens",
    "Tokens of a reply, as the model server says; else its events with tokens.",
    _own("request_output_tokens", TOKEN_BOUNDS),
    _llm_d("request_output_tokens", _EPP_TOKENS[:12]),
    _gie("objective_output_tokens", _EPP_TOKENS[:12]),
    TOKEN_USAGE,
)
CACHED_TOKENS = Metric(
    MetricKind.HISTOGRAM,
    "tokens",
    "Prompt tokens of a request that were in the model server's cache, as it says.",
    _own("request_cached_tokens", TOKEN_BOUNDS),
    _llm_d("request_cached_tokens", _EPP_TOKENS),
    _gie("objective_prompt_cached_tokens", _GIE_TOKENS),
)

BILLING_RECORDS = Metric(
    MetricKind.COUNTER,
    "requests",
    "Requests by what became of their line of --billing-file: recorded, or lost, as the journal had no room.",
    _own("billing_records", labels=("state",)),
)
BILLING_WAITING = Metric(
    MetricKind.GAUGE,
    "requests",
    "Ended requests whose line is not in --billing-file yet. If they become more, it cannot be written.",
    _own("billing_waiting", labels=()),
)

# -- the pool

MODEL_ENDPOINTS = Metric(
    MetricKind.GAUGE,
    "endpoints",
    "Endpoints of the pool that serve the model; model *: those that list none.",
    _own("model_endpoints", labels=("model", "pool")),
    of_host=True,
)
MODEL_READY = Metric(
    MetricKind.GAUGE,
    "endpoints",
    "Those of them that are up.",
    _own("model_ready_endpoints", labels=("model", "pool")),
    of_host=True,
)
MODEL_RUNNING = Metric(
    MetricKind.GAUGE,
    "requests",
    "Requests that have not ended, by the model that endpoints get; other: of a model that none lists.",
    _own("model_requests_in_flight", labels=("model",)),
)
MODEL_QUEUED = Metric(
    MetricKind.GAUGE,
    "requests",
    "Those of them that wait in the gateway.",
    _own("model_queued_requests", labels=("model",)),
)
READY = Metric(
    MetricKind.GAUGE,
    "endpoints",
    "Endpoints that are up.",
    _own("ready_endpoints", labels=("pool",)),
    _llm_d("ready_endpoints", labels=_POOL),
    _gie("pool_ready_pods", labels=_POOL),
    of_host=True,
)
AVERAGE_KV_USED = Metric(
    MetricKind.GAUGE,
    "share, 0 to 1",
    "Mean share of the KV cache in use, over the endpoints that are up.",
    _own("average_kv_used", labels=("pool",)),
    _llm_d("average_kv_cache_utilization", labels=_POOL),
    _gie("pool_average_kv_cache_utilization", labels=_POOL),
    of_host=True,
)
AVERAGE_WAITING = Metric(
    MetricKind.GAUGE,
    "requests",
    "Mean of the requests waiting at the endpoints that are up.",
    _own("average_waiting", labels=("pool",)),
    _llm_d("average_queue_size", labels=_POOL),
    _gie("pool_average_queue_size", labels=_POOL),
    of_host=True,
)
AVERAGE_RUNNING = Metric(
    MetricKind.GAUGE,
    "requests",
    "Mean of the requests running at the endpoints that are up.",
    _own("average_running", labels=("pool",)),
    _llm_d("average_running_requests", labels=_POOL),
    of_host=True,
)

# -- Kubernetes

KUBERNETES_AGE = Metric(
    MetricKind.GAUGE,
    "seconds",
    "Time since the API server last told of the pods, normally up to a minute; infinite: never.",
    _own("kubernetes_age_seconds", labels=()),
    of_host=True,
)
KUBERNETES_FAILURES = Metric(
    MetricKind.COUNTER,
    "requests",
    "Requests that the Kubernetes API server refused or did not answer.",
    _own("kubernetes_request_failures", labels=()),
)

WEBSOCKETS = Metric(
    MetricKind.GAUGE, "connections", "Open WebSockets of clients.", _own("websockets", labels=())
)

# -- endpoints

ENDPOINT_IN_FLIGHT = Metric(
    MetricKind.GAUGE,
    "requests",
    "Requests sent to the endpoint that have not ended.",
    _own("endpoint_in_flight", labels=_ENDPOINT),
)
ENDPOINT_WAITING = Metric(
    MetricKind.GAUGE,
    "requests",
    "Requests waiting at the endpoint, as it says.",
    _own("endpoint_waiting", labels=_ENDPOINT),
    _llm_d("per_endpoint_queue_size", labels=("name", "model_server_endpoint")),
    _gie("pool_per_pod_queue_size", labels=("name", "model_server_pod")),
    of_host=True,
)
ENDPOINT_RUNNING = Metric(
    MetricKind.GAUGE,
    "requests",
    "Requests running at the endpoint, as it says.",
    _own("endpoint_running", labels=_ENDPOINT),
    of_host=True,
)
ENDPOINT_KV_USED = Metric(
    MetricKind.GAUGE,
    "share, 0 to 1",
    "Share of the endpoint's KV cache in use.",
    _own("endpoint_kv_used", labels=_ENDPOINT),
    of_host=True,
)
ENDPOINT_UP = Metric(
    MetricKind.GAUGE,
    "0 or 1",
    "1 unless the endpoint fails requests or cannot be read.",
    _own("endpoint_up", labels=_ENDPOINT),
    of_host=True,
)
ENDPOINT_DRAINED = Metric(
    MetricKind.GAUGE,
    "0 or 1",
    "1 for an endpoint that an administrator has drained.",
    _own("endpoint_drained", labels=_ENDPOINT),
    of_host=True,
)
ENDPOINT_HELD = Metric(
    MetricKind.GAUGE,
    "0 or 1",
    "1 for an endpoint that gets no requests before it has got the control calls that it missed, by reason.",
    _own("endpoint_held", labels=("endpoint", "reason")),
    of_host=True,
)

# -- prefix caches of endpoints --

KV_EVENT_BATCHES = Metric(
    MetricKind.COUNTER,
    "batches",
    "Batches of KV cache events of endpoints, by state: applied or malformed.",
    _own("kv_event_batches", labels=("state",)),
)
KV_EVENT_RESETS = Metric(
    MetricKind.COUNTER,
    "times",
    "Times that the blocks of an endpoint were forgotten: it connected or restarted, or events were lost.",
    _own("kv_event_resets", labels=()),
)
KV_EVENT_BLOCKS = Metric(
    MetricKind.GAUGE,
    "blocks",
    "Blocks in the KV caches of endpoints, by their events.",
    _own("kv_event_blocks", labels=()),
    of_host=True,
)
CACHED_PROMPTS = Metric(
    MetricKind.COUNTER,
    "prompts",
    "Prompts looked up in the KV caches of endpoints, by result: found, absent, or untokenized.",
    _own("cached_prompts", labels=("result",)),
)

PREFILLS = Metric(
    MetricKind.COUNTER,
    "prompts",
    "Prompts computed by endpoints that only prefill: handed_on, shared (found in a store), failed.",
    _own("prefill", labels=("result",)),
)

METRICS = tuple(each for each in tuple(globals().values()) if isinstance(each, Metric))
"""In the order of this file."""
