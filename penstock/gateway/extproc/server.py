"""The gRPC server for Envoy: external processing, access log, health."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from penstock.exit_codes import StartupError
from penstock.gateway.admission.envoy_certificates import Certificates
from penstock.gateway.extproc.messages import (
    AccessLogEntry,
    MalformedMessageError,
    ProcessingRequest,
    ProcessingResponse,
)
from penstock.gateway.extproc.processor_stream import ProcessorStream
from penstock.gateway.extproc.protobuf import (
    HealthResponse,
    read_health,
    read_log,
    read_request,
    write_response,
)
from penstock.gateway.extproc.routed_requests import RoutedRequests
from penstock.gateway.routing.endpoint_discovery import host_and_port
from penstock.http.tls import ReplacedFiles
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
CONNECTION_AGE_S = 10.0
"""Time after which a connection gets GOAWAY: Envoy opens another one, which may be another worker's. gRPC
varies it by a tenth."""
Message = TypeVar("Message")


class EnvoyServer:
    """Serves from :meth:`start` to :meth:`stop`."""

    def __init__(
        self,
        requests: RoutedRequests,
        is_ready: Callable[[], bool],
        certificates: ReplacedFiles[Certificates] | None,
    ) -> None:
        """``certificates``: None: without TLS."""
        self.port = 0
        """Port it listens on, after :meth:`start`."""
        self._requests = requests
        self._is_ready = is_ready
        self._certificates = certificates
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_connection_age_ms", int(1000 * CONNECTION_AGE_S)),
                ("grpc.so_reuseport", 1),  # a worker and its replacement listen together for a while
                ("grpc.http2.max_ping_strikes", 0),  # Envoy's PINGs tell it when a gateway hangs
                ("grpc.max_receive_message_length", requests.intake.bodies.max_read + MESSAGE_EXCESS),
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
                            self._check, _or_malformed(read_health), HealthResponse.SerializeToString
                        )
                    },
                ),
            )
        )

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises StartupError."""
        try:
            address = host_and_port(host, port)
            if self._certificates is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, _credentials(self._certificates))
        except RuntimeError as error:
            raise StartupError(f"--ext-proc-port {port}: {error}") from None
        await self._server.start()

    def retire(self) -> None:
        """Listen no more. Connections are still served: Envoy leaves them within CONNECTION_AGE_S. gRPC's own
        shutdown would refuse streams that are on their way."""
        stop_listening(self.port)

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
                    for answer in await stream.receive(message):
                        yield answer
                    if stream.is_over:
                        return
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

    async def _check(
        self, service: str | MalformedMessageError, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Any:
        match service:
            case MalformedMessageError():
                await _abort_malformed(context, service)
            case "" | "liveness":
                return HealthResponse(status=SERVING)
            case "readiness" | "envoy.service.ext_proc.v3.ExternalProcessor":
                return HealthResponse(status=SERVING if self._is_ready() else NOT_SERVING)
            case unknown:
                await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {unknown!r}")


def _credentials(files: ReplacedFiles[Certificates]) -> grpc.ServerCredentials:
    """TLS with the files' certificate as it is when a connection begins; gRPC asks in a thread of its own."""

    def configuration() -> grpc.ServerCertificateConfiguration:
        key, chain, authorities = files.latest()
        return grpc.ssl_server_certificate_configuration([(key, chain)], authorities)

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        configuration,
        require_client_authentication=files.latest().client_authorities is not None,
    )


def stop_listening(port: int) -> None:
    """Close the listening sockets of this process that are bound to a port, whoever has them."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):
            sock = socket.socket(fileno=int(name))
            try:
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and sock.getsockname()[1] == port:
                    sock.shutdown(socket.SHUT_RD)
            finally:
                sock.detach()  # it is another's


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
