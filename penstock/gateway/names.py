"""What the gateway measures, and what it is called: one row for each measure, one name for each dialect.

A dialect is a set of names and labels that dashboards and autoscalers know. Beside our own there are those of
the endpoint pickers whose place the gateway may take:

- ``llm-d``: the picker of the llm-d Router, its ``docs/metrics.md`` of September 2026 (release 0.10).
- ``gie``: the picker of the Gateway API Inference Extension, its ``pkg/epp/metrics`` before the picker moved
  to the llm-d Router (April 2026).
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..metrics.bounds import E2E_BOUNDS, ITL_BOUNDS, TOKEN_BOUNDS, TTFT_BOUNDS
from ..metrics.families import Family, Kind

Dialect = Literal["own", "llm-d", "gie"]


@dataclass(frozen=True, slots=True)
class Name:
    """A family's name (without the ``_total`` of a counter), its labels, and a histogram's bucket bounds."""

    name: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


@dataclass(slots=True, eq=False)
class Measure:
    """Something measured. Compared by identity."""

    kind: Kind
    unit: str
    help: str
    names: Mapping[Dialect, Name]
    """A dialect that is missing has no such metric."""
    bounds: tuple[float, ...] = field(init=False)
    """Of a histogram: all dialects' bounds, so that one histogram has the buckets of each of them."""

    def __post_init__(self) -> None:
        self.bounds = tuple(sorted({bound for name in self.names.values() for bound in name.bounds}))

    def family(self, dialect: Dialect) -> Family | None:
        name = self.names.get(dialect)
        if name is None:
            return None
        return Family(name.name, self.kind, self.help, name.labels, self.unit, name.bounds)

    def first_buckets(self, dialect: Dialect) -> list[int]:
        """Which of the histogram's buckets each bucket of a dialect begins with."""
        return [0, *(bisect_right(self.bounds, bound) for bound in self.names[dialect].bounds)]


SAME_LABEL = {
    "model_name": "model",
    "target_model_name": "target_model",
    "name": "pool",
    "model_server_pod": "endpoint",
    "model_server_endpoint": "endpoint",
}
"""Other dialects' labels and ours of the same meaning; those that are missing are called alike."""

CONSTANT_LABELS = {"fairness_id": "default-flow", "streaming": "true"}
"""Labels of which the gateway has one value: it has no flows, and only streams have a time to first token."""

_OWN = ("model", "target_model", "outcome")
_GIE = ("model_name", "target_model_name")
_LLM_D = ("model_name", "target_model_name", "fairness_id", "priority")

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
_SIZE_BOUNDS = tuple(float(1 << power) for power in range(6, 31, 2))

# -- requests

REQUESTS = Measure(
    Kind.COUNTER,
    "requests",
    "Requests that ended.",
    {
        "own": Name("penstock_gateway_request", _OWN),
        "llm-d": Name("llm_d_epp_request", _LLM_D),
        "gie": Name("inference_objective_request", _GIE),
    },
)
ERRORS = Measure(
    Kind.COUNTER,
    "requests",
    "Requests that ended otherwise than ok, with the status that the client got; 0: none.",
    {
        "own": Name("penstock_gateway_request_error", (*_OWN, "status")),
        "llm-d": Name("llm_d_epp_request_error", (*_LLM_D, "error_code")),
        "gie": Name("inference_objective_request_error", (*_GIE, "error_code")),
    },
)
RUNNING = Measure(
    Kind.GAUGE,
    "requests",
    "Requests that have not ended.",
    {
        "own": Name("penstock_gateway_requests_in_flight", ("model", "target_model")),
        "llm-d": Name("llm_d_epp_request_running", _LLM_D),
        "gie": Name("inference_objective_running_requests", ("model_name",)),
    },
)
REJECTIONS = Measure(
    Kind.COUNTER,
    "requests",
    "Requests the gateway refused itself.",
    {"own": Name("penstock_gateway_rejection", ("reason",))},
)
RETRIES = Measure(
    Kind.COUNTER,
    "requests",
    "Requests sent again to another endpoint.",
    {"own": Name("penstock_gateway_retry")},
)

SPANS = Measure(
    Kind.COUNTER,
    "spans",
    "Spans of requests: exported, failed (the collector did not take them), dropped (too many waited).",
    {"own": Name("penstock_gateway_spans", ("state",))},
)

# -- latencies

DURATION = Measure(
    Kind.HISTOGRAM,
    "seconds",
    "From the request to its end.",
    {
        "own": Name("penstock_gateway_request_duration_seconds", _OWN, E2E_BOUNDS),
        "llm-d": Name("llm_d_epp_request_duration_seconds", _LLM_D, _EPP_DURATION_BOUNDS),
        "gie": Name("inference_objective_request_duration_seconds", _GIE, _EPP_DURATION_BOUNDS),
    },
)
PICK = Measure(
    Kind.HISTOGRAM,
    "seconds",
    "What picking endpoints for a request took.",
    {
        "own": Name("penstock_gateway_pick_duration_seconds", (), _PICK_BOUNDS),
        "llm-d": Name("llm_d_epp_scheduler_e2e_duration_seconds", (), _PICK_BOUNDS),
        "gie": Name("inference_extension_scheduler_e2e_duration_seconds", (), _PICK_BOUNDS),
    },
)
TTFT = Measure(
    Kind.HISTOGRAM,
    "seconds",
    "From the request to its first event with tokens.",
    {
        "own": Name("penstock_gateway_time_to_first_token_seconds", _OWN, TTFT_BOUNDS),
        "llm-d": Name("llm_d_epp_request_ttft_seconds", (*_LLM_D, "streaming"), _EPP_DURATION_BOUNDS[:24]),
        "gie": Name("inference_objective_request_ttft_seconds", _GIE, _EPP_DURATION_BOUNDS),
    },
)
TPOT = Measure(
    Kind.HISTOGRAM,
    "seconds",
    "Mean between a reply's first and last token.",
    {
        "own": Name("penstock_gateway_time_per_output_token_seconds", _OWN, ITL_BOUNDS),
        "llm-d": Name("llm_d_epp_request_streaming_tpot_seconds", _LLM_D, (*_EPP_TPOT_BOUNDS, 2.0)),
        "gie": Name(
            "inference_objective_request_tpot_seconds",
            _GIE,
            (
                *(*_EPP_TPOT_BOUNDS, 1.5, 2.0, 3.0, 4.5, 6.0, 12.0, 18.0, 24.0, 30.0),
                *(36.0, 48.0, 60.0, 90.0, 120.0, 180.0, 270.0, 360.0),
            ),
        ),
    },
)
NTPOT = Measure(
    Kind.HISTOGRAM,
    "seconds",
    "Duration of a request by its output tokens.",
    {
        "own": Name("penstock_gateway_normalized_time_per_output_token_seconds", _OWN, ITL_BOUNDS),
        "llm-d": Name("llm_d_epp_request_ntpot_seconds", _LLM_D, _EPP_NTPOT_BOUNDS),
        "gie": Name("inference_objective_normalized_time_per_output_token_seconds", _GIE, _EPP_NTPOT_BOUNDS),
    },
)
ITL = Measure(
    Kind.HISTOGRAM,
    "seconds",
    "Between a stream's events with tokens.",
    {
        "own": Name(
            "penstock_gateway_inter_token_latency_seconds", _OWN, (0.001, 0.0025, 0.005, *ITL_BOUNDS)
        ),
        "llm-d": Name("llm_d_epp_request_streaming_itl_seconds", _LLM_D, _EPP_ITL_BOUNDS),
    },
)

# -- sizes

REQUEST_SIZE = Measure(
    Kind.HISTOGRAM,
    "bytes",
    "Size of request bodies.",
    {
        "own": Name("penstock_gateway_request_size_bytes", _OWN, _SIZE_BOUNDS),
        "llm-d": Name("llm_d_epp_request_size_bytes", _LLM_D, _EPP_REQUEST_BYTES),
        "gie": Name("inference_objective_request_sizes", _GIE, _EPP_REQUEST_BYTES),
    },
)
RESPONSE_SIZE = Measure(
    Kind.HISTOGRAM,
    "bytes",
    "Size of the bodies that clients were sent.",
    {
        "own": Name("penstock_gateway_response_size_bytes", _OWN, _SIZE_BOUNDS),
        "llm-d": Name("llm_d_epp_response_size_bytes", _LLM_D, _EPP_RESPONSE_BYTES),
        "gie": Name("inference_objective_response_sizes", _GIE, _EPP_RESPONSE_BYTES),
    },
)
TOKENS = Measure(
    Kind.COUNTER,
    "tokens",
    "Tokens of ended requests: input, output, cached; source: the server's usage, or counted events.",
    {"own": Name("penstock_gateway_tokens", ("model", "target_model", "kind", "source"))},
)
INPUT_TOKENS = Measure(
    Kind.HISTOGRAM,
    "tokens",
    "Prompt tokens of a request, as the model server says.",
    {
        "own": Name("penstock_gateway_request_input_tokens", _OWN, TOKEN_BOUNDS),
        "llm-d": Name("llm_d_epp_request_input_tokens", _LLM_D, _EPP_TOKENS),
        "gie": Name("inference_objective_input_tokens", _GIE, _EPP_TOKENS),
    },
)
OUTPUT_TOKENS = Measure(
    Kind.HISTOGRAM,
    "tokens",
    "Tokens of a reply, as the model server says; else its events with tokens.",
    {
        "own": Name("penstock_gateway_request_output_tokens", _OWN, TOKEN_BOUNDS),
        "llm-d": Name("llm_d_epp_request_output_tokens", _LLM_D, _EPP_TOKENS[:12]),
        "gie": Name("inference_objective_output_tokens", _GIE, _EPP_TOKENS[:12]),
    },
)
CACHED_TOKENS = Measure(
    Kind.HISTOGRAM,
    "tokens",
    "Prompt tokens of a request that were in the model server's cache, as it says.",
    {
        "own": Name("penstock_gateway_request_cached_tokens", _OWN, TOKEN_BOUNDS),
        "llm-d": Name("llm_d_epp_request_cached_tokens", _LLM_D, _EPP_TOKENS),
        "gie": Name("inference_objective_prompt_cached_tokens", _GIE, _EPP_TOKENS),
    },
)

# -- the pool

READY = Measure(
    Kind.GAUGE,
    "endpoints",
    "Endpoints that are up.",
    {
        "own": Name("penstock_gateway_ready_endpoints"),
        "llm-d": Name("llm_d_epp_ready_endpoints", ("name",)),
        "gie": Name("inference_pool_ready_pods", ("name",)),
    },
)
AVERAGE_KV_USED = Measure(
    Kind.GAUGE,
    "share, 0 to 1",
    "Mean share of the KV cache in use, over the endpoints that are up.",
    {
        "own": Name("penstock_gateway_average_kv_used"),
        "llm-d": Name("llm_d_epp_average_kv_cache_utilization", ("name",)),
        "gie": Name("inference_pool_average_kv_cache_utilization", ("name",)),
    },
)
AVERAGE_WAITING = Measure(
    Kind.GAUGE,
    "requests",
    "Mean of the requests waiting at the endpoints that are up.",
    {
        "own": Name("penstock_gateway_average_waiting"),
        "llm-d": Name("llm_d_epp_average_queue_size", ("name",)),
        "gie": Name("inference_pool_average_queue_size", ("name",)),
    },
)
AVERAGE_RUNNING = Measure(
    Kind.GAUGE,
    "requests",
    "Mean of the requests running at the endpoints that are up.",
    {
        "own": Name("penstock_gateway_average_running"),
        "llm-d": Name("llm_d_epp_average_running_requests", ("name",)),
    },
)

# -- endpoints

_ENDPOINT = ("endpoint",)

ENDPOINT_IN_FLIGHT = Measure(
    Kind.GAUGE,
    "requests",
    "Requests sent to the endpoint that have not ended.",
    {"own": Name("penstock_gateway_endpoint_in_flight", _ENDPOINT)},
)
ENDPOINT_WAITING = Measure(
    Kind.GAUGE,
    "requests",
    "Requests waiting at the endpoint, as it says.",
    {
        "own": Name("penstock_gateway_endpoint_waiting", _ENDPOINT),
        "llm-d": Name("llm_d_epp_per_endpoint_queue_size", ("name", "model_server_endpoint")),
        "gie": Name("inference_pool_per_pod_queue_size", ("name", "model_server_pod")),
    },
)
ENDPOINT_RUNNING = Measure(
    Kind.GAUGE,
    "requests",
    "Requests running at the endpoint, as it says.",
    {"own": Name("penstock_gateway_endpoint_running", _ENDPOINT)},
)
ENDPOINT_KV_USED = Measure(
    Kind.GAUGE,
    "share, 0 to 1",
    "Share of the endpoint's KV cache in use.",
    {"own": Name("penstock_gateway_endpoint_kv_used", _ENDPOINT)},
)
ENDPOINT_UP = Measure(
    Kind.GAUGE,
    "0 or 1",
    "1 unless the endpoint fails requests or cannot be read.",
    {"own": Name("penstock_gateway_endpoint_up", _ENDPOINT)},
)

MEASURES = tuple(each for each in tuple(globals().values()) if isinstance(each, Measure))
"""In the order of this file."""
