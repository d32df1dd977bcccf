"""What /metrics says, in our words and in those of other endpoint pickers, and that the page tells of it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
from prometheus_client.parser import text_string_to_metric_families

import penstock
from penstock.gateway import metric_definitions
from penstock.gateway.requests.caller import Caller
from penstock.gateway.responses.outcome import Outcome
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.responses.response_observer import Observation, StreamObserver
from penstock.gateway.responses.token_usage import ReportedUsage
from penstock.gateway.routing.endpoint import Endpoint, EndpointLoad
from penstock.gateway.telemetry.metrics import MAX_LABEL, OTHER, ExpositionLimits, GatewayMetrics
from penstock.metrics.families import MetricKind

PAGE = Path(penstock.__file__).parents[1] / "docs" / "gateway-metrics.md"
OWN_ROW = re.compile(r"^\| `(penstock_gateway_\w+)` \| (\w+) \| ([^|]+) \| ([^|]*) \| (.+) \|$", re.MULTILINE)
Compat = Literal["none", "llm-d", "gie"]


def streamed(*times: float, usage: ReportedUsage | None = None) -> Observation:
    """A stream with an event with tokens at each of ``times``."""
    observer = StreamObserver()
    for time in times:
        observer.feed(b'data: {"choices":[{"text":"x"}]}\n\n', time)
    observer.seen.usage = usage
    return observer.seen


def record(**fields: Any) -> RequestRecord:
    values = {"model": "m", "target_model": "m", "outcome": Outcome.OK, "status": 200, "attempts": 1}
    return RequestRecord("/v1/completions", **{**values, **fields})


def metrics(compat: Compat = "none", **options: Any) -> GatewayMetrics:
    """Of a gateway with an endpoint that waits, runs and is up, and one that is down."""
    up, down = Endpoint("http://a:1"), Endpoint("http://b:1", scrape_failures=2)
    up.scrape_succeeded(EndpointLoad(waiting=3, running=5, kv_used=0.5), 0.0)
    return GatewayMetrics(lambda: [up, down], ExpositionLimits(compat, **options))


def samples(told: GatewayMetrics, name: str, /, **labels: str) -> dict[tuple[str, ...], float]:
    """Of a sample's name, those with ``labels``: the values of the other labels by name, to the value. The
    API and the pool are left out."""
    found = {}
    hidden = {*labels, "api", "pool"}
    for family in text_string_to_metric_families(b"".join(told.exposition()).decode()):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                rest = tuple(value for label, value in sorted(sample.labels.items()) if label not in hidden)
                found[rest] = found.get(rest, 0.0) + sample.value
    return found


def busy(compat: Compat = "none") -> GatewayMetrics:
    """Every family has a value."""
    told = metrics(compat)
    told.sources.append(
        lambda: [
            metric_definitions.Figure(metric_definitions.KV_EVENT_BATCHES, 1, {"state": "applied"}),
            metric_definitions.Figure(metric_definitions.PREFILLS, 1, {"result": "shared"}),
            metric_definitions.Figure(metric_definitions.CACHED_PROMPTS, 1, {"result": "found"}),
            metric_definitions.Figure(metric_definitions.SPANS, 1, {"state": "exported"}),
            metric_definitions.Figure(metric_definitions.SHADOWS, 1, {"shadow": "next", "outcome": "ok"}),
            metric_definitions.Figure(metric_definitions.KUBERNETES_AGE, 2.0),
            metric_definitions.Figure(metric_definitions.BILLING_RECORDS, 1, {"state": "lost"}),
            metric_definitions.Figure(metric_definitions.BILLING_WAITING, 1),
            metric_definitions.Figure(metric_definitions.KUBERNETES_FAILURES, 3),
            metric_definitions.Figure(metric_definitions.QUEUED, 1, {"priority": "0"}),
            metric_definitions.Figure(metric_definitions.MODEL_ENDPOINTS, 2, {"model": "m"}),
            metric_definitions.Figure(metric_definitions.MODEL_READY, 1, {"model": "m"}),
            metric_definitions.Figure(metric_definitions.MODEL_RUNNING, 2, {"model": "m"}),
            metric_definitions.Figure(metric_definitions.MODEL_QUEUED, 1, {"model": "m"}),
            metric_definitions.Figure(metric_definitions.QUEUED_BYTES, 9, {"priority": "0"}),
            metric_definitions.Figure(metric_definitions.ENDPOINT_DRAINED, 1, {"endpoint": "a", "pool": "p"}),
            metric_definitions.Figure(
                metric_definitions.ENDPOINT_HELD, 1, {"endpoint": "a", "reason": "joined"}
            ),
        ]
    )
    told.request_started(record())
    seen = streamed(1.0, 1.2, usage=ReportedUsage(7, 2, 4))
    sizes = {"bytes_in": 100, "bytes_out": 200}
    times = {"ended_at": 2.0, "pick_s": 1e-4, "queued_s": 0.1}
    paid: dict[str, Any] = {"caller": Caller("k", "k"), "cost": 1, "currency": "USD"}
    told.request_ended(record(seen=seen, attempts=2, priority=-7, **paid, **sizes, **times))
    told.request_ended(record(outcome=Outcome.REJECTED, status=429, reason="saturated", attempts=0))
    told.request_ended(record(fell_back=True, outcome=Outcome.NETWORK_ERROR))
    return told


# -- the page


def test_the_page_has_our_names() -> None:
    rows = OWN_ROW.findall(PAGE.read_text())
    table = [
        (name.name, each.kind.value, each.unit, ", ".join(name.labels), each.help)
        for each in metric_definitions.METRICS
        for name in (each.names["own"],)
    ]
    assert rows == table


def test_the_page_has_the_names_of_others() -> None:
    _, table = PAGE.read_text().split("## Names of other endpoint pickers")
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines() if line[:1] == "|"
    ]
    expected = [
        [
            each.names["own"].name.removeprefix("penstock_gateway_"),
            *([llm_d.name, ", ".join(llm_d.labels)] if llm_d else ["", ""]),
            *([gie.name, ", ".join(gie.labels)] if gie else ["", ""]),
        ]
        for each in metric_definitions.METRICS
        for llm_d, gie in ((each.names.get("llm-d"), each.names.get("gie")),)
        if llm_d or gie
    ]
    assert rows[2:] == expected


@pytest.mark.parametrize("compat", ["none", "llm-d", "gie"])
def test_what_is_told_is_what_the_table_says(compat: Compat) -> None:
    dialects: list[metric_definitions.NamingScheme] = ["own"] if compat == "none" else ["own", compat]
    expected = {
        name.name: (each.kind.value, set(name.labels))
        for dialect in dialects
        for each in metric_definitions.METRICS
        if (name := each.names.get(dialect)) is not None
    }
    told = {
        family.name: (family.type, {label for sample in family.samples for label in sample.labels} - {"le"})
        for family in text_string_to_metric_families(b"".join(busy(compat).exposition()).decode())
    }
    assert told == expected


def test_names_are_unique() -> None:
    counts = Counter(
        name.name
        for each in metric_definitions.METRICS
        for scheme, name in each.names.items()
        if scheme != "otel"  # one of its metrics has input and output tokens
    )
    assert set(counts.values()) == {1}


def test_bounds_ascend_and_every_measure_has_our_name() -> None:
    for measure in metric_definitions.METRICS:
        assert "own" in measure.names
        for name in measure.names.values():
            assert bool(name.bounds) == (measure.kind is MetricKind.HISTOGRAM)
            assert list(name.bounds) == sorted(set(name.bounds))


# -- figures


def test_latencies_and_sizes() -> None:
    told = metrics()
    seen = streamed(11.0, 11.25, 12.0, usage=ReportedUsage(7, 5, 4))
    told.request_ended(record(seen=seen, began_at=10.0, ended_at=13.0, bytes_in=100, bytes_out=300))
    for name, total, count in [
        ("request_duration_seconds", 3.0, 1),
        ("time_to_first_token_seconds", 1.0, 1),
        ("time_per_output_token_seconds", 0.25, 1),
        ("normalized_time_per_output_token_seconds", 0.6, 1),
        ("inter_token_latency_seconds", 1.0, 2),
        ("request_size_bytes", 100.0, 1),
        ("response_size_bytes", 300.0, 1),
        ("request_input_tokens", 7.0, 1),
        ("request_output_tokens", 5.0, 1),
        ("request_cached_tokens", 4.0, 1),
    ]:
        assert samples(told, f"penstock_gateway_{name}_sum") == {("m", "ok", "m"): pytest.approx(total)}
        assert samples(told, f"penstock_gateway_{name}_count") == {("m", "ok", "m"): count}
    buckets = samples(
        told, "penstock_gateway_inter_token_latency_seconds_bucket", model="m", target_model="m"
    )
    assert [buckets[bound, "ok"] for bound in ("0.2", "0.3", "0.5", "0.75", "+Inf")] == [0, 1, 1, 2, 2]


def test_picks_are_not_told_apart() -> None:
    told = metrics("gie")
    for seconds in (0.001, 0.003):
        told.request_ended(record(pick_s=seconds))
    told.request_ended(record(outcome=Outcome.CLIENT_DISCONNECT))  # before it was picked for
    assert samples(told, "penstock_gateway_pick_duration_seconds_count") == {(): 2}
    assert samples(told, "inference_extension_scheduler_e2e_duration_seconds_sum") == {(): 0.004}


def test_failures_are_no_survivors_bias() -> None:
    """A request that broke has its latencies in the histograms as well."""
    told = metrics()
    told.request_ended(record())
    told.request_ended(record(outcome=Outcome.NETWORK_ERROR, seen=streamed(1.0, 2.0), ended_at=9.0))
    assert samples(told, "penstock_gateway_request_duration_seconds_sum", outcome="network_error") == {
        ("m", "m"): 9.0
    }
    assert samples(told, "penstock_gateway_time_to_first_token_seconds_count", outcome="network_error") == {
        ("m", "m"): 1
    }


def test_tokens_without_usage_are_events() -> None:
    told = metrics()
    told.request_ended(record(outcome=Outcome.OK_WITHOUT_USAGE, seen=streamed(1.0, 2.0)))
    assert samples(told, "penstock_gateway_tokens_total", kind="output") == {("m", "events", "m"): 2}


def test_tokens_of_a_broken_stream_are_those_that_came() -> None:
    """It began with a usage of one token."""
    told = metrics()
    seen = streamed(1.0, 2.0, 3.0, usage=ReportedUsage(7, 1))
    told.request_ended(record(outcome=Outcome.NETWORK_ERROR, seen=seen))
    tokens = samples(told, "penstock_gateway_tokens_total", model=OTHER, target_model=OTHER)
    assert tokens == {("input", "usage"): 7, ("output", "events"): 3}


def test_apis_are_told_apart() -> None:
    told = metrics()
    paths = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"]
    for path in (*paths, "/v1/messages/count_tokens"):
        each = RequestRecord(path, method="POST", model="m", target_model="m", outcome=Outcome.OK, status=200)
        each.seen = streamed(1.0, usage=ReportedUsage(7, 2))
        told.request_ended(each)
    for api in ("completions", "chat", "responses", "messages", "embeddings", "other"):
        assert samples(told, "penstock_gateway_request_total", api=api) == {("m", "ok", "m"): 1}
        assert samples(told, "penstock_gateway_tokens_total", api=api, kind="input")["m", "usage", "m"] == 7


def test_a_stored_response_is_a_request_but_no_tokens() -> None:
    told = metrics()
    seen = streamed(1.0, 2.0, usage=ReportedUsage(7, 2))
    told.request_ended(RequestRecord("/v1/responses/resp_1", method="GET", outcome=Outcome.OK, seen=seen))
    assert sum(samples(told, "penstock_gateway_request_total", api="other").values()) == 1
    assert samples(told, "penstock_gateway_tokens_total") == {}
    assert samples(told, "penstock_gateway_time_to_first_token_seconds_count") == {}


def test_errors_have_a_status() -> None:
    told = busy()
    assert samples(told, "penstock_gateway_request_error_total", status="429") == {("m", "rejected", "m"): 1}
    assert samples(told, "penstock_gateway_rejection_total") == {("saturated",): 1}
    assert samples(told, "penstock_gateway_retry_total") == {(): 1}


def test_models_that_nobody_serves_have_no_series() -> None:
    told = metrics(most_models=2)
    for number in range(4):
        made_up = record(model=f"x{number}", target_model=f"x{number}", outcome=Outcome.CLIENT_ERROR)
        told.request_started(made_up)
        told.request_ended(made_up)
    for number in range(4):
        told.request_ended(record(model=f"m{number}", target_model=f"m{number}"))
    assert samples(told, "penstock_gateway_request_total", outcome="ok") == {
        ("m0", "m0"): 1,
        ("m1", "m1"): 1,
        (OTHER, OTHER): 2,
    }
    assert samples(told, "penstock_gateway_request_total", outcome="client_error") == {(OTHER, OTHER): 4}


def test_models_that_the_operator_names_always_have_series() -> None:
    told = GatewayMetrics(list, ExpositionLimits(most_models=0))
    told.add_models([("chat", "small")])
    told.request_ended(record(model="chat", target_model="small", outcome=Outcome.NETWORK_ERROR))
    told.request_ended(record(model="chat", target_model="large"))
    assert samples(told, "penstock_gateway_request_total") == {
        ("chat", "network_error", "small"): 1,
        (OTHER, "ok", OTHER): 1,
    }


def test_models_that_endpoints_list_have_series_whatever_names_are_invented() -> None:
    """An endpoint may answer for any name."""
    listed = [f"real-{number}" for number in range(5)]
    told = GatewayMetrics(list, ExpositionLimits(most_models=2), lambda name: name if name in listed else "")
    for number in range(100):
        told.request_ended(record(model=f"invented-{number}", target_model=f"invented-{number}"))
    for name in listed:
        told.request_started(record(model=name, target_model=name))
        told.request_ended(record(model=name, target_model=name))
    told.request_ended(record(model="real-0", target_model="real-0", outcome=Outcome.CLIENT_ERROR))
    found = samples(told, "penstock_gateway_request_total")
    assert found.pop((OTHER, "ok", OTHER)) == 100
    assert found.pop(("real-0", "client_error", "real-0")) == 1
    assert found == {(name, "ok", name): 1 for name in listed}
    running = samples(told, "penstock_gateway_requests_in_flight")
    assert running == {**{(name, name): 1 for name in listed}, (OTHER, OTHER): 0}


def test_labels_are_short() -> None:
    """A client's name, and a server's URL; other names stay others."""
    told = GatewayMetrics(lambda: [Endpoint(f"http://{'e' * 300}:1")])
    for end in "ab":
        told.request_ended(record(model="x" * 200 + end, target_model="y" * 200))
    page = b"".join(told.exposition()).decode()
    values = re.findall(r'="([^"]*)"', page)
    assert max(map(len, values)) == MAX_LABEL
    assert len({value for value in values if value.startswith("xxx")}) == 2


def test_running_requests_are_those_that_have_not_ended() -> None:
    told = metrics()
    told.request_ended(record())
    first, second, unknown = record(), record(), record(model="x", target_model="x")
    for each in (first, second, unknown):
        told.request_started(each)
    name = "penstock_gateway_requests_in_flight"
    assert samples(told, name) == {("m", "m"): 2, (OTHER, OTHER): 1}
    told.release(first)
    told.request_ended(first)
    told.request_ended(second)
    assert samples(told, name) == {("m", "m"): 0, (OTHER, OTHER): 1}
    assert told.running == 1


def test_pools_are_told_apart() -> None:
    endpoints = [Endpoint("http://a:1", pool="a"), Endpoint("http://b:1")]
    told = GatewayMetrics(lambda: endpoints, ExpositionLimits("llm-d", pool="rest"))
    told.set_pools(["a", "empty"])
    told.request_ended(record(pool="a"))
    told.request_ended(record())
    text = b"".join(told.exposition()).decode()
    for name, ready in (("a", 1), ("empty", 0), ("rest", 1)):
        assert f'penstock_gateway_ready_endpoints{{pool="{name}"}} {ready}.0' in text
        assert f'llm_d_epp_ready_endpoints{{name="{name}"}} {ready}.0' in text
    assert samples(told, "penstock_gateway_request_total", pool="a") == {("m", "ok", "m"): 1}
    assert samples(told, "penstock_gateway_request_total", pool="rest") == {("m", "ok", "m"): 1}
    assert samples(told, "penstock_gateway_endpoint_up", pool="a") == {("http://a:1",): 1}


def test_a_load_that_nobody_tells_is_none() -> None:
    """Ollama has no load to read, and that of a server that is down is an old one: neither is idle."""
    busy, silent, gone = (Endpoint(f"http://{name}:1") for name in ("busy", "silent", "gone"))
    for endpoint in (busy, gone):
        endpoint.scrape_succeeded(EndpointLoad(waiting=4, running=8, kv_used=0.5), 0.0)
    silent.scrape_had_no_load()
    gone.scrape_failed(connected=False)
    gone.scrape_failed(connected=False)
    told = GatewayMetrics(lambda: [busy, silent, gone])
    for name, value in (("waiting", 4), ("running", 8), ("kv_used", 0.5)):
        assert samples(told, f"penstock_gateway_endpoint_{name}") == {("http://busy:1",): value}
        assert samples(told, f"penstock_gateway_average_{name}") == {(): value}
    assert samples(told, "penstock_gateway_ready_endpoints") == {(): 2}
    assert len(samples(told, "penstock_gateway_endpoint_in_flight")) == 3
    alone = GatewayMetrics(lambda: [silent])
    assert "penstock_gateway_average_waiting{" not in b"".join(alone.exposition()).decode()


def test_the_pool() -> None:
    told = metrics("llm-d", pool="mine")
    assert samples(told, "penstock_gateway_ready_endpoints") == {(): 1}
    assert samples(told, "penstock_gateway_endpoint_up") == {("http://a:1",): 1, ("http://b:1",): 0}
    assert samples(told, "llm_d_epp_average_kv_cache_utilization", name="mine") == {(): 0.5}
    assert samples(told, "llm_d_epp_average_queue_size", name="mine") == {(): 3}
    assert samples(told, "llm_d_epp_per_endpoint_queue_size", name="mine") == {("http://a:1",): 3}


# -- other dialects


def test_their_buckets_hold_what_ours_do() -> None:
    """0.15 seconds to the first token: above 0.1 in both, below 0.2 in theirs, 0.25 in ours."""
    told = metrics("gie")
    for outcome in (Outcome.OK, Outcome.NETWORK_ERROR):
        told.request_ended(record(seen=streamed(0.15), outcome=outcome))
    ours = samples(told, "penstock_gateway_time_to_first_token_seconds_bucket", outcome="ok")
    theirs = samples(told, "inference_objective_request_ttft_seconds_bucket", model_name="m")
    assert (ours["0.1", "m", "m"], ours["0.25", "m", "m"]) == (0, 1)
    assert (theirs["0.1", "m"], theirs["0.2", "m"], theirs["+Inf", "m"]) == (0, 2, 2)


@pytest.mark.parametrize(
    ("dialect", "measure", "bounds"),
    [
        ("llm-d", metric_definitions.TTFT, [0.005, 0.025, 0.05, 45.0, 60.0, 120.0]),
        ("llm-d", metric_definitions.TPOT, [0.0005, 0.00205, 0.005, 0.8, 1.0, 2.0]),
        ("llm-d", metric_definitions.RESPONSE_SIZE, [1.0, 8.0, 16.0, 16384.0, 32768.0, 65536.0]),
        ("llm-d", metric_definitions.INPUT_TOKENS, [1.0, 8.0, 16.0, 262144.0, 524288.0, 1048576.0]),
        ("gie", metric_definitions.TTFT, [0.005, 0.025, 0.05, 1800.0, 2700.0, 3600.0]),
        ("gie", metric_definitions.TPOT, [0.0005, 0.00205, 0.005, 180.0, 270.0, 360.0]),
        ("gie", metric_definitions.RESPONSE_SIZE, [1.0, 8.0, 16.0, 16384.0, 32778.0, 65536.0]),
        ("gie", metric_definitions.OUTPUT_TOKENS, [1.0, 8.0, 16.0, 2048.0, 4096.0, 8192.0]),
    ],
)
def test_the_ends_of_their_buckets(
    dialect: metric_definitions.NamingScheme, measure: metric_definitions.Metric, bounds: list[float]
) -> None:
    """32778 is what the Inference Extension's code has."""
    told = measure.names[dialect].bounds
    assert [*told[:3], *told[-3:]] == bounds


@pytest.mark.parametrize(
    ("outcome", "status", "code"),
    [
        (Outcome.REJECTED, 429, "ResourceExhausted"),
        (Outcome.REJECTED, 503, "ServiceUnavailable"),
        (Outcome.REJECTED, 400, "BadRequest"),
        (Outcome.REJECTED, 401, "Unauthorized"),
        (Outcome.REJECTED, 500, "Internal"),
        (Outcome.MODEL_SERVER_ERROR, 500, "ModelServerError"),
        (Outcome.CLIENT_ERROR, 404, "ModelServerError"),
        (Outcome.CLIENT_DISCONNECT, 200, "Unknown"),
    ],
)
def test_their_error_codes(outcome: Outcome, status: int, code: str) -> None:
    told = metrics("gie")
    told.request_ended(record(outcome=outcome, status=status))
    assert samples(told, "inference_objective_request_error_total") == {(code, OTHER, OTHER): 1}


def test_their_labels() -> None:
    told = GatewayMetrics(list, ExpositionLimits("llm-d"))
    told.add_models([("chat", "small")])
    told.request_ended(record(model="chat", target_model="small", priority=-9))
    told.request_ended(record(model="chat", target_model="small", priority=0))
    labels = {"model_name": "chat", "target_model_name": "small", "fairness_id": "default-flow"}
    assert samples(told, "llm_d_epp_request_total", **labels) == {("-1",): 1, ("0",): 1}


def test_requests_and_tokens_by_the_name_of_their_key() -> None:
    told = GatewayMetrics(list)
    caller = Caller("search", "search")
    told.request_ended(
        record(caller=caller, seen=streamed(1.0, usage=ReportedUsage(7, 3, 2)), ended_at=2.0, queued_s=0.5)
    )
    told.request_ended(record(caller=caller, outcome=Outcome.REJECTED, status=429, attempts=0))
    told.request_ended(record(caller=Caller("10.0.0.1")))
    assert samples(told, "penstock_gateway_key_request_total") == {
        ("search", "ok"): 1,
        ("search", "rejected"): 1,
    }
    assert samples(told, "penstock_gateway_key_tokens_total", key="search") == {
        ("input",): 7,
        ("cached",): 2,
        ("output",): 3,
    }
    assert samples(told, "penstock_gateway_queue_duration_seconds_sum", outcome="ok") == {("m", "m"): 0.5}
