"""What a request leaves behind."""

from __future__ import annotations

import asyncio
import gc
import weakref

from penstock.api.api_request import ApiRequest
from penstock.http.errors import ApiError
from tests.api.requests import api_request


class Large:
    """What a request is made into."""


def test_nothing_of_a_refused_request_stays_until_a_garbage_collection() -> None:
    made: list[weakref.ref[Large]] = []

    def refuse(request: ApiRequest, large: Large) -> None:
        made.append(weakref.ref(large))
        raise ApiError(400, f"The prompt of {request.request_id} is too long.")

    async def answer(request: ApiRequest) -> None:
        try:
            refuse(request, Large())
        except ApiError as error:
            await request.reply_error(error)

    gc.disable()
    try:
        asyncio.run(answer(api_request()))
        assert made[0]() is None
    finally:
        gc.enable()
