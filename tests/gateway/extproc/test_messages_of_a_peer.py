"""Messages that no Envoy sends, and bodies of any size, over real gRPC."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import grpc
import pytest

from penstock.gateway.extproc import protobuf
from tests.gateway.behaviours import good
from tests.gateway.extproc.envoy import ext_proc_port
from tests.gateway.processes import WAIT_S, Gateway, Upstream, eventually, gateway

PROCESSOR = "envoy.service.ext_proc.v3.ExternalProcessor"
CORRUPT = b"\x12\xff\xff\xff\xff\x0f"
LIMIT = 1 << 20


@pytest.fixture(scope="module")
def front() -> Iterator[Gateway]:
    options = ("--ext-proc-port", "0", "--max-request-bytes", str(LIMIT))
    with Upstream(good) as server, gateway(server, options=options) as running:
        yield running


@pytest.fixture(scope="module")
def channel(front: Gateway) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{ext_proc_port(front)}") as opened:
        yield opened


def message(**fields: Any) -> bytes:
    encoded: bytes = protobuf.message("envoy.service.ext_proc.v3.ProcessingRequest")(
        **fields
    ).SerializeToString()
    return encoded


def headers(**more: str) -> bytes:
    named = {":method": "POST", ":path": "/v1/completions", **more}
    listed = [{"key": key, "raw_value": value.encode()} for key, value in named.items()]
    return message(request_headers={"headers": {"headers": listed}})


def body(size: int) -> bytes:
    return message(request_body={"body": b"x" * size, "end_of_stream": True})


def answers(channel: grpc.Channel, messages: Iterable[bytes]) -> list[Any]:
    process = channel.stream_stream(
        f"/{PROCESSOR}/Process",
        None,
        protobuf.message("envoy.service.ext_proc.v3.ProcessingResponse").FromString,
    )
    return list(process(iter(messages), timeout=WAIT_S))


@pytest.mark.parametrize(
    "messages",
    [
        [CORRUPT],
        [headers(), CORRUPT],
        [headers(), headers()],
        [message(request_headers={}, protocol_config={"request_body_mode": 99})],
    ],
    ids=["corrupt", "corrupt after the headers", "headers twice", "unknown body mode"],
)
def test_what_is_no_message_ends_its_stream(
    front: Gateway, channel: grpc.Channel, messages: list[bytes]
) -> None:
    with pytest.raises(grpc.RpcError) as error:
        answers(channel, messages)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert front.counts("requests_in_flight").get("", 0.0) == 0.0
    assert "client_disconnect" not in front.counts()
    log = "".join(front.lines)
    assert "Traceback" not in log
    eventually(lambda: "".join(front.lines).count("WARNING") == 1)


def test_a_log_that_is_no_message_ends_its_stream(front: Gateway, channel: grpc.Channel) -> None:
    stream = channel.stream_unary("/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs", None, None)
    with pytest.raises(grpc.RpcError) as error:
        stream(iter([CORRUPT]), timeout=WAIT_S)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in "".join(front.lines)


def test_a_health_check_that_is_no_message(front: Gateway, channel: grpc.Channel) -> None:
    check = channel.unary_unary("/grpc.health.v1.Health/Check", None, None)
    with pytest.raises(grpc.RpcError) as error:
        check(CORRUPT, timeout=WAIT_S)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in "".join(front.lines)


@pytest.mark.parametrize("size", [LIMIT + 1, 4 * LIMIT, 40 * LIMIT])
def test_a_body_that_is_too_large_is_a_413(front: Gateway, channel: grpc.Channel, size: int) -> None:
    before = front.counts("rejection_total").get("too_large", 0.0)
    *_, last = answers(channel, [headers(), body(size)])
    assert last.immediate_response.status.code == 413
    assert front.counts("rejection_total")["too_large"] == before + 1
