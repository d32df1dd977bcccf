"""Queries for engines' metrics: an engine that does not answer is waited for once."""

from __future__ import annotations

import asyncio

from penstock.dispatch.metrics_queries import MetricsQueries


def test_waits_for_answers_but_for_a_late_engine_only_once() -> None:
    sent: list[tuple[int, int]] = []

    async def run() -> None:
        queries = MetricsQueries(lambda rank, number: sent.append((rank, number)), timeout_s=0.01)
        asking = asyncio.ensure_future(queries.ask([0, 1]))
        await asyncio.sleep(0)
        queries.on_answer(0, 1)
        await asking
        assert sent == [(0, 1), (1, 1)]
        asking = asyncio.ensure_future(queries.ask([0, 1]))
        await asyncio.sleep(0)
        assert sent[2:] == [(0, 2)], "1 has not answered"
        queries.on_answer(0, 2)
        await asking
        queries.on_answer(1, 1)
        asking = asyncio.ensure_future(queries.ask([0, 1]))
        await asyncio.sleep(0)
        assert sent[3:] == [(0, 3), (1, 3)]
        queries.on_answer(0, 3)
        queries.on_disconnected(1)
        await asking
        await queries.ask([])

    asyncio.run(run())
