"""The line that the log gets on the fleet."""

from __future__ import annotations

import logging

import pytest

from penstock.api.throughput_log import ThroughputLog
from penstock.metrics import families as f
from penstock.metrics.merge import Totals

SPECULATION = (f.SPEC_DRAFTS, f.SPEC_DRAFT_TOKENS, f.SPEC_ACCEPTED)


class Figures:
    """An observer that sees what the test says, of two engines."""

    def __init__(self) -> None:
        self.running = self.waiting = 0
        self.kv_used = 0.0
        self.prompt = self.generated = 0
        self.speculation = (0, 0, 0)
        """Drafts, their tokens, and those that were accepted."""
        self.ranks: tuple[int, ...] = (0, 1)
        """Of the engines that have told what they count."""

    def totals(self) -> Totals:
        both = ("m", "0"), ("m", "1")
        known = [("m", str(rank)) for rank in self.ranks]
        return {
            f.RUNNING.name: dict.fromkeys(both, float(self.running)),
            f.WAITING.name: dict.fromkeys(both, float(self.waiting)),
            f.KV_USAGE.name: {both[0]: self.kv_used, both[1]: 0.0},
            f.PROMPT_TOKENS.name: dict.fromkeys(known, self.prompt),
            f.GENERATION_TOKENS.name: dict.fromkeys(known, self.generated),
            **{
                family.name: dict.fromkeys(known, count)
                for family, count in zip(SPECULATION, self.speculation, strict=True)
            },
        }


def test_what_was_done_before_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    figures = Figures()
    figures.running, figures.generated = 1, 1_000_000
    fleet_log = ThroughputLog(figures.totals, lambda: True)
    fleet_log.write(100.0)
    figures.generated += 100
    fleet_log.write(110.0)
    assert caplog.messages == [
        "running 2, waiting 0, KV cache 0.0 %, prompts 0 tokens/s, generated 20 tokens/s"
    ]


def test_nor_does_what_an_engine_did_before_it_joined(caplog: pytest.LogCaptureFixture) -> None:
    """As those of other hosts that find a new head, which is idle and stays so."""
    caplog.set_level(logging.INFO)
    figures = Figures()
    figures.generated = 1_000_000
    fleet_log = ThroughputLog(figures.totals, lambda: True)
    figures.ranks = ()
    fleet_log.write(100.0)
    figures.ranks = (0,)
    fleet_log.write(110.0)
    figures.ranks = (0, 1)
    fleet_log.write(120.0)
    assert caplog.messages == []
    figures.generated += 100
    fleet_log.write(130.0)
    [line] = caplog.messages
    assert line.endswith("generated 20 tokens/s")


def test_a_line_while_something_happens_and_one_when_it_has_ceased(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    figures = Figures()
    fleet_log = ThroughputLog(figures.totals, lambda: True)
    fleet_log.write(100.0)
    fleet_log.write(110.0)
    assert caplog.messages == []
    figures.running, figures.waiting, figures.kv_used = 3, 1, 0.256
    figures.prompt, figures.generated = 50, 200
    fleet_log.write(120.0)
    figures.running, figures.waiting, figures.kv_used = 0, 0, 0.0
    figures.generated = 201
    fleet_log.write(121.0)
    fleet_log.write(131.0)
    fleet_log.write(141.0)
    assert caplog.messages == [
        "running 6, waiting 2, KV cache 25.6 %, prompts 10 tokens/s, generated 40 tokens/s",
        "running 0, waiting 0, KV cache 0.0 %, prompts 0 tokens/s, generated 2 tokens/s",
        "running 0, waiting 0, KV cache 0.0 %, prompts 0 tokens/s, generated 0 tokens/s",
    ]


def test_one_that_takes_over_goes_on_where_the_other_was(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    figures = Figures()
    speaking: list[bool] = []
    fleet_log = ThroughputLog(figures.totals, lambda: bool(speaking))
    fleet_log.write(100.0)
    figures.running, figures.generated = 1, 100
    fleet_log.write(110.0)
    assert caplog.messages == []
    speaking.append(True)
    figures.generated = 150
    fleet_log.write(120.0)
    assert caplog.messages == [
        "running 2, waiting 0, KV cache 0.0 %, prompts 0 tokens/s, generated 10 tokens/s"
    ]


def test_acceptance_while_engines_speculate(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    figures = Figures()
    figures.running, figures.speculation = 1, (1000, 3000, 3000)
    fleet_log = ThroughputLog(figures.totals, lambda: True)
    fleet_log.write(100.0)
    figures.generated, figures.speculation = 40, (1010, 3040, 3026)
    fleet_log.write(110.0)
    fleet_log.write(120.0)
    first, second = caplog.messages
    assert first.endswith("generated 8 tokens/s, accepted 65.0 % of drafts, 3.6 tokens per step with a draft")
    assert second.endswith("generated 0 tokens/s")
