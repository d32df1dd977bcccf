"""Stored responses: read, delete, cancel, and their input items and events.

What a key has not stored does not exist for it: unknown ids and those of other keys get the same 404.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

from penstock.api.api_request import ApiRequest, Handler
from penstock.api.event_follower import follow
from penstock.http.eager import in_task
from penstock.http.errors import ApiError, encode_json, shown
from penstock.store.response_object import inputs_of, outputs_of
from penstock.store.response_store import PREFIX as ID_PREFIX
from penstock.store.response_store import ResponseStore
from penstock.store.stored_response import StoredResponse

PREFIX = "/v1/responses/"
MAX_ITEMS, DEFAULT_ITEMS = 100, 20
"""Input items of one reply, as at OpenAI."""
MAX_READS = 4
"""Whole responses, or the conversations before them, that are read at the same time; further requests wait.
Each takes up to 32 MiB, and 0.1 s of the store's thread."""


class ResponseRoutes:
    """The routes below PREFIX."""

    def __init__(self, store: ResponseStore | None, keep_alive_s: float) -> None:
        """``keep_alive_s``: longest silence of a stream of events; 0: any."""
        self._store = store
        self._keep_alive_s = keep_alive_s
        self._reads = asyncio.Semaphore(MAX_READS)

    def methods(self, path: str) -> dict[str, Handler] | None:
        """Handlers by HTTP method; None if there is no such route."""
        id, _, action = path.removeprefix(PREFIX).partition("/")
        match action:
            case "" if id.startswith(ID_PREFIX):  # others, such as compact, are routes of other servers
                return {"GET": self._of(id, self._retrieve), "DELETE": self._of(id, self._delete)}
            case "cancel":
                return {"POST": self._of(id, self._cancel)}
            case "input_items":
                return {"GET": self._of(id, self._input_items)}
        return None

    def _of(
        self, id: str, handle: Callable[[ResponseStore, str, ApiRequest], Coroutine[Any, Any, None]]
    ) -> Handler:
        if self._store is None:
            raise ApiError(404, "This server stores no responses (--response-store off).")
        return in_task(partial(handle, self._store, id))

    async def _retrieve(self, store: ResponseStore, id: str, request: ApiRequest) -> None:
        query = _query(request)
        if query.get("stream", "false").lower() in ("true", "1"):
            await self._stream(store, id, request, query)
            return
        async with self._reads:
            found = await store.get(id, _tenant(request))
        if found is None:
            raise _unknown(id)
        await request.http.reply_json(found.body)

    async def _stream(
        self, store: ResponseStore, id: str, request: ApiRequest, query: Mapping[str, str]
    ) -> None:
        after = _integer(query, "starting_after", -1, least=0, most=1 << 53)
        entry = await store.entry(id, _tenant(request))
        if entry is None:
            raise _unknown(id)
        if not entry.background:
            raise ApiError(
                400,
                f"The response {shown(id)} was not made with background: true: its events are not stored.",
                param="stream",
            )
        await follow(request, store, id, _tenant(request), after, self._keep_alive_s)

    async def _delete(self, store: ResponseStore, id: str, request: ApiRequest) -> None:
        if not await store.delete(id, _tenant(request)):
            raise _unknown(id)
        await request.http.reply_json(encode_json({"id": id, "object": "response", "deleted": True}))

    async def _cancel(self, store: ResponseStore, id: str, request: ApiRequest) -> None:
        tenant = _tenant(request)
        entry = await store.entry(id, tenant)
        if entry is None:
            raise _unknown(id)
        if not entry.background:
            raise ApiError(
                400, f"The response {shown(id)} was not made with background: true and cannot be cancelled."
            )
        await store.cancel(id, tenant)
        async with self._reads:
            found = await store.get(id, tenant)
        if found is None:
            raise _unknown(id)
        await request.http.reply_json(found.body)

    async def _input_items(self, store: ResponseStore, id: str, request: ApiRequest) -> None:
        query = _query(request)
        limit = _integer(query, "limit", DEFAULT_ITEMS, least=1, most=MAX_ITEMS)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order is {shown(order)!r}; it takes asc or desc.", param="order")
        read = partial(_page, order=order, after=query.get("after"), limit=limit)
        async with self._reads:
            page = await store.context(id, _tenant(request), read)
        if page is None:
            raise _unknown(id)
        await request.http.reply_json(page)


def _page(context: list[StoredResponse], *, order: str, after: str | None, limit: int) -> bytes | None:
    """A list of what a response answered, as JSON; None without a response."""
    if not context:
        return None
    items = [item for response in context[:-1] for item in (*inputs_of(response), *outputs_of(response))]
    items += inputs_of(context[-1])
    if order == "desc":
        items.reverse()
    if after is not None:
        ids = [item.id for item in items]
        if after not in ids:
            raise ApiError(400, f"after is {shown(after)!r}, which is no item's id.", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    reply = {
        "object": "list",
        "data": [item.json for item in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": len(items) > limit,
    }
    return encode_json(reply)


def _tenant(request: ApiRequest) -> str:
    return request.tenant or ""


def _unknown(id: str) -> ApiError:
    return ApiError(404, f"Response with id {shown(id)!r} not found.")


def _query(request: ApiRequest) -> dict[str, str]:
    text = request.http.query.decode("latin-1")
    return dict(parse_qsl(text, keep_blank_values=True))


def _integer(query: Mapping[str, str], name: str, default: int, *, least: int, most: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most:
        return int(text)
    raise ApiError(400, f"{name} is {shown(text)!r}; it takes an integer from {least} to {most}.", param=name)
