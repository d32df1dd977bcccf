"""What an API server counts."""

from __future__ import annotations

from penstock.metrics import families
from penstock.metrics.api_server_metrics import ApiServerMetrics
from penstock.metrics.ended_requests import RequestKind


def test_requests_are_told_apart_by_outcome_and_by_api() -> None:
    metrics = ApiServerMetrics()
    for api, outcome in [("chat", "stop"), ("chat", "length"), ("responses", "stop"), ("messages", "stop")]:
        metrics.ended.add(RequestKind(api, outcome, "m"), 0.31)
    found = {(each.family, each.labels): each.value for each in metrics.series("0", "m")}
    assert found[families.REQUESTS.name, ("0", "stop")] == 3
    assert found[families.REQUESTS.name, ("0", "length")] == 1
    by_api = {
        labels[1:]: value for (name, labels), value in found.items() if name == families.API_REQUESTS.name
    }
    assert by_api == {
        ("chat", "stop"): 1,
        ("chat", "length"): 1,
        ("responses", "stop"): 1,
        ("messages", "stop"): 1,
    }
