"""Weights: ``POST /update_weights``, ``GET /weight_version`` and ``GET /weights_checksum``; and
``POST /init_weight_transfer_engine`` of vLLM's engines, whose workers receive weights from a trainer."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import msgspec

from penstock.api.api_request import ApiRequest
from penstock.api.routes.receipts import call_engines, members_of, send_receipts
from penstock.api.routes.weight_schemas import InitWeightTransferEngineRequest, UpdateWeightsRequest
from penstock.api.routes.weight_transfer import WeightTransferRoutes, check_distinct
from penstock.dispatch.engine_client import EngineClient
from penstock.dispatch.engine_rpc import OperationOutcome, OperationResult
from penstock.dispatch.weight_changes import TooManySources, WeightChanges, WeightUpdate
from penstock.engine.weights.weight_file import with_digest
from penstock.generation.request.body_decoder import BodyDecoder
from penstock.http.errors import ApiError, encode_json, shown
from penstock.http.operation_options import OperationOptions, operation_options
from penstock.wire.messages import WEIGHTS
from penstock.wire.weights.desired import DEFAULT_VERSION, TRANSFER, DesiredWeights, WeightSource

UPDATE, CHECKSUM, JOIN = "update_weights", "weights_checksum", "init_weight_transfer_engine"
"""Names of the operations in replies."""
MAX_BODY_BYTES = 8 << 20
"""A broadcast of 48 layers with 128 experts has 18,000 tensors; their names alone take a megabyte."""
MAX_INFO_BYTES = 768 << 10
"""Largest body with ``init_info`` or ``update_info``: engines take calls of 1 MiB."""


class WeightRoutes:
    """The handlers."""

    def __init__(
        self, engine_client: EngineClient, changes: WeightChanges, transfers: WeightTransferRoutes
    ) -> None:
        self._engine_client = engine_client
        self._changes = changes
        self.transfers = transfers
        self._decode = BodyDecoder(UpdateWeightsRequest, strict=False, once=True).decode
        self._decode_join = BodyDecoder(InitWeightTransferEngineRequest, strict=False, once=True).decode

    async def join(self, request: ApiRequest) -> None:
        """Have the workers of vLLM's engines join a trainer. An engine that restarts meanwhile does not."""
        options = operation_options(request.http)
        body = self._decode_join(await request.http.read_json(MAX_INFO_BYTES))
        self._check_receiving("init_info")
        arguments = {"init_info": body.init_info}
        result = await call_engines(self._engine_client, JOIN, arguments, options, after_restart=False)
        await send_receipts(request, JOIN, options, result)

    async def update(self, request: ApiRequest) -> None:
        options = operation_options(request.http)
        raw = await request.http.read_json(MAX_BODY_BYTES)
        try:
            body = self._decode(raw)
            update = _update(body)
        except ApiError:
            if b'"broadcast"' in raw:
                self.transfers.give_up()
            raise
        if body.broadcast is not None:
            await self.transfers.update(request, options, update, body.broadcast)
            return
        if body.update_info is not None:
            if len(raw) > MAX_INFO_BYTES:
                message = f"update_info: the body has {len(raw)} bytes, at most {MAX_INFO_BYTES} are taken."
                raise ApiError(413, message, param="update_info")
            self._check_receiving("update_info")
            found = [_transfer(update, body.update_info)]
            told = await self._announce(update, found[0].path, body.update_info, options)
            if told.outcome is not OperationOutcome.DONE:
                await send_receipts(request, UPDATE, options, told)
                return
        else:
            field = "path" if body.paths is None else "paths"
            found = await asyncio.to_thread(_with_digests, update.weights.sources, field)
            _check_digests(found, body.digests)
        update = replace(update, weights=msgspec.structs.replace(update.weights, sources=found))
        members_of(self._engine_client)
        try:
            result = await self._changes.update(update, options.key, options.timeout_s)
        except TooManySources as error:
            raise ApiError(400, f"{error}.", param="whole", code="too_many_sources") from None
        more = {"digests": [source.digest for source in found]} if body.update_info is None else {}
        await send_receipts(request, UPDATE, options, result, weight_version=update.weights.version, **more)

    def _check_receiving(self, field: str) -> None:
        """Raises ApiError if there are other engines than vLLM's."""
        members_of(self._engine_client)
        others = {engine.info.engine for engine in self._engine_client.engines if engine.info} - {"vllm"}
        if others:
            kinds = ", ".join(sorted(others))
            message = f"{field} is for vLLM's engines, not {kinds}: give them files or a broadcast."
            raise ApiError(400, message, param=field)

    async def _announce(
        self, update: WeightUpdate, path: str, info: Any, options: OperationOptions
    ) -> OperationResult:
        """Tell the engines what a trainer is about to send. What they have is not sent again."""
        if self._engine_client.states.find(WEIGHTS).value.get("version") == update.weights.version:
            return OperationResult(OperationOutcome.DONE, [])
        arguments = {"path": path, "update_info": info, "timeout_s": options.timeout_s}
        own = replace(options, key=secrets.token_hex(16))
        return await call_engines(self._engine_client, "expect_weights", arguments, own)

    async def version(self, request: ApiRequest) -> None:
        """The version that is desired, and that of each engine."""
        engines = [
            {
                "rank": engine.rank,
                "weight_version": engine.weight_version,
                "generation": engine.weights_status.generation if engine.up else None,
                "error": engine.state_errors.get(WEIGHTS),
            }
            for engine in self._engine_client.engines
        ]
        desired = self._engine_client.states.find(WEIGHTS)
        body = {
            "weight_version": desired.value.get("version", DEFAULT_VERSION),
            "settled": desired.settled,
            "engines": engines,
        }
        await request.http.reply_json(encode_json(body))

    async def checksum(self, request: ApiRequest) -> None:
        """What the weights of each engine are, and whether they are the same."""
        options = operation_options(request.http)
        result = await call_engines(self._engine_client, CHECKSUM, {}, options)
        found = {str(receipt.result) for receipt in result.receipts}
        await send_receipts(request, CHECKSUM, options, result, equal=len(found) == 1)


def _update(body: UpdateWeightsRequest) -> WeightUpdate:
    """What a body asks for. Raises ApiError."""
    sources = (body.path, body.paths, body.broadcast, body.update_info)
    if sources.count(None) != len(sources) - 1:
        _refuse("path", "Give one of path, paths, broadcast and update_info.")
    if body.tensors is not None and body.path is None and body.paths is None:
        _refuse("tensors", "tensors are of a path; those that a trainer sends are named there.")
    paths, field = ([body.path], "path") if body.path is not None else (body.paths or [], "paths")
    for path in paths:
        if not os.path.isabs(path) or "\0" in path:
            _refuse(field, f"{field}: {path!r} is no absolute path.")
    paths = [os.path.normpath(path) for path in paths]
    check_distinct(paths, "paths")
    check_distinct(body.tensors or [], "tensors")
    if body.digests is not None and len(body.digests) != len(paths):
        _refuse("digests", f"digests: there are {len(body.digests)} of {len(paths)} paths.")
    if body.tensors is not None and len(paths) > 1:
        _refuse("tensors", f"tensors are of one path, not of {len(paths)}.")
    if body.tensors is not None and body.whole:
        _refuse("whole", "whole: a model that is replaced as a whole names no tensors.")
    if body.weight_version == DEFAULT_VERSION:
        _refuse("weight_version", f"weight_version: {DEFAULT_VERSION!r} is that of the start.")
    whole = body.tensors is None if body.whole is None else body.whole
    return WeightUpdate(
        DesiredWeights(
            version=body.weight_version,
            sources=[WeightSource(path, body.tensors, part=not whole) for path in paths],
            streams=body.streams,
            cache=body.cache,
        ),
        whole=whole,
    )


def _refuse(field: str, message: str) -> NoReturn:
    raise ApiError(400, message, param=field)


def _transfer(update: WeightUpdate, info: Any) -> WeightSource:
    """The source for what a trainer sends, the same for the same request."""
    name = hashlib.sha256(msgspec.json.encode([update.weights.version, info])).hexdigest()[:16]
    return WeightSource(TRANSFER + name, part=not update.whole)


def _with_digests(sources: Sequence[WeightSource], field: str) -> list[WeightSource]:
    """The sources with the digests of their files. Raises ApiError."""
    found = []
    for source in sources:
        if not os.path.exists(source.path):
            _refuse(field, f"{field}: {source.path!r} does not exist.")
        try:
            found.append(with_digest(source))
        except ValueError as error:
            _refuse(field, f"{field}: {error}.")
    return found


def _check_digests(sources: Sequence[WeightSource], digests: Sequence[str] | None) -> None:
    """Raises ApiError for files other than those that are meant."""
    for number, (source, digest) in enumerate(zip(sources, digests or (), strict=False)):
        if source.digest != digest:
            field, told = f"digests[{number}]", f"the digest of {source.path!r} is {source.digest}"
            _refuse(field, f"{field}: {told}, not {shown(digest)!r}: it has other files.")
