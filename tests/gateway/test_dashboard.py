"""The Grafana dashboard asks for what the gateway exposes."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import penstock
from penstock.gateway.relay.request_record import RequestRecord
from penstock.gateway.responses.outcome import Outcome
from penstock.gateway.responses.response_observer import Observation
from penstock.gateway.responses.token_usage import TokenUsage
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.telemetry.metrics import GatewayMetrics

BOARD = Path(penstock.__file__).parents[1] / "deploy" / "grafana" / "gateway.json"
GRID_COLUMNS = 24
"""Of a row of a dashboard in Grafana."""
SELECTOR = re.compile(r"(penstock_gateway_\w+)(?:\{(\w+)=~)?")
GROUPED = re.compile(r"by \((\w+)\) \(rate\((\w+)")
LEGEND = re.compile(r"\{\{(\w+)\}\}")


def exposed() -> dict[str, set[str]]:
    """Sample name to labels, of a gateway with an endpoint that has served and refused."""
    metrics = GatewayMetrics(lambda: [Endpoint("http://a:1")])
    seen = Observation(token_events=2, first_token_at=1.0, last_token_at=2.0, usage=TokenUsage(1, 2, 1))
    metrics.request_ended(
        RequestRecord("/v1/completions", model="m", outcome=Outcome.OK, attempts=2, seen=seen, pick_s=0.1)
    )
    metrics.request_ended(
        RequestRecord("/v1/completions", model="m", outcome=Outcome.REJECTED, reason="saturated")
    )
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? ", metrics.exposition().decode(), re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


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


def test_panels_do_not_overlap() -> None:
    board = json.loads(BOARD.read_text())
    taken: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= GRID_COLUMNS
        for x, y in product(range(place["w"]), range(place["h"])):
            cell = place["x"] + x, place["y"] + y
            assert cell not in taken, f"{panel['title']} lies over {taken[cell]}"
            taken[cell] = panel["title"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
