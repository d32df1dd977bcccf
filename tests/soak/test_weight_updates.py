"""A short run of updates under streams and kills."""

from __future__ import annotations

import pytest

from tests.soak.config import WeightUpdatesConfig
from tests.soak.weight_updates import measure, render


@pytest.mark.slow
def test_every_token_has_its_version_over_kills() -> None:
    report = measure(WeightUpdatesConfig(updates=10, streams=8, pause_s=0.05), lambda line: None)
    assert report.defects == [], render(report)
    assert report.updates == report.calls["200 done"] + report.calls.get("200 repeated", 0)
    assert [each.split()[0] for each in report.killed] == ["engine", "api-server", "worker", "engine"]
    assert report.checked_tokens > 0
    assert report.ends["finish length"] > 0
