"""Where an engine's pages come from: the host's store or, if that lacks them, the API server of the stream
that needs them, which is on another host.

Each API server is asked for itself, once for all its streams: one that stalls holds nobody else's. What it
sends is checked, and goes into the store, whose room the least recently used pages make. Whether pages are
there is looked up again when a picture is encoded; so nothing has to be kept for streams that wait.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeAlias

from penstock.logging_setup import RateLimitedLog
from penstock.media.pages import Pages, unsealed
from penstock.media.store import Lease, MediaStore, StoreFull
from penstock.wire.media.items import MediaItem, MediaKey, PagePiece, PagesWanted
from penstock.wire.messages import MEDIA_GONE, UNAVAILABLE, WireError

log = logging.getLogger(__name__)

MAX_WANTED_BYTES = 256 << 20
"""Bytes of pages that one API server is asked for at a time, unless a single picture has more: so much of the
engine's memory its pieces take."""
DIGEST_BYTES = 32

Want: TypeAlias = tuple[int, MediaKey]
"""API server and picture."""


@dataclass(slots=True)
class _Transfer:
    size: int
    data: bytearray = field(default_factory=bytearray)
    digest: Any = field(default_factory=lambda: blake2b(digest_size=DIGEST_BYTES))
    written: Future[None] | None = None
    """None: pieces are missing."""


class PageSupply:
    """Looks pages up in the store, and asks for those that it lacks."""

    def __init__(self, store: MediaStore) -> None:
        self.asked = 0
        """Times that API servers were asked, since the start."""
        self._store = store
        self._warn = RateLimitedLog(log)
        self._transfers: dict[Want, _Transfer] = {}
        """Asked for, and not all there."""
        self._later: dict[int, OrderedDict[MediaKey, int]] = {}
        """By API server, pictures to be asked for when others have come, with their size."""
        self._bytes: Counter[int] = Counter()
        """Of the transfers, by API server."""
        self._to_send: list[tuple[int, PagesWanted]] = []
        self._settled: list[tuple[Want, str]] = []
        """What is there, with an empty code, or will not come."""
        self._leases: dict[MediaKey, Lease] = {}
        """Of the pictures that the step encodes."""
        self._writer: ThreadPoolExecutor | None = None

    # -- the engine's side

    def has(self, server: int, item: MediaItem, *, keep: bool = False) -> bool:
        """Whether the pages are in the store; otherwise the API server is asked for them, if it has not been.
        ``keep``: they stay until the next step begins."""
        if item.key in self._leases:
            return True
        lease = self._store.lease(item.key)
        if lease is None:
            self._want(server, item.key, item.size)
            return False
        if keep:
            self._leases[item.key] = lease
        else:
            lease.close()
        return True

    def read(self, item: MediaItem) -> Pages:
        """Raises LookupError if the pages are not there."""
        lease = self._leases.get(item.key) or self._store.lease(item.key)
        if lease is None:
            raise LookupError(f"the pages of picture {item.key.hex()} are gone")
        with lease:
            self._leases.pop(item.key, None)
            return lease.pages()

    def begin_step(self) -> None:
        """What was kept for the step before may go."""
        for lease in self._leases.values():
            lease.close()
        self._leases.clear()

    @property
    def is_pending(self) -> bool:
        """Whether there is, or will be, something to settle."""
        return bool(self._transfers or self._settled)

    def take_settled(self) -> list[tuple[Want, str]]:
        """What has come since the last call, with an empty code, or will not come, with that of its streams'
        failure. Who still needs it is to look again."""
        for want, transfer in list(self._transfers.items()):
            if transfer.written is not None and transfer.written.done():
                fault = transfer.written.exception()
                if isinstance(fault, OSError):
                    self._warn("store", "pages of a picture cannot be kept: %s", fault)
                elif fault is not None and not isinstance(fault, StoreFull):
                    raise fault
                self._settle(want, UNAVAILABLE if fault else "")
        settled, self._settled = self._settled, []
        return settled

    # -- messages

    def take_wanted(self) -> list[tuple[int, PagesWanted]]:
        """What to ask API servers for."""
        to_send, self._to_send = self._to_send, []
        return to_send

    def receive(self, server: int, piece: PagePiece) -> None:
        """A piece has come. Raises WireError if it is not the one that follows, or the file is not what it
        should be."""
        want = server, piece.key
        transfer = self._transfers.get(want)
        if transfer is None:
            return  # its streams were dropped with an earlier connection
        if not piece.data and not piece.position:
            self._settle(want, MEDIA_GONE)
            return
        data, end = transfer.data, piece.position + len(piece.data)
        if piece.position != len(data) or transfer.written is not None:
            raise WireError(f"it sent pages from byte {piece.position} on, {len(data)} are there")
        if end > transfer.size:
            raise WireError(f"it sent {end} bytes of pages, Submit.media says {transfer.size}")
        data += piece.data
        transfer.digest.update(piece.data)
        if piece.digest:
            self._check(transfer, piece.digest)
            self._writer = self._writer or ThreadPoolExecutor(1, "pages")
            transfer.written = self._writer.submit(self._write, piece.key, data)

    def _check(self, transfer: _Transfer, digest: bytes) -> None:
        if transfer.digest.digest() != digest or len(transfer.data) != transfer.size:
            raise WireError("it sent pages that are not those of their digest and size")
        try:
            unsealed(memoryview(transfer.data))
        except ValueError as error:
            raise WireError(f"it sent {error}") from None

    def _write(self, key: MediaKey, data: bytearray) -> None:
        self._store.put(key, [memoryview(data)]).close()

    def close(self) -> None:
        """Finish what is being written."""
        self.begin_step()
        if self._writer is not None:
            self._writer.shutdown()

    def drop_server(self, server: int) -> None:
        """An API server is gone, with its streams."""
        for want in [want for want in self._transfers if want[0] == server]:
            del self._transfers[want]
        self._later.pop(server, None)
        self._bytes.pop(server, None)
        self._to_send = [entry for entry in self._to_send if entry[0] != server]

    def _want(self, server: int, key: MediaKey, size: int) -> None:
        if (server, key) in self._transfers:
            return
        later = self._later.setdefault(server, OrderedDict())
        later[key] = size
        self._ask(server)

    def _ask(self, server: int) -> None:
        """Ask for what waits, as far as there is room."""
        while later := self._later.get(server):
            key, size = next(iter(later.items()))
            if self._bytes[server] and self._bytes[server] + size > MAX_WANTED_BYTES:
                return
            del later[key]
            self._bytes[server] += size
            self._transfers[server, key] = _Transfer(size)
            self._to_send.append((server, PagesWanted(key)))
            self.asked += 1
        self._later.pop(server, None)

    def _settle(self, want: Want, code: str) -> None:
        self._bytes[want[0]] -= self._transfers.pop(want).size
        self._settled.append((want, code))
        if not code:  # whoever waits for another API server's may go on
            self._settled += [(other, "") for other in self._transfers if other[1] == want[1]]
        self._ask(want[0])
