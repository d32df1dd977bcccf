"""/metrics of a running server: the documented families, exact counts, and the line in the log."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.metrics.bounds import E2E_BOUNDS
from penstock.metrics.families import METRIC_FAMILIES, MetricKind
from tests.integration.server import SYNTHETIC, Server, all_up, wait_until
from tests.integration.test_lifecycle import Pool

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `((?:vllm|penstock):\w+)` \| (\w+) \| ([^|]+) \| ([^|]*) \| (.+) \|$", re.MULTILINE)


def test_the_page_has_every_family_of_a_running_server(server: Server) -> None:
    server.complete(max_tokens=3)
    text = server.metrics()
    served = {family.name: family for family in text_string_to_metric_families(text)}
    documented = {name: rest for name, *rest in ROW.findall(PAGE.read_text())}
    assert list(documented) == list(served)
    for name, (kind, unit, labels, meaning) in documented.items():
        assert (kind, meaning) == (served[name].type, served[name].documentation)
        assert unit == METRIC_FAMILIES[name].unit
        found = {label for sample in served[name].samples for label in sample.labels} - {"le"}
        assert found <= set(labels.split(", "))
        assert not served[name].samples or found == set(labels.split(", "))


TWO_OF_EACH = ("--api-server-count", "2", "--data-parallel-size", "2")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two API servers, two engines, a line in the log ten times a second."""
    options = ("--log-interval", "0.1")
    with Server(*SYNTHETIC, *TWO_OF_EACH, *options, directory=tmp_path_factory.mktemp("fleet")) as running:
        wait_until(lambda: running.metric("penstock:engine_up") == 2, 60, "connecting to both engines")
        yield running


def test_any_api_server_knows_what_all_engines_did(fleet: Server) -> None:
    requests, tokens = 20, 100
    before = {
        name: fleet.metric(name)
        for family in METRIC_FAMILIES.values()
        if "engine" in family.labels
        and family.kind is not MetricKind.GAUGE
        and "position" not in family.labels  # only engines that speculate have it
        for name in [f"{family.name}_{'count' if family.kind is MetricKind.HISTOGRAM else 'total'}"]
    }
    with ThreadPoolExecutor(requests) as pool:
        list(pool.map(lambda _: fleet.complete(max_tokens=tokens, ignore_eos=True), range(requests)))

    def more(name: str) -> float:
        return fleet.metric(name) - before[name]

    wanted = {
        "vllm:generation_tokens_total": requests * tokens,
        "vllm:request_success_total": requests,
        "vllm:time_to_first_token_seconds_count": requests,
        "vllm:inter_token_latency_seconds_count": requests * (tokens - 1),
    }
    for family in METRIC_FAMILIES.values():
        if family.name.startswith("vllm:") and family.bounds == E2E_BOUNDS:
            wanted[f"{family.name}_count"] = requests

    def told() -> bool:  # new connections go to any API server
        return all({name: more(name) for name in wanted} == wanted for _ in range(4))

    wait_until(told, 90, "counting the tokens")
    assert fleet.metric("vllm:generation_tokens_total", engine="0") > 0
    assert fleet.metric("vllm:generation_tokens_total", engine="1") > 0
    assert fleet.metric("vllm:iteration_tokens_total_sum") == fleet.metric(
        "vllm:prompt_tokens_total"
    ) + fleet.metric("vllm:generation_tokens_total")
    assert fleet.metric("penstock:gc_pause_seconds_count", process="engine 0") >= 1


def test_a_stop_string_is_a_stop(fleet: Server) -> None:
    stopped = fleet.metric("vllm:request_success_total", finished_reason="stop")
    text = fleet.complete("hello", max_tokens=50, seed=1, temperature=1)["choices"][0]["text"]
    reply = fleet.complete("hello", max_tokens=50, seed=1, temperature=1, stop=[text[10:14]])
    assert reply["choices"][0]["finish_reason"] == "stop"
    wait_until(
        lambda: fleet.metric("vllm:request_success_total", finished_reason="stop") == stopped + 1,
        30,
        "counting it as stopped",
    )


def test_every_token_is_delivered_or_discarded(tmp_path: Path) -> None:
    """Tokens that an engine made after the stop string are none of the reply's. A fleet of its own: what API
    servers know of each other is a second old, so there is no telling when earlier tokens are all counted."""

    def figures() -> tuple[float, float, float]:
        families = "vllm:generation_tokens", "penstock:tokens_delivered", "penstock:tokens_discarded"
        generated, delivered, discarded = (fleet.metric(f"{name}_total") for name in families)
        return generated, delivered, discarded

    def balanced() -> bool:
        generated, delivered, discarded = figures()
        return generated == delivered + discarded

    with Server(*SYNTHETIC, *TWO_OF_EACH, directory=tmp_path) as fleet:
        text = fleet.complete("hello", max_tokens=50, seed=2)["choices"][0]["text"]
        reply = fleet.complete("hello", max_tokens=50, seed=2, stop=[text[10:14]])
        used = reply["usage"]["completion_tokens"]
        assert used < 50
        wait_until(lambda: figures()[1] == 50 + used, 90, "counting the tokens of the replies")
        wait_until(balanced, 90, "counting the others")


def writers(log: str) -> list[str]:
    """Who wrote each of the lines on the fleet."""
    pattern = r"(api-server \d+) +running \d+, waiting \d+, KV cache \S+ %, prompts \d+ tokens/s, generated"
    return re.findall(pattern, log)


def next_writers(server: Server, count: int = 5) -> set[str]:
    """Those of the next lines."""
    seen = len(writers(server.log))
    wait_until(lambda: len(writers(server.log)) >= seen + count, 60, "more lines")
    return set(writers(server.log)[seen:])


def test_one_process_speaks_for_the_fleet_whoever_dies_or_is_replaced(tmp_path: Path) -> None:
    options = ("--api-server-count", "2", "--log-interval", "0.1")
    with Server(*SYNTHETIC, *options, directory=tmp_path) as server, Pool(server.url):
        [speaker] = next_writers(server)
        [process] = server.children(speaker)
        process.kill()
        wait_until(lambda: set(writers(server.log)) != {speaker}, 60, "a line of another one")
        [successor] = next_writers(server)
        assert successor != speaker
        wait_until(lambda: f"{speaker} is ready again" in server.log, 90, "the restart")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: server.log.count("has served all it had") == 2, 90, "replacing both")
        [new] = next_writers(server)
        assert new not in (speaker, successor)


def test_counters_of_a_killed_engine_are_kept(fleet: Server) -> None:
    wait_until(
        lambda: fleet.metric("vllm:num_requests_running") == 0, 90, "being idle, with everything reported"
    )
    before = fleet.metric("vllm:generation_tokens_total")
    fleet.complete("hello", max_tokens=7, ignore_eos=True)
    wait_until(lambda: fleet.metric("vllm:generation_tokens_total") >= before + 7, 90, "counting the tokens")
    counted = fleet.metric("vllm:generation_tokens_total")
    engine = fleet.children("engine")[0]
    engine.kill()
    wait_until(lambda: not engine.is_running(), 90, "killing it")
    wait_until(lambda: fleet.metric("penstock:process_restarts") >= 1, 60, "starting it again")
    wait_until(lambda: fleet.metric("vllm:generation_tokens_total") >= counted, 90, "the same count again")


API_SERVERS = 3


def totals(server: Server) -> tuple[float, ...]:
    """Requests as API servers, clients and engines count them, tokens generated and delivered."""
    return (
        server.metric("penstock:requests_total"),
        server.metric("penstock:client_request_latency_seconds_count"),
        server.metric("vllm:request_success_total"),
        server.metric("vllm:generation_tokens_total"),
        server.metric("penstock:tokens_delivered_total"),
    )


def ask(server: Server, requests: int, before: int) -> int:
    """Send so many after ``before`` others; returns how many that makes, once all API servers count exactly
    so many."""
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: server.complete(max_tokens=3, ignore_eos=True), range(requests)))
    total = before + requests

    def agree() -> bool:
        return {totals(server) for _ in range(2 * API_SERVERS)} == {
            (total, total, total, 3 * total, 3 * total)
        }

    wait_until(agree, 90, "exact counts")
    return total


def killed(server: Server, role: str) -> str:
    """Kills a process of this role and waits for the next one; returns its name."""
    process = server.children(role)[0]
    name = " ".join(process.cmdline()).strip().removeprefix("penstock: ")
    process.kill()
    wait_until(lambda: f"{name} is ready again" in server.log, 90, f"the restart of {name}")
    wait_until(lambda: all_up(server, 2, API_SERVERS), 90, "connecting to both engines")
    return name


def check_counts(directory: Path, requests: int, roles: Sequence[str]) -> None:
    """After so many requests, with a part of each role killed in between, and all API servers replaced."""
    options = ("--api-server-count", str(API_SERVERS), "--data-parallel-size", "2")
    with Server(*SYNTHETIC, *options, directory=directory) as server:
        wait_until(lambda: server.metric("penstock:engine_up") == 2, 60, "connecting to both engines")
        share = requests // (len(roles) + 1)
        total = ask(server, share, before=0)
        restarted = []
        for role in roles:
            restarted.append(killed(server, role))
            total = ask(server, share, before=total)
        assert total == requests
        for name in restarted:
            assert server.metric("penstock:process_restarts", process=name) == 1
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: server.log.count("has served all it had") == API_SERVERS, 90, "replacing all")
        assert ask(server, 0, before=total) == total
        assert server.metric("penstock:process_restarts") == len(restarted)
        for process in ("supervisor 0", "coordinator 0", "engine 0", *restarted):
            assert server.metric("penstock:gc_pause_seconds_count", process=process) >= 1


def test_counts_are_exact_after_a_restart(tmp_path: Path) -> None:
    check_counts(tmp_path, 60, ["api-server"])


@pytest.mark.slow
def test_counts_are_exact_after_1000_requests_and_restarts_of_every_part(tmp_path: Path) -> None:
    check_counts(tmp_path, 1000, ["api-server", "coordinator", "engine"])
