"""Keeps a copy of the objects of one kind: lists them once, then follows their changes.

The protocol is that of every Kubernetes controller: list, then watch from the list's version. A watch that
breaks is resumed from the last version seen; when the API server has forgotten that version (410), the
objects are listed again. While the API server cannot be reached, the copy stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

import msgspec

from penstock.gateway.discovery.kubernetes_api import ApiServerError, KubernetesApi, SilenceError
from penstock.gateway.discovery.kubernetes_objects import Resource, T
from penstock.gateway.discovery.retry_delay import RetryDelay

log = logging.getLogger(__name__)

PAGE_OBJECTS = 250
"""Objects per page of a list: about 2 MB of pods, decoded in 3 ms."""
WATCH_S = 300
"""A watch lasts up to twice as long; at random, so that those of many clients do not end together."""
SHORT_WATCH_S = 1.0
"""A watch that ends sooner, without any event, counts as a failure."""
ABSENT_S = 15.0
"""Interval of tries for a kind that the cluster does not have, or does not let us see."""
FORBIDDEN, NOT_FOUND, GONE = 403, 404, 410
ABSENT_STATUSES = frozenset({FORBIDDEN, NOT_FOUND})


class _ListMetadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class _Page(msgspec.Struct):
    metadata: _ListMetadata
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Versioned(msgspec.Struct):
    """What is read of every object, even if the rest is malformed."""

    class WatchMetadata(msgspec.Struct, rename="camel"):
        name: str = ""
        resource_version: str = ""

    metadata: WatchMetadata


class _Status(msgspec.Struct):
    """The object of an ``ERROR`` event."""

    message: str = ""
    code: int = 0


UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
Decoded = TypeVar("Decoded")

_decode_page = msgspec.json.Decoder(_Page).decode
_decode_event = msgspec.json.Decoder(_Event).decode
_decode_versioned = msgspec.json.Decoder(_Versioned).decode
_decode_status = msgspec.json.Decoder(_Status).decode


class ResourceWatch(Generic[T]):
    """The objects of one kind in one namespace."""

    def __init__(
        self,
        api: KubernetesApi,
        resource: Resource[T],
        namespace: str,
        on_change: Callable[[], None],
        *,
        selectors: Mapping[str, str] | None = None,
        optional: bool = False,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``on_change`` is called after every change of :attr:`objects`, and when they are known first.
        ``selectors``: ``labelSelector`` and ``fieldSelector``. ``optional``: many clusters lack this kind."""
        self.objects: dict[str, T] = {}
        """Objects by name."""
        self.synced = False
        """Whether the objects have been listed once."""
        self.seen_at: float | None = None
        """When the API server was heard last: the objects were current then. None: never."""
        self.failures = 0
        """Requests that the API server refused or did not answer."""
        self._api = api
        self._path = resource.path(namespace)
        self._selectors = dict(selectors or {})
        self._on_change = on_change
        self._optional = optional
        self._sleep = sleep
        self._decode = msgspec.json.Decoder(resource.type).decode
        self._version = ""
        """Where the watch resumes; empty: the objects have to be listed."""
        self._delay = RetryDelay()
        self._problem = ""
        """The problem logged last, so that it is not logged at every try."""

    async def run(self) -> None:
        """Follow the objects until cancelled."""
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except ApiServerError as error:
                await self._sleep(self._after(error))

    def _after(self, error: ApiServerError) -> float:
        """Seconds until the next try."""
        if error.status == GONE:
            log.info("%s: listed again: %s", self._path, error)
            self._version = ""
            return self._delay.next()
        if self._optional and error.status == NOT_FOUND:
            return ABSENT_S
        self.failures += 1
        problem = str(error)
        if problem != self._problem:
            log.warning("%s: %s%s", self._path, problem, "; the last state stays" if self.synced else "")
            self._problem = problem
        if error.status in ABSENT_STATUSES:
            return ABSENT_S
        return max(self._delay.next(), error.retry_after_s or 0.0)

    # -- list

    async def _list(self) -> None:
        """Raises ApiServerError."""
        query = {**self._selectors, "limit": str(PAGE_OBJECTS)}
        found: dict[str, T] = {}
        while True:
            page = _read(_decode_page, await self._api.get(self._path, query))
            for raw in page.items or ():
                self._store(raw, found)
            if not page.metadata.continue_:
                break
            query["continue"] = page.metadata.continue_
        self._version = page.metadata.resource_version
        self.seen_at = asyncio.get_running_loop().time()
        if found != self.objects or not self.synced:
            self.objects, self.synced = found, True
            self._on_change()

    # -- watch

    async def _watch(self) -> None:
        """Follow changes until the API server ends the watch, as it does after some minutes. Raises
        ApiServerError."""
        now = asyncio.get_running_loop().time
        began, events = now(), 0
        query = {
            **self._selectors,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(random.randint(WATCH_S, 2 * WATCH_S)),
        }
        async with contextlib.aclosing(self._api.stream(self._path, query)) as lines:
            try:
                async for line in lines:
                    self._on_event(_read(_decode_event, line))
                    self._heard()
                    events += 1
            except SilenceError:
                return  # the connection may be dead; the next watch begins where this one was
        if not events and now() - began < SHORT_WATCH_S:
            raise ApiServerError("the API server ended a watch at once")
        self._heard()

    def _on_event(self, event: _Event) -> None:
        """Raises ApiServerError."""
        if event.type == "ERROR":
            status = _read(_decode_status, event.object)
            # What a watch missed before an error is unknown, whatever the error: list again.
            raise ApiServerError(status.message or "the watch failed", GONE)
        metadata = _read(_decode_versioned, event.object).metadata
        if event.type in ("ADDED", "MODIFIED"):
            self._store(event.object, self.objects)
            self._on_change()
        elif event.type == "DELETED" and self.objects.pop(metadata.name, None) is not None:
            self._on_change()
        if metadata.resource_version:  # of bookmarks too
            self._version = metadata.resource_version

    def _store(self, raw: msgspec.Raw, objects: dict[str, T]) -> None:
        """An object that is malformed does not replace an earlier version of it."""
        try:
            item = self._decode(raw)
        except UNREADABLE as error:
            name = _read(_decode_versioned, raw).metadata.name
            log.error("%s/%s: %s; it is ignored", self._path, name, error)
            if name in self.objects:
                objects[name] = self.objects[name]
        else:
            objects[item.metadata.name] = item

    def _heard(self) -> None:
        self.seen_at = asyncio.get_running_loop().time()
        self._delay.reset()
        if self._problem:
            log.info("%s: followed again", self._path)
        self._problem = ""


def _read(decode: Callable[[bytes | msgspec.Raw], Decoded], data: bytes | msgspec.Raw) -> Decoded:
    """Raises ApiServerError: what the API server meant is unknown, so the objects are listed again."""
    try:
        return decode(data)
    except UNREADABLE as error:
        raise ApiServerError(f"malformed reply: {error}", GONE) from None
