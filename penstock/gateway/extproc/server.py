"""The gRPC server for Envoy: external processing, access log, health."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from penstock.exit_codes import StartupError
from penstock.gateway.extproc.messages import (
    AccessLogEntry,
    MalformedMessageError,
    ProcessingRequest,
    ProcessingResponse,
)
from penstock.gateway.extproc.processor_stream import ProcessorStream
from penstock.gateway.extproc.protobuf import (
    HealthRequest,
    HealthResponse,
    read_log,
    read_request,
    write_response,
)
from penstock.gateway.extproc.routed_requests import RoutedRequests
from penstock.gateway.routing.endpoint_discovery import host_and_port
from penstock.logging_setup import RateLimitedLog

log = logging.getLogger(__name__)
_log_malformed = RateLimitedLog(log)

PROCESSOR = "envoy.service.ext_proc.v3.ExternalProcessor"
ACCESS_LOG = "envoy.service.accesslog.v3.AccessLogService"
HEALTH = "grpc.health.v1.Health"
SERVING, NOT_SERVING = 1, 2
MESSAGE_EXCESS = 64 << 20
"""Bytes by which a message may exceed --max-request-bytes. gRPC answers a larger one itself, so that its
request would not get 413. Envoy's own limit for what it buffers has to be lower."""
Message = TypeVar("Message")


class EnvoyServer:
    """Serves from :meth:`start` to :meth:`stop`."""

    def __init__(
        self, requests: RoutedRequests, is_ready: Callable[[], bool], certificate: tuple[bytes, bytes] | None
    ) -> None:
        """``certificate`` is a private key and a certificate chain, PEM; None: without TLS."""
        self.port = 0
        """Port it listens on, after :meth:`start`."""
        self._requests = requests
        self._is_ready = is_ready
        self._certificate = certificate
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),  # a second process on the same port would be a mistake
                ("grpc.max_receive_message_length", requests.max_request_bytes + MESSAGE_EXCESS),
            ]
        )
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    PROCESSOR,
                    {
                        "Process": grpc.stream_stream_rpc_method_handler(
                            self._process, _or_malformed(read_request), write_response
                        )
                    },
                ),
                grpc.method_handlers_generic_handler(
                    ACCESS_LOG,
                    {
                        "StreamAccessLogs": grpc.stream_unary_rpc_method_handler(
                            self._log, _or_malformed(read_log), bytes
                        )
                    },
                ),
                grpc.method_handlers_generic_handler(
                    HEALTH,
                    {
                        "Check": grpc.unary_unary_rpc_method_handler(
                            self._check, HealthRequest.FromString, HealthResponse.SerializeToString
                        )
                    },
                ),
            )
        )

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises StartupError."""
        try:
            address = host_and_port(host, port)
            if self._certificate is None:
                self.port = self._server.add_insecure_port(address)
            else:
                credentials = grpc.ssl_server_credentials([self._certificate])
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise StartupError(f"--ext-proc-port {port}: {error}") from None
        await self._server.start()

    async def stop(self) -> None:
        """End all streams; Envoy continues with its requests."""
        await self._server.stop(grace=None)

    # -- methods

    async def _process(
        self,
        messages: AsyncIterator[ProcessingRequest | MalformedMessageError | None],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[ProcessingResponse]:
        stream = ProcessorStream(self._requests)
        try:
            async for message in messages:
                if isinstance(message, MalformedMessageError):
                    raise message
                if message is not None:
                    for answer in stream.receive(message):
                        yield answer
                    if stream.searches:
                        for answer in await stream.search():
                            yield answer
        except MalformedMessageError as error:
            stream.malformed()
            await _abort_malformed(context, error)
        except Exception:
            stream.failed()
            raise  # gRPC logs it and ends the stream with an error
        finally:
            stream.closed()

    async def _log(
        self,
        batches: AsyncIterator[list[AccessLogEntry] | MalformedMessageError],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> bytes:
        self._requests.open_log_streams += 1
        try:
            async for entries in batches:
                if isinstance(entries, MalformedMessageError):
                    await _abort_malformed(context, entries)
                    break
                for entry in entries:
                    self._requests.on_log_entry(entry)
        finally:
            self._requests.open_log_streams -= 1
        return b""

    async def _check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        match request.service:
            case "" | "liveness":
                return HealthResponse(status=SERVING)
            case "readiness" | "envoy.service.ext_proc.v3.ExternalProcessor":
                return HealthResponse(status=SERVING if self._is_ready() else NOT_SERVING)
            case unknown:
                await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {unknown!r}")


def _or_malformed(read: Callable[[bytes], Message]) -> Callable[[bytes], Message | MalformedMessageError]:
    """``read``, which returns its error: gRPC logs the traceback of an error that is raised."""

    def reader(data: bytes) -> Message | MalformedMessageError:
        try:
            return read(data)
        except MalformedMessageError as error:
            return error

    return reader


async def _abort_malformed(context: grpc.aio.ServicerContext[Any, Any], error: MalformedMessageError) -> None:
    _log_malformed("ext_proc", "a peer of the external processor sent a malformed message: %s", error)
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
