"""Weights: ``POST /update_weights``, ``GET /weight_version`` and ``GET /weights_checksum``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import msgspec

from penstock.api.api_request import ApiRequest
from penstock.api.routes.receipts import call_engines, members_of, send_receipts
from penstock.api.routes.weight_schemas import UpdateWeightsRequest
from penstock.api.routes.weight_transfer import WeightTransferRoutes
from penstock.dispatch.engine_client import EngineClient
from penstock.dispatch.weight_changes import TooManySources, WeightChanges, WeightUpdate
from penstock.engine.weights.weight_file import with_digest
from penstock.generation.request.body_decoder import BodyDecoder
from penstock.http.errors import ApiError, encode_json
from penstock.http.operation_options import operation_options
from penstock.wire.messages import WEIGHTS
from penstock.wire.weights import DEFAULT_VERSION, DesiredWeights, WeightSource

UPDATE, CHECKSUM = "update_weights", "weights_checksum"
"""Names of the operations in replies."""
MAX_BODY_BYTES = 8 << 20
"""A broadcast of 48 layers with 128 experts has 18,000 tensors; their names alone take a megabyte."""


class WeightRoutes:
    """The handlers."""

    def __init__(
        self, engine_client: EngineClient, changes: WeightChanges, transfers: WeightTransferRoutes
    ) -> None:
        self._engine_client = engine_client
        self._changes = changes
        self.transfers = transfers
        self._decode = BodyDecoder(UpdateWeightsRequest, strict=False).decode

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
        field = "path" if body.paths is None else "paths"
        found = await asyncio.to_thread(_with_digests, update.weights.sources, field)
        update = replace(update, weights=msgspec.structs.replace(update.weights, sources=found))
        members_of(self._engine_client)
        try:
            result = await self._changes.update(update, options.key, options.timeout_s)
        except TooManySources as error:
            raise ApiError(400, f"{error}.", param="whole", code="too_many_sources") from None
        await send_receipts(request, UPDATE, options, result, weight_version=update.weights.version)

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
    if (body.path is None) + (body.paths is None) + (body.broadcast is None) != 2:
        _refuse("path", "Give one of path, paths and broadcast.")
    if body.broadcast is not None and body.tensors is not None:
        _refuse("tensors", "tensors are of a path; those of a broadcast are named there.")
    paths, field = ([body.path], "path") if body.path is not None else (body.paths or [], "paths")
    for path in paths:
        if not os.path.isabs(path) or "\0" in path:
            _refuse(field, f"{field}: {path!r} is no absolute path.")
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
            sources=[WeightSource(os.path.normpath(path), body.tensors, part=not whole) for path in paths],
            streams=body.streams,
            cache=body.cache,
        ),
        whole=whole,
    )


def _refuse(field: str, message: str) -> NoReturn:
    raise ApiError(400, message, param=field)


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
