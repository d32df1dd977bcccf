"""What a relayed request leaves behind at its endpoint, with a model server in the same event loop."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest

from penstock.gateway.relay.client_connection import HttpClientConnection
from penstock.gateway.relay.relay import Relay
from penstock.gateway.relay.retry_policy import RetryPolicy
from penstock.gateway.relay.write_batch import WriteBatch
from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_discovery import ResolvedEndpoint
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.routing.picker import Picker
from penstock.gateway.upstream.timeouts import Timeouts
from penstock.gateway.upstream.upstream import Upstream
from tests.gateway.routers import router_over

EVENTS = b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
REPLY = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n%b"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(REPLY % (len(EVENTS), EVENTS))
    writer.close()
    await writer.wait_closed()


async def relayed(method: str, path: str) -> Endpoint:
    """The endpoint, after it has answered a request with a stream."""
    loop = asyncio.get_running_loop()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    pool = EndpointPool(Upstream(http2="off"), lambda endpoint: None)
    pool.update([ResolvedEndpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")])
    router = router_over(pool, Picker({}), loop.time)
    client = HttpClientConnection(Mock(write_target=None), (b"x-request-id", b"r"), WriteBatch())
    incoming = IncomingRequest(method, path.encode(), path, [], b"", None)
    record = RequestRecord(path, method=method, began_at=loop.time())
    async with asyncio.timeout(10):
        await Relay(router, RetryPolicy(router), Timeouts()).run(incoming, client, record)
    assert record.seen.token_events == 1
    pool.close()
    server.close()
    return pool.endpoints[0]


@pytest.mark.parametrize(
    ("method", "path", "counts"),
    [("POST", "/v1/completions", True), ("GET", "/v1/responses/resp_1", False)],
    ids=["generated", "stored"],
)
def test_the_time_to_the_first_token_is_that_of_a_generation(method: str, path: str, counts: bool) -> None:
    """A stored response has its tokens at once."""
    endpoint = asyncio.run(relayed(method, path))
    assert (endpoint.ttft_s is not None) is counts
