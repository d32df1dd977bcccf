"""Stored responses by HTTP: many large ones that are asked for at the same time."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from penstock.api.routes.responses import MAX_READS, ResponseRoutes
from penstock.http.errors import ApiError
from tests.api.requests import api_request
from tests.http.requests import http_request


class Store:
    """Every answer waits until all are allowed."""

    def __init__(self) -> None:
        self.allowed = asyncio.Event()
        self.now = self.most = 0

    async def get(self, id: str, tenant: str) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        await self.allowed.wait()
        self.now -= 1

    async def context(self, id: str, tenant: str, read: Any) -> Any:
        await self.get(id, tenant)
        return read([])


@pytest.mark.parametrize("path", ["resp_1", "resp_1/input_items"])
def test_few_are_read_at_the_same_time(path: str) -> None:
    async def run() -> None:
        store = Store()
        routes = ResponseRoutes(cast(Any, store), 0.0)
        handlers = routes.methods(f"/v1/responses/{path}")
        assert handlers is not None
        request = api_request(http_request(target=b"/x?limit=1"), tenant="a")
        asked = [asyncio.ensure_future(handlers["GET"](request)) for _ in range(3 * MAX_READS)]
        while store.now < MAX_READS:  # noqa: ASYNC110 - the requests begin
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert store.now == MAX_READS
        store.allowed.set()
        errors = await asyncio.gather(*asked, return_exceptions=True)
        assert [error.status for error in errors if isinstance(error, ApiError)] == [404] * len(asked)
        assert (store.now, store.most) == (0, MAX_READS)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_name_that_is_no_id_is_no_response() -> None:
    routes = ResponseRoutes(cast(Any, Store()), 0.0)
    assert routes.methods("/v1/responses/compact") is None
    assert routes.methods("/v1/responses/") is None
    assert set(routes.methods("/v1/responses/resp_1") or ()) == {"GET", "DELETE"}


def test_a_query_may_have_many_fields() -> None:
    async def run() -> None:
        store = Store()
        store.allowed.set()
        handlers = ResponseRoutes(cast(Any, store), 0.0).methods("/v1/responses/resp_1")
        assert handlers is not None
        query = b"&".join(b"include[]=x" for _ in range(101))
        request = api_request(http_request(target=b"/x?" + query), tenant="a")
        with pytest.raises(ApiError) as error:
            await handlers["GET"](request)
        assert error.value.status == 404

    asyncio.run(asyncio.wait_for(run(), 60))
