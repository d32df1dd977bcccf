"""LoRA adapters: vLLM's ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, and ``/admin/adapters``.

A reply has one receipt per engine. After a 200 every API server knows the adapter, or does not any more, and
all engines have it, or none takes new streams of it; streams that run with it finish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec

from penstock.adapters.adapter_files import check_adapter, describe_adapter
from penstock.adapters.adapter_names import check_name
from penstock.adapters.errors import AdapterError
from penstock.adapters.lora_dir import path_below
from penstock.api.api_request import ApiRequest, Handler
from penstock.api.routes.adapter_schemas import (
    LoadAdapterRequest,
    LoadLoraAdapterRequest,
    UnloadLoraAdapterRequest,
)
from penstock.api.routes.receipts import send_receipts
from penstock.config.serve import ServeConfig
from penstock.dispatch.adapter_changes import AdapterChanges, NameTaken, TooManyAdapters
from penstock.dispatch.engine_client import EngineClient
from penstock.dispatch.engine_rpc import OperationOutcome, OperationResult
from penstock.generation.input_processor import InputProcessor
from penstock.http.admission import unavailable
from penstock.http.eager import in_task
from penstock.http.errors import ApiError, encode_json, names_in_error
from penstock.http.operation_options import OperationOptions, operation_options
from penstock.http.repeated_names import check_names
from penstock.wire.messages import Adapter, LoraInfo

LIST = "/admin/adapters"
PREFIX = "/admin/adapters/"
LOAD, UNLOAD = "load_adapter", "unload_adapter"
"""Names of the operations in replies."""
MAX_BODY_BYTES = 1 << 16

Body = TypeVar("Body", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class _Load:
    """A request to load an adapter; ``fields``: what the body calls its fields."""

    name: str
    path: str
    replace: bool
    name_field: str = "name"
    path_field: str = "path"
    replace_field: str = "replace"


class AdapterRoutes:
    """The handlers."""

    def __init__(
        self,
        config: ServeConfig,
        engine_client: EngineClient,
        changes: AdapterChanges,
        processor: InputProcessor,
    ) -> None:
        self._lora_dir = config.lora_dir
        self._engine_client = engine_client
        self._registry = engine_client.adapters
        self._changes = changes
        self._processor = processor
        self._decode_vllm_load = processor.decoder(LoadLoraAdapterRequest).decode
        self._decode_vllm_unload = processor.decoder(UnloadLoraAdapterRequest).decode
        self._decode_load = processor.decoder(LoadAdapterRequest).decode
        self._thread = ThreadPoolExecutor(1, "adapter files")
        """Reads one adapter's files at a time."""

    def methods(self, path: str) -> dict[str, Handler] | None:
        """Handlers by HTTP method of a path below PREFIX."""
        name = path.removeprefix(PREFIX)
        return {"DELETE": in_task(partial(self._delete, name=name))} if name else None

    # -- handlers

    async def list(self, request: ApiRequest) -> None:
        """The desired list, and what each engine has of it."""
        await request.http.reply_json(encode_json({"adapters": describe_adapters(self._engine_client)}))

    async def load(self, request: ApiRequest) -> None:
        options = operation_options(request.http)
        body = await self._body(request, self._decode_load)
        await self._load(request, options, _Load(body.name, body.path, body.replace))

    async def vllm_load(self, request: ApiRequest) -> None:
        options = operation_options(request.http)
        body = await self._body(request, self._decode_vllm_load)
        fields = ("lora_name", "lora_path", "load_inplace")
        await self._load(request, options, _Load(body.lora_name, body.lora_path, body.load_inplace, *fields))

    async def vllm_unload(self, request: ApiRequest) -> None:
        options = operation_options(request.http)
        body = await self._body(request, self._decode_vllm_unload)
        await self._unload(request, options, body.lora_name, "lora_name")

    async def _delete(self, request: ApiRequest, name: str) -> None:
        await self._unload(request, operation_options(request.http), name, "name")

    async def _body(self, request: ApiRequest, decode: Callable[[bytes], Body]) -> Body:
        raw = await request.http.read_json(MAX_BODY_BYTES)
        body = decode(raw)
        check_names(raw)
        return body

    # -- loading

    async def _load(self, request: ApiRequest, options: OperationOptions, asked: _Load) -> None:
        limits = self._limits()
        if self._lora_dir is None:
            raise ApiError(
                403,
                "Requests may load no adapters: serve with --lora-dir DIR, the directory of those that they "
                "may.",
                code="no_lora_dir",
            )
        self._check_name(asked)
        try:
            adapter = await self._read(asked, self._lora_dir, limits, options.timeout_s)
        except AdapterError as error:
            raise ApiError(400, f"{asked.path_field}: {error}", param=asked.path_field) from None
        except TimeoutError:
            reason = f"The files could not be read within {options.timeout_s:g} s."
            await send_receipts(request, LOAD, options, OperationResult(OperationOutcome.ABORTED, [], reason))
            return
        making = self._changes.load(adapter, options.key, options.timeout_s, replace=asked.replace)
        try:
            await self._reply(request, LOAD, options, making, adapter=_facts(adapter))
        except NameTaken as error:
            told = f"{asked.name_field}: {error}. Set {asked.replace_field} to take its place."
            raise ApiError(400, told, param=asked.replace_field) from None

    def _check_name(self, asked: _Load) -> None:
        try:
            check_name(asked.name)
        except AdapterError as error:
            raise ApiError(400, f"{asked.name_field}: {error}", param=asked.name_field) from None
        for taken, what in (
            (self._processor.model_info.names, "a name of the model"),
            (self._processor.aliases.exact, "an alias (--model-alias)"),
        ):
            if asked.name in taken:
                raise ApiError(400, f"{asked.name_field}: {asked.name!r} is {what}.", param=asked.name_field)

    async def _read(self, asked: _Load, lora_dir: str, limits: LoraInfo, timeout_s: float) -> Adapter:
        """Read and check the files. Raises AdapterError, and TimeoutError if that takes too long."""

        parent = self._processor.model_info.names[0]

        def read() -> Adapter:
            path = path_below(lora_dir, asked.path)
            files = describe_adapter(path, limits)
            check_adapter(files, limits)
            return Adapter(asked.name, path, parent, files.digest, files.rank)

        reading = asyncio.get_running_loop().run_in_executor(self._thread, read)
        return await asyncio.wait_for(reading, timeout_s)

    # -- unloading

    async def _unload(self, request: ApiRequest, options: OperationOptions, name: str, field: str) -> None:
        self._limits()
        if name not in self._registry and not self._changes.knows(options.key):
            loaded = names_in_error(self._registry.adapters) or "none"
            message = f"No adapter has the name {name!r}. Loaded are: {loaded}."
            raise ApiError(404, message, param=field, code="model_not_found")
        await self._reply(
            request, UNLOAD, options, self._changes.unload(name, options.key, options.timeout_s)
        )

    # -- both

    def _limits(self) -> LoraInfo:
        """What the engines can load. Raises ApiError."""
        limits = self._changes.limits()
        if limits is not None:
            return limits
        if any(engine.up for engine in self._engine_client.engines):
            raise ApiError(404, "The engines run no adapters: serve with --enable-lora.", code="no_lora")
        raise unavailable("There is no engine.", "no_engine")

    async def _reply(
        self,
        request: ApiRequest,
        operation: str,
        options: OperationOptions,
        making: Coroutine[Any, Any, OperationResult],
        **more: Any,
    ) -> None:
        """Answer when the change is made. ``more``: further fields then. Raises ApiError and NameTaken."""
        try:
            result = await making
        except TooManyAdapters as error:
            raise ApiError(400, f"{error}.", code="too_many_adapters") from None
        await send_receipts(request, operation, options, result, **more)


def _facts(adapter: Adapter) -> dict[str, Any]:
    return {
        "name": adapter.name,
        "path": adapter.path,
        "parent": adapter.parent,
        "rank": adapter.rank,
        "digest": adapter.digest,
    }


def describe_adapters(engine_client: EngineClient) -> list[dict[str, Any]]:
    """The adapters of the desired list, each with the ranks of the engines that have it, and why others lack
    it, by rank."""
    described = []
    for adapter in engine_client.adapters.adapters.values():
        up = [engine for engine in engine_client.engines if engine.up]
        missing = {str(engine.rank): engine.missing_adapters.get(adapter.name) for engine in up}
        described.append(
            {
                **_facts(adapter),
                "engines": [engine.rank for engine in up if engine.has_adapter(adapter.key)],
                "missing": {rank: reason for rank, reason in missing.items() if reason is not None},
            }
        )
    return described
