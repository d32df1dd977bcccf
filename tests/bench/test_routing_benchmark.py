"""``penstock bench routing``: the simulated fleet, and what the gateway's picker is worth in it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.bench.deadline import Deadline
from penstock.bench.errors import BenchError
from penstock.bench.fleet.policies import OTHERS, OwnPicker, Policy, RoundRobin
from penstock.bench.fleet.routing_benchmark import OWN, WITHOUT_SESSIONS, measure, render
from penstock.bench.fleet.simulated_server import ServerModel, SimulatedRequest, SimulatedServer
from penstock.bench.fleet.simulation import simulate
from penstock.bench.fleet.traces import BLOCK_TOKENS, TRACES, TraceConversation, TraceTurn, make_trace
from penstock.config.bench import BenchRoutingConfig
from penstock.config.errors import ConfigError
from penstock.config.gateway_options.picking import DEFAULT_SCORERS


def turn(blocks: int, output_tokens: int = 10, first: int = 0) -> TraceTurn:
    names = tuple(range(first, first + blocks))
    return TraceTurn(names, blocks * BLOCK_TOKENS, output_tokens, names, 1.0)


def run(server: SimulatedServer) -> list[SimulatedRequest]:
    """Steps until nothing is left; returns the requests in the order of their ends."""
    now, finished = 0.0, []
    while (took := server.begin_step()) is not None:
        now += took
        finished += server.end_step(now)
    return finished


def test_a_prefix_that_was_computed_costs_nothing() -> None:
    server = SimulatedServer(ServerModel())
    server.submit(first := SimulatedRequest(turn(100), 0.0))
    run(server)
    server.submit(again := SimulatedRequest(turn(100), 0.0))
    assert run(server) == [again]
    assert (first.cached_tokens, again.cached_tokens) == (0, 100 * BLOCK_TOKENS - 1)


def test_what_does_not_fit_waits_and_the_oldest_prefix_makes_room() -> None:
    server = SimulatedServer(ServerModel(kv_tokens=150 * BLOCK_TOKENS))
    requests = [SimulatedRequest(turn(100, first=number * 100), 0.0) for number in range(3)]
    for request in requests:
        server.submit(request)
    server.begin_step()
    assert (server.running, server.waiting) == (1, 2)
    server.end_step(0.1)
    assert run(server) == requests
    server.submit(evicted := SimulatedRequest(turn(100), 0.0))
    run(server)
    assert evicted.cached_tokens == 0


@pytest.mark.parametrize("name", TRACES)
def test_every_policy_serves_every_turn_of_a_trace(name: str) -> None:
    trace = make_trace(TRACES[name], 4, 10.0, 1.0, seed=3)
    turns = sum(len(each.turns) for each in trace)
    policies: list[Policy] = [make(4, random.Random(0)) for make in OTHERS.values()]
    for policy in [*policies, OwnPicker(4, random.Random(0), DEFAULT_SCORERS)]:
        result = simulate(policy, 4, trace, ServerModel())
        assert result.ttft_s.size == turns > 0
        assert result.ttft_s.min() > 0
        assert 0 <= result.cached_share < 1
        assert result.busiest >= 1


def test_turns_of_a_conversation_follow_each_other() -> None:
    conversation = TraceConversation(0, 5.0, [turn(10), turn(20)])
    result = simulate(RoundRobin(2, random.Random(0)), 2, [conversation], ServerModel())
    assert result.ttft_s.size == 2
    assert result.busiest == 1.0
    assert np.isclose(result.ttft_s[0], 0.010 + 10 * BLOCK_TOKENS / 18_000)


def test_the_picker_beats_blind_choices_on_agents() -> None:
    report = measure(BenchRoutingConfig(servers=4, traces=["agents"], duration=30.0), print)
    by_policy = {each.policy: each for each in report.figures}
    assert by_policy.keys() == {OWN, WITHOUT_SESSIONS, *OTHERS}
    for own in (by_policy[OWN], by_policy[WITHOUT_SESSIONS]):
        for other in ("random", "round-robin", "least-loaded"):
            assert own.ttft_mean_ms < by_policy[other].ttft_mean_ms
            assert own.cached_share > by_policy[other].cached_share
    text = render(report)
    assert "agents: " in text
    assert all(policy in text for policy in by_policy)


def test_a_simulation_ends_when_the_time_is_over() -> None:
    times = iter([0.0, *[0.5] * 3])
    deadline = Deadline(1.0, lambda: next(times, 2.0))
    trace = make_trace(TRACES["chat"], 4, 60.0, 1.0, seed=3)
    with pytest.raises(BenchError, match="1 s are over before the end"):
        simulate(
            RoundRobin(4, random.Random(0)), 4, trace, ServerModel(), lambda: deadline.left("the end of it")
        )


def test_a_trace_without_conversations_measures_nothing() -> None:
    with pytest.raises(BenchError, match="no conversation of chat begins"):
        measure(BenchRoutingConfig(servers=2, traces=["chat"], duration=0.001), print)


def test_scorers_that_there_are_not() -> None:
    with pytest.raises(ConfigError, match="there is no scorer 'luck'"):
        measure(BenchRoutingConfig(servers=2, traces=["chat"], scorers="luck=1"), print)
