"""Envoy's protobuf messages, reduced to the fields in use, with Envoy's names and numbers.

The packages with all of Envoy's messages take 20 MB and depend on others. These messages are declared in a
descriptor pool of their own, so that they cannot collide with those packages. Sources: Envoy's
``service/ext_proc/v3/external_processor.proto``, ``service/accesslog/v3/als.proto``,
``data/accesslog/v3/accesslog.proto``, ``config/core/v3/{base,address}.proto``, ``type/v3/http_status.proto``
and gRPC's ``grpc/health/v1/health.proto``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    message_factory,
    struct_pb2,
    wrappers_pb2,
)
from google.protobuf.message import DecodeError

from penstock.gateway.extproc.messages import (
    AccessLogEntry,
    BodyMode,
    ImmediateResponse,
    MalformedMessageError,
    MessagePart,
    ProcessingRequest,
    ProcessingResponse,
    Texts,
)
from penstock.gateway.routing.endpoint_discovery import host_and_port
from penstock.gateway.upstream.exchange import Headers

# Enums are declared as int32, which has the same encoding. "*" repeats a field, "%" is a map from strings.
_SCHEMA = """
envoy.config.core.v3
  HeaderValue: key=1 string, value=2 string, raw_value=3 bytes
  HeaderValueOption: header=1 .HeaderValue, append_action=3 int32
  HeaderMap: headers=1 *.HeaderValue
  Metadata: filter_metadata=1 %google.protobuf.Struct
  SocketAddress: address=2 string, port_value=3 uint32
  Address: socket_address=1 .SocketAddress
envoy.type.v3
  HttpStatus: code=1 int32
envoy.service.ext_proc.v3
  ProtocolConfiguration: request_body_mode=1 int32, response_body_mode=2 int32
  HttpHeaders: headers=1 envoy.config.core.v3.HeaderMap, end_of_stream=3 bool
  HttpBody: body=1 bytes, end_of_stream=2 bool
  HttpTrailers: trailers=1 envoy.config.core.v3.HeaderMap
  ProcessingRequest: request_headers=2 .HttpHeaders, response_headers=3 .HttpHeaders,
    request_body=4 .HttpBody, response_body=5 .HttpBody,
    request_trailers=6 .HttpTrailers, response_trailers=7 .HttpTrailers,
    metadata_context=8 envoy.config.core.v3.Metadata, attributes=9 %google.protobuf.Struct,
    observability_mode=10 bool, protocol_config=11 .ProtocolConfiguration
  HeaderMutation: set_headers=1 *envoy.config.core.v3.HeaderValueOption, remove_headers=2 *string
  StreamedBodyResponse: body=1 bytes, end_of_stream=2 bool
  BodyMutation: body=1 ?bytes, streamed_response=3 .StreamedBodyResponse
  CommonResponse: status=1 int32, header_mutation=2 .HeaderMutation, body_mutation=3 .BodyMutation
  HeadersResponse: response=1 .CommonResponse
  BodyResponse: response=1 .CommonResponse
  TrailersResponse: header_mutation=1 .HeaderMutation
  ImmediateResponse: status=1 envoy.type.v3.HttpStatus, headers=2 .HeaderMutation, body=3 bytes,
    details=5 string
  ProcessingResponse: request_headers=1 .HeadersResponse, response_headers=2 .HeadersResponse,
    request_body=3 .BodyResponse, response_body=4 .BodyResponse, request_trailers=5 .TrailersResponse,
    response_trailers=6 .TrailersResponse, immediate_response=7 .ImmediateResponse,
    dynamic_metadata=8 google.protobuf.Struct
envoy.data.accesslog.v3
  ResponseFlags: failed_local_healthcheck=1 bool, no_healthy_upstream=2 bool, upstream_request_timeout=3 bool,
    local_reset=4 bool, upstream_remote_reset=5 bool, upstream_connection_failure=6 bool,
    upstream_connection_termination=7 bool, upstream_overflow=8 bool, no_route_found=9 bool,
    downstream_connection_termination=15 bool, upstream_retry_limit_exceeded=16 bool,
    stream_idle_timeout=17 bool, downstream_protocol_error=19 bool,
    upstream_max_stream_duration_reached=20 bool, duration_timeout=23 bool,
    upstream_protocol_error=24 bool, no_cluster_found=25 bool
  AccessLogCommon: time_to_first_upstream_rx_byte=9 google.protobuf.Duration,
    upstream_remote_address=13 envoy.config.core.v3.Address, response_flags=16 .ResponseFlags,
    metadata=17 envoy.config.core.v3.Metadata, duration=23 google.protobuf.Duration,
    upstream_request_attempt_count=24 uint32, intermediate_log_entry=26 bool
  HTTPRequestProperties: path=5 string, request_id=9 string, original_path=10 string,
    request_body_bytes=12 uint64
  HTTPResponseProperties: response_code=1 google.protobuf.UInt32Value, response_body_bytes=3 uint64,
    response_code_details=6 string
  HTTPAccessLogEntry: common_properties=1 .AccessLogCommon, request=3 .HTTPRequestProperties,
    response=4 .HTTPResponseProperties
envoy.service.accesslog.v3
  HTTPAccessLogEntries: log_entry=1 *envoy.data.accesslog.v3.HTTPAccessLogEntry
  StreamAccessLogsMessage: http_logs=2 .HTTPAccessLogEntries
grpc.health.v1
  HealthCheckRequest: service=1 string
  HealthCheckResponse: status=1 int32
"""
OVERWRITE_OR_ADD = 2
"""``HeaderValueOption.HeaderAppendAction``."""
_Field = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
}


# -- declarations --------------------------------------------------------------------------------------


def _declare(schema: str) -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    known = [duration_pb2.DESCRIPTOR, struct_pb2.DESCRIPTOR, wrappers_pb2.DESCRIPTOR]
    for descriptor in known:
        pool.AddSerializedFile(descriptor.serialized_pb)
    names = [descriptor.name for descriptor in known]
    for package, lines in re.findall(r"^(\S+)\n((?:  .*\n)+)", schema, re.M):
        file = descriptor_pb2.FileDescriptorProto(
            name=f"penstock/{package}", package=package, syntax="proto3", dependency=names
        )
        for name, fields in re.findall(r"^  (\w+):((?:.*\n)(?:    .*\n)*)", lines, re.M):
            message = file.message_type.add(name=name)
            for field, number, kind in re.findall(r"(\w+)=(\d+) ([^,\s]+)", fields):
                _add_field(message, field, int(number), kind, package)
        pool.Add(file)
        names.append(file.name)
    return pool


def _add_field(
    message: descriptor_pb2.DescriptorProto, name: str, number: int, kind: str, package: str
) -> None:
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if kind[0] in "*%":
        field.label = _Field.LABEL_REPEATED
    if kind[0] == "?":  # sent even when it is empty
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
    bare = kind.lstrip("*%?")
    if kind[0] == "%":
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add_field(entry, "key", 1, "string", package)
        _add_field(entry, "value", 2, bare, package)
        bare = f"{package}.{message.name}.{entry.name}"
    if bare in _TYPES:
        field.type = _TYPES[bare]
    else:
        field.type = _Field.TYPE_MESSAGE
        field.type_name = f".{package}{bare}" if bare[0] == "." else f".{bare}"


_pool = _declare(_SCHEMA)


def message(name: str) -> Any:
    """The class of a message by its full name."""
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(name))


_ProcessingRequest = message("envoy.service.ext_proc.v3.ProcessingRequest")
_ProcessingResponse = message("envoy.service.ext_proc.v3.ProcessingResponse")
_LogsMessage = message("envoy.service.accesslog.v3.StreamAccessLogsMessage")
_HealthRequest = message("grpc.health.v1.HealthCheckRequest")
HealthResponse = message("grpc.health.v1.HealthCheckResponse")


# -- external processing -------------------------------------------------------------------------------


def read_request(data: bytes) -> ProcessingRequest | None:
    """Decode a ``ProcessingRequest``; None when it holds nothing that is declared here. Raises
    MalformedMessageError."""
    request = _decode(_ProcessingRequest, data)
    part = next((each for each in MessagePart if request.HasField(each)), None)
    if part is None:
        return None
    result = ProcessingRequest(part, observing=request.observability_mode)
    match part:
        case MessagePart.REQUEST_HEADERS | MessagePart.RESPONSE_HEADERS:
            headers = getattr(request, part)
            result.headers, result.end = _headers(headers.headers), headers.end_of_stream
        case MessagePart.REQUEST_BODY | MessagePart.RESPONSE_BODY:
            body = getattr(request, part)
            result.body, result.end = body.body, body.end_of_stream
        case _:
            result.end = True
    result.metadata = _metadata(request.metadata_context)
    for texts in request.attributes.values():
        result.attributes.update({name: ",".join(values) for name, values in _texts(texts).items()})
    if request.HasField("protocol_config"):
        result.request_mode = _body_mode(request.protocol_config.request_body_mode)
        result.response_mode = _body_mode(request.protocol_config.response_body_mode)
    return result


def _decode(kind: Any, data: bytes) -> Any:
    """Raises MalformedMessageError."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise MalformedMessageError(str(error)) from None


def _body_mode(value: int) -> BodyMode:
    """Raises MalformedMessageError."""
    try:
        return BodyMode(value)
    except ValueError as error:
        raise MalformedMessageError(str(error)) from None


def write_response(answer: ProcessingResponse) -> bytes:
    """Encode a ``ProcessingResponse``."""
    response = _ProcessingResponse()
    if isinstance(answer, ImmediateResponse):
        immediate = response.immediate_response
        immediate.status.code = answer.status
        _set_headers(immediate.headers, answer.headers)
        immediate.body, immediate.details = answer.body, answer.details
        return bytes(response.SerializeToString())
    part = getattr(response, answer.part)
    part.SetInParent()
    if answer.part not in (MessagePart.REQUEST_TRAILERS, MessagePart.RESPONSE_TRAILERS):
        part = part.response
        if answer.body is not None:
            part.body_mutation.body = answer.body
        elif answer.chunk is not None:
            part.body_mutation.streamed_response.body = answer.chunk
            part.body_mutation.streamed_response.end_of_stream = answer.end
    if answer.set_headers or answer.remove_headers:
        _set_headers(part.header_mutation, answer.set_headers)
        part.header_mutation.remove_headers.extend(answer.remove_headers)
    for namespace, values in answer.metadata.items():
        fields = response.dynamic_metadata.fields[namespace].struct_value.fields
        for name, value in values.items():
            fields[name].string_value = value
    return bytes(response.SerializeToString())


def _set_headers(mutation: Any, headers: Headers) -> None:
    for name, value in headers:
        option = mutation.set_headers.add(append_action=OVERWRITE_OR_ADD)
        option.header.key, option.header.raw_value = name.decode(), value


def _headers(headers: Any) -> Headers:
    """Older Envoys send text in ``value``, others bytes in ``raw_value``."""
    return [(each.key.encode(), each.raw_value or each.value.encode()) for each in headers.headers]


def _metadata(metadata: Any) -> dict[str, Texts]:
    return {namespace: _texts(struct) for namespace, struct in metadata.filter_metadata.items()}


def _texts(struct: Any) -> Texts:
    found: Texts = {}
    for name, value in struct.fields.items():
        match value.WhichOneof("kind"):
            case "string_value":
                found[name] = _split([value.string_value])
            case "list_value":
                found[name] = _split(each.string_value for each in value.list_value.values)
    return found


def _split(values: Iterable[str]) -> list[str]:
    return [text for value in values for part in value.split(",") if (text := part.strip())]


# -- health ---------------------------------------------------------------------------------------------


def read_health(data: bytes) -> str:
    """The service of a ``HealthCheckRequest``. Raises MalformedMessageError."""
    service: str = _decode(_HealthRequest, data).service
    return service


# -- access log ----------------------------------------------------------------------------------------


def read_log(data: bytes) -> list[AccessLogEntry]:
    """Decode the entries of ended requests in a ``StreamAccessLogsMessage``. Raises MalformedMessageError."""
    logs = _decode(_LogsMessage, data).http_logs.log_entry
    return [_entry(log) for log in logs if not log.common_properties.intermediate_log_entry]


def _entry(log: Any) -> AccessLogEntry:
    common, request, response = log.common_properties, log.request, log.response
    upstream = common.upstream_remote_address.socket_address
    first_byte = None
    if common.HasField("time_to_first_upstream_rx_byte"):
        first_byte = _seconds(common.time_to_first_upstream_rx_byte)
    return AccessLogEntry(
        request_id=request.request_id,
        path=request.original_path or request.path,
        status=response.response_code.value,
        details=response.response_code_details,
        flags=frozenset(field.name for field, _ in common.response_flags.ListFields()),
        upstream=host_and_port(upstream.address, upstream.port_value) if upstream.address else "",
        attempts=common.upstream_request_attempt_count,
        bytes_in=request.request_body_bytes,
        bytes_out=response.response_body_bytes,
        duration_s=_seconds(common.duration),
        first_byte_s=first_byte,
        metadata=_metadata(common.metadata),
    )


def _seconds(duration: Any) -> float:
    return float(duration.seconds + duration.nanos * 1e-9)
