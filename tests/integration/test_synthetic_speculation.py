"""Several tokens per step, of synthetic engines: the same replies in fewer events, and what is counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.cli.main import main
from tests.integration.server import SYNTHETIC, Server, wait_until
from tests.integration.test_streams import joined

MOST = 6
SPECULATING = ("--synthetic-tokens-per-step", str(MOST), "--synthetic-acceptance-rate", "0.6")
FLEET = ("--api-server-count", "2", "--data-parallel-size", "2", "--log-interval", "0.2")
SPEC = "vllm:spec_decode_num"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("speculating")
    with Server(*SYNTHETIC, *SPECULATING, *FLEET, directory=directory) as running:
        wait_until(lambda: running.metric("penstock:engine_up") == 2, 60, "connecting to both engines")
        yield running


@pytest.mark.parametrize("seed", range(3))
def test_streams_have_the_same_tokens_in_fewer_events(server: Server, fleet: Server, seed: int) -> None:
    options: dict[str, Any] = {"max_tokens": 90, "seed": seed, "return_token_ids": True, "logprobs": 2}
    wanted = server.complete(**options)["choices"][0]
    events = fleet.stream(**options)
    text, ids, last = joined(events)
    assert (text, ids) == (wanted["text"], wanted["token_ids"])
    assert last["finish_reason"] == "length"
    assert len(events) < 60
    scores: dict[str, list[Any]] = {}
    sizes = set()
    for event in events[:-1]:
        choice = json.loads(event)["choices"][0]
        sizes.add(len(choice["token_ids"]))
        for name, values in choice["logprobs"].items():
            assert len(values) == len(choice["token_ids"])
            scores.setdefault(name, []).extend(values)
    assert scores == wanted["logprobs"]
    assert max(sizes) > 1
    stop = text[40:43]
    cut, _, end = joined(fleet.stream(**options, stop=[stop]))
    assert (cut, end["stop_reason"]) == (text[: text.index(stop)], stop)


def test_drafts_are_counted_over_all_engines(fleet: Server, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(8):
        fleet.complete(max_tokens=60, seed=seed)
    positions = [str(place) for place in range(MOST - 1)]

    def counted() -> bool:
        accepted = fleet.metric(f"{SPEC}_accepted_tokens_total")
        each = [fleet.metric(f"{SPEC}_accepted_tokens_per_pos_total", position=place) for place in positions]
        return accepted > 0 and sum(each) == accepted and each == sorted(each, reverse=True)

    wait_until(counted, 90, "counting accepted tokens")
    drafts, drafted = (fleet.metric(f"{SPEC}_{name}_total") for name in ("drafts", "draft_tokens"))
    assert drafts < drafted <= (MOST - 1) * drafts
    assert all(fleet.metric(f"{SPEC}_drafts_total", engine=engine) > 0 for engine in "01")
    assert main(["status", "--url", fleet.url, "--json", "--interval", "0"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert 0.1 < status["acceptance"] < 0.6
    assert 1.5 < status["tokens_per_step"] < MOST
    assert len([each for each in status["engines"] if "acceptance" in each]) == 2
    wait_until(lambda: "% of drafts, " in fleet.log, 90, "a line in the log")


def test_without_speculation_nothing_is_said_of_it(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.complete(max_tokens=20)
    assert main(["status", "--url", server.url, "--json", "--interval", "0"]) == 0
    assert "acceptance" not in capsys.readouterr().out
    assert "drafts" not in server.log
