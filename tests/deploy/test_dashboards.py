"""The Grafana dashboards ask for what servers and gateways expose, and so do the alerts."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import pytest
import yaml

from penstock.gateway.metric_definitions import (
    BILLING_RECORDS,
    BILLING_WAITING,
    KUBERNETES_AGE,
    KUBERNETES_FAILURES,
    QUEUED,
    Figure,
)
from penstock.gateway.requests.caller import Caller
from penstock.gateway.responses.outcome import Outcome
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.responses.response_observer import Observation
from penstock.gateway.responses.token_usage import ReportedUsage
from penstock.gateway.routing.endpoint import Endpoint, EndpointLoad
from penstock.gateway.telemetry.metrics import GatewayMetrics
from penstock.metrics.families import METRIC_FAMILIES, MetricKind
from tests.deploy.tools import DEPLOY, ROOT, run_tool

FOLDER = DEPLOY / "grafana"
BOARD = FOLDER / "gateway.json"
BOARDS = sorted(FOLDER.glob("*.json"))
ALERTS = DEPLOY / "helm" / "penstock" / "files" / "alerts.yaml"
GRID_COLUMNS = 24
"""Of a row of a dashboard in Grafana."""
SELECTOR = re.compile(r"(penstock_gateway_\w+)(?:\{(\w+)=~)?")
GROUPED = re.compile(r"by \((\w+)\) \(rate\((\w+)")
LEGEND = re.compile(r"\{\{(\w+)\}\}")


def exposed() -> dict[str, set[str]]:
    """Sample name to labels, of a gateway with an endpoint that has served and refused."""
    endpoint = Endpoint("http://a:1")
    endpoint.scrape_succeeded(EndpointLoad(), 0.0)
    metrics = GatewayMetrics(lambda: [endpoint])
    queued = Figure(QUEUED, 1, {"priority": "0"})
    metrics.sources.append(lambda: [Figure(KUBERNETES_AGE, 1.0), Figure(KUBERNETES_FAILURES, 0), queued])
    bills = Figure(BILLING_RECORDS, 1, {"state": "recorded"}), Figure(BILLING_WAITING, 1)
    metrics.sources.append(lambda: bills)
    seen = Observation(token_events=2, first_token_at=1.0, last_token_at=2.0, usage=ReportedUsage(1, 2, 1))
    metrics.request_ended(
        RequestRecord("/v1/completions", model="m", outcome=Outcome.OK, attempts=2, seen=seen, pick_s=0.1)
    )
    metrics.request_ended(
        RequestRecord("/v1/completions", model="m", outcome=Outcome.REJECTED, reason="saturated")
    )
    of_key = RequestRecord("/v1/completions", model="m", outcome=Outcome.OK, seen=seen, queued_s=0.1)
    of_key.caller, of_key.fell_back = Caller("search", "search"), True
    metrics.request_ended(of_key)
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(
        r"^(\w+)(?:\{(.*)\})? ", b"".join(metrics.exposition()).decode(), re.MULTILINE
    ):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


SERVER_NAME = re.compile(r"\b(?:penstock|vllm):\w+")
LABELS = re.compile(r"[{,]\s*(\w+)(?:=~|!~|!=|=)|by \(([^)]*)\)")
OF_PROMETHEUS = {"instance", "job", "le"}


def served_by_servers() -> dict[str, set[str]]:
    """Sample name to labels."""
    found: dict[str, set[str]] = {}
    for family in METRIC_FAMILIES.values():
        suffixes = {
            MetricKind.COUNTER: ["_total"],
            MetricKind.GAUGE: [""],
            MetricKind.HISTOGRAM: ["_bucket", "_sum", "_count"],
        }[family.kind]
        for suffix in suffixes:
            found[family.name + suffix] = set(family.labels)
    return found


def check_expression(expression: str) -> None:
    """Its metrics of servers and gateways exist, and its labels are theirs."""
    served = served_by_servers() | exposed()
    names = [*SERVER_NAME.findall(expression), *re.findall(r"penstock_gateway_\w+", expression)]
    assert names or expression.startswith("up"), expression
    assert set(names) <= set(served), expression
    known = OF_PROMETHEUS.union(*(served[name] for name in names))
    for matched, grouped in LABELS.findall(expression):
        for label in [matched, *grouped.split(",")]:
            assert not label.strip() or label.strip() in known, (label, expression)


def test_the_dashboard_of_servers_asks_for_what_exists() -> None:
    board = json.loads((FOLDER / "server.json").read_text())
    served = served_by_servers()
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    assert len(targets) > 15
    for target in targets:
        check_expression(target["expr"].replace("[$__rate_interval]", "[5m]"))
        of = set().union(*(served[name] for name in SERVER_NAME.findall(target["expr"])))
        assert set(LEGEND.findall(target["legendFormat"])) <= of


def alerts() -> list[dict[str, str]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_alerts_ask_for_what_exists_and_have_a_runbook() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    for rule in alerts():
        check_expression(rule["expr"])
        name = rule["alert"]
        assert rule["annotations"]["runbook"] == f"docs/troubleshooting.md#{name.lower()}"
        assert f"\n#### {name}\n" in page
    assert set(re.findall(r"^#### (Penstock\w+)$", page, re.MULTILINE)) == {
        each["alert"] for each in alerts()
    }


def test_alerts_fire_when_they_should() -> None:
    run_tool("promtool", "check", "rules", ALERTS, package="apt install prometheus")
    run_tool(
        "promtool",
        "test",
        "rules",
        Path(__file__).parent / "alerts_test.yaml",
        package="apt install prometheus",
    )


def test_the_gateways_board_shows_keys_and_waiting_requests() -> None:
    shown = BOARD.read_text()
    for name in ("key_request_total", "key_tokens_total", "queued_requests", "queue_duration_seconds_bucket"):
        assert f"penstock_gateway_{name}" in shown
    assert "penstock_gateway_fallback_total" in shown


def test_every_name_and_label_of_the_dashboard_exists() -> None:
    board = json.loads(BOARD.read_text())
    served = exposed()
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    assert len(targets) > 10
    for target in targets:
        used = SELECTOR.findall(target["expr"])
        assert used, target["expr"]
        for name, label in used:
            assert name in served
            assert not label or label in served[name]
            assert set(LEGEND.findall(target["legendFormat"])) <= served[name]
        for label, name in GROUPED.findall(target["expr"]):
            assert label in served[name]


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_panels_do_not_overlap(path: Path) -> None:
    board = json.loads(path.read_text())
    taken: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= GRID_COLUMNS
        for x, y in product(range(place["w"]), range(place["h"])):
            cell = place["x"] + x, place["y"] + y
            assert cell not in taken, f"{panel['title']} lies over {taken[cell]}"
            taken[cell] = panel["title"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
