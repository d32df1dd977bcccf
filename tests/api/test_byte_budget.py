"""Work in threads within a number of bytes."""

from __future__ import annotations

import asyncio
import gc
import weakref

from penstock.api.byte_budget import ByteBudget
from penstock.http.errors import ApiError
from tests.http.requests import http_request


class Large:
    """What a request is made into."""


def test_nothing_of_a_refused_request_stays_until_a_garbage_collection() -> None:
    made: list[weakref.ref[Large]] = []

    def refuse() -> None:
        large = Large()
        made.append(weakref.ref(large))
        raise ApiError(400, "The prompt is too long.")

    async def answer() -> int:
        budget = ByteBudget(1)
        try:
            await http_request().unless_gone(budget.run_in_thread(1, refuse))
        except ApiError as error:
            return error.status
        return 200

    gc.disable()
    try:
        assert asyncio.run(answer()) == 400
        assert made[0]() is None
    finally:
        gc.enable()
