"""Weights that a trainer broadcasts: ``POST /init_weight_transfer``, ``broadcast`` of ``/update_weights``.

The host's receiver writes them to a file, which is then an update's source like any other. A call that is
refused, or fails before all tensors have come, ends the receiver: it could not tell which tensors of the
trainer's are the next ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import msgspec

from penstock.api.api_request import ApiRequest
from penstock.api.routes.receipts import members_of, send_receipts
from penstock.api.routes.weight_schemas import BroadcastManifest, InitWeightTransferRequest
from penstock.dispatch.engine_client import EngineClient
from penstock.dispatch.engine_rpc import OperationOutcome
from penstock.dispatch.weight_changes import WeightChanges, WeightUpdate
from penstock.dispatch.weight_receiver import (
    NoReceiver,
    ReceiverBusy,
    ReceiverLost,
    TransferFailed,
    WeightReceiver,
    remove_files_beside,
)
from penstock.engine.weights.weight_file import WeightFile, with_digest
from penstock.generation.request.body_decoder import BodyDecoder
from penstock.http.admission import unavailable
from penstock.http.errors import ApiError, encode_json
from penstock.http.operation_options import OperationOptions, operation_options
from penstock.wire.messages import WEIGHTS
from penstock.wire.weights.desired import DesiredWeights, WeightSource
from penstock.wire.weights.transfer import STORED_TYPES, BroadcastTensor, TensorType, Transfer

INIT, UPDATE = "init_weight_transfer", "update_weights"
"""Names of the operations in replies."""
MAX_BODY_BYTES = 1 << 12
MAX_GROWTH = 4
"""Maximum bytes of a broadcast, as a multiple of those of the model's files: a model in bfloat16 may come in
float64."""
NOTHING_CHANGED = "No weights have changed."
INIT_AGAIN = "call /init_weight_transfer before the next broadcast."


class WeightTransferRoutes:
    """The handlers of one API server."""

    def __init__(
        self,
        engine_client: EngineClient,
        changes: WeightChanges,
        receiver: WeightReceiver,
        weights_dir: str,
        model_dir: str,
        is_draining: Callable[[], bool],
    ) -> None:
        """``weights_dir``: where files are made. ``is_draining``: whether the server ends, and with it the
        receiver, as another API server may have started it."""
        self._engine_client = engine_client
        self._changes = changes
        self._receiver = receiver
        self._weights_dir = Path(weights_dir)
        self._model_dir = Path(model_dir)
        self._is_draining = is_draining
        self._decode = BodyDecoder(InitWeightTransferRequest, strict=False, once=True).decode

    async def init(self, request: ApiRequest) -> None:
        """Start a receiver that joins the trainer's group, and reply when all have joined."""
        options = operation_options(request.http)
        body = self._decode(await request.http.read_json(MAX_BODY_BYTES))
        if body.rank >= body.world_size:
            message = f"rank: it is {body.rank}, and must be less than world_size, {body.world_size}."
            raise ApiError(400, message, param="rank")
        with self._locked():
            try:
                async with asyncio.timeout(options.timeout_s):
                    await self._receiver.join(
                        body.master_address, body.master_port, body.rank, body.world_size
                    )
            except TransferFailed as error:
                raise ApiError(502, f"The group was not joined: {error}.", code="transfer_failed") from None
            except TimeoutError:
                where, members = f"{body.master_address}:{body.master_port}", body.world_size
                message = (
                    f"The group was not complete within {options.timeout_s:g} s: rank 0 is to listen at "
                    f"{where} (master_address, master_port), and {members} members to join (world_size)."
                )
                raise ApiError(504, message, code="timeout") from None
        reply = {"operation": INIT, "outcome": "done", "rank": body.rank, "world_size": body.world_size}
        await request.http.reply_json(encode_json(reply))

    def give_up(self) -> None:
        """A call about a broadcast was refused before anything was known of it."""
        self._receiver.end_after_transfer()

    async def update(
        self,
        request: ApiRequest,
        options: OperationOptions,
        update: WeightUpdate,
        manifest: BroadcastManifest,
    ) -> None:
        """Receive what a trainer broadcasts, and have all engines compute with it. ``update``: without
        sources."""
        path = self._weights_dir / f"{secrets.token_hex(8)}.safetensors"
        deadline = asyncio.get_running_loop().time() + options.timeout_s
        with self._locked():
            try:
                await self._receive(update, manifest, path, options.timeout_s)
                source = await _received(path, part=not update.whole)
            except BaseException:
                await self._receiver.end()
                path.unlink(missing_ok=True)
                raise
            weights = msgspec.structs.replace(update.weights, sources=[source])
            left = max(1.0, deadline - asyncio.get_running_loop().time())
            result = await self._changes.update(WeightUpdate(weights, update.whole), options.key, left)
            if result.outcome is not OperationOutcome.UNDECIDED:
                await self._remove_old()
        await send_receipts(request, UPDATE, options, result, weight_version=weights.version)

    # -- receiving

    async def _receive(
        self, update: WeightUpdate, manifest: BroadcastManifest, path: Path, timeout_s: float
    ) -> None:
        """Raises ApiError."""
        members_of(self._engine_client)
        tensors = _tensors(manifest)
        version = update.weights.version
        if version == self._engine_client.states.find(WEIGHTS).value.get("version"):
            message = f"weight_version {version!r} is in use; give these weights another one."
            raise ApiError(409, message, param="weight_version", code="conflict")
        await self._remove_old()
        await asyncio.to_thread(self._check, tensors)
        try:
            async with asyncio.timeout(timeout_s):
                await self._receiver.receive(Transfer(str(path), tensors))
        except NoReceiver:
            message = "No receiver has joined a trainer's group: call /init_weight_transfer first."
            raise ApiError(409, message, code="no_weight_transfer") from None
        except TransferFailed as error:
            if isinstance(error, ReceiverLost) and self._is_draining():
                raise unavailable(f"The server was stopped. {NOTHING_CHANGED}", "server_stopped") from None
            message = f"The tensors did not all come: {error}. {NOTHING_CHANGED}"
            raise ApiError(502, message, code="transfer_failed") from None
        except TimeoutError:
            message = f"The tensors did not all come within {timeout_s:g} s. {NOTHING_CHANGED}"
            raise ApiError(504, message, code="timeout") from None

    def _check(self, tensors: Sequence[BroadcastTensor]) -> None:
        """What can be known before anything is received. Raises ApiError."""
        known, model_bytes = stored_shapes(self._model_dir)
        for index, tensor in enumerate(tensors):
            shape = known.get(tensor.name, tensor.shape)
            if shape != tensor.shape:
                field = f"broadcast.shapes[{index}]"
                message = (
                    f"{field}: {tensor.name} is {list(tensor.shape)}, not {list(shape)} as in the model."
                )
                raise ApiError(400, message, param=field)
        size = sum(tensor.size for tensor in tensors)
        if model_bytes and size > MAX_GROWTH * model_bytes:
            message = (
                f"broadcast: {size} bytes are more than {MAX_GROWTH} times those of the model, {model_bytes}."
            )
            raise ApiError(400, message, param="broadcast")
        room = os.statvfs(self._weights_dir)
        free = room.f_bavail * room.f_frsize
        if size > free:
            message = f"broadcast: {size} bytes have no room in {self._weights_dir}, where {free} are free."
            raise ApiError(507, f"{message} Name another directory with --weights-dir.", code="no_room")

    async def _remove_old(self) -> None:
        """Remove the files that neither the desired weights need, nor those to go back to."""
        desired = self._engine_client.states.find(WEIGHTS)
        if desired.settled and not desired.value.get("hold"):
            weights = msgspec.convert(desired.value, DesiredWeights)
            kept = {source.path for source in weights.sources}
            await asyncio.to_thread(remove_files_beside, self._weights_dir, kept)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One call at a time about the receiver. Raises ApiError."""
        try:
            with self._receiver.lock():
                yield
        except ReceiverBusy:
            self._receiver.end_after_transfer()
            message = f"Another call is about the receiver. When it has ended, {INIT_AGAIN}"
            raise ApiError(409, message, code="busy") from None


async def _received(path: Path, *, part: bool) -> WeightSource:
    """The file as a source. Raises ApiError."""
    try:
        return await asyncio.to_thread(with_digest, WeightSource(str(path), part=part))
    except ValueError as error:
        raise ApiError(400, f"broadcast: {error}. {NOTHING_CHANGED}", param="broadcast") from None


def _tensors(manifest: BroadcastManifest) -> list[BroadcastTensor]:
    """Raises ApiError."""
    names = manifest.names
    for field, values in (("dtypes", manifest.dtypes), ("shapes", manifest.shapes)):
        if len(values) != len(names):
            param = f"broadcast.{field}"
            message = f"{param}: there are {len(values)}, not one for each of {len(names)} names."
            raise ApiError(400, message, param=param)
    check_distinct(names, "broadcast.names")
    for index, dtype in enumerate(manifest.dtypes):
        if dtype not in STORED_TYPES:
            param = f"broadcast.dtypes[{index}]"
            message = f"{param}: {dtype!r} is none of {', '.join(STORED_TYPES)}."
            raise ApiError(400, message, param=param)
    found = zip(names, manifest.dtypes, manifest.shapes, strict=True)
    return [BroadcastTensor(name, cast(TensorType, dtype), tuple(shape)) for name, dtype, shape in found]


def check_distinct(values: Sequence[str], field: str) -> None:
    """Refuse a list of names or paths that has one twice. Raises ApiError."""
    seen: set[str] = set()
    for index, value in enumerate(values):
        if value in seen:
            param = f"{field}[{index}]"
            raise ApiError(400, f"{param}: {value!r} is there twice.", param=param)
        seen.add(value)


def stored_shapes(model_dir: Path) -> tuple[dict[str, tuple[int, ...]], int]:
    """Of the tensors in a model's safetensors files: the shapes by name, and the bytes of all. A file that
    cannot be read is left out; engines check all tensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    size = 0
    for path in model_dir.glob("*.safetensors"):
        with contextlib.suppress(ValueError), WeightFile(path) as file:
            shapes |= {name: view.shape for name, view in file.tensors.items()}
            size += path.stat().st_size
    return shapes, size
