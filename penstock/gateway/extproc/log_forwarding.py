"""Entries of Envoy's access log on their way to the worker that picked.

Envoy's connections are spread over the workers of a gateway, and its access log has connections of its own.
So an entry may reach another worker than the request did. It names the process that picked, which gets it.
Entries wait until they are sent together, a few times a second; in the end, requests without an entry are
counted by their observed reply.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import msgspec

from penstock.gateway.extproc.messages import AccessLogEntry
from penstock.gateway.extproc.routed_requests import NAMESPACE, PICK_KEY, PROCESS_KEY, RoutedRequests
from penstock.gateway.workers.keeper_link import KeeperLink
from penstock.gateway.workers.letters import WorkerName

MAX_WAITING = 1 << 14
"""Entries that wait for one worker; of more the oldest are lost."""
ENTRIES, STREAMS = "log entries", "log streams"

_encode = msgspec.msgpack.Encoder().encode
_entries_decoder = msgspec.msgpack.Decoder(list[AccessLogEntry])
_count_decoder = msgspec.msgpack.Decoder(int)


class LogForwarding:
    """One worker's part."""

    def __init__(self, link: KeeperLink, requests: RoutedRequests) -> None:
        self._link = link
        self._requests = requests
        self._waiting: dict[WorkerName, deque[AccessLogEntry]] = {}
        self._streams: dict[WorkerName, int] = {}
        """Open streams of the access log, by worker."""
        self._streams_reported = 0
        requests.process = self._process_of(link.own)
        requests.forward = self._forward
        link.on(ENTRIES, self._on_entries)
        link.on(STREAMS, self._on_streams)
        link.on_joined.append(self._on_joined)
        link.on_gone.append(self._on_gone)

    def close(self) -> None:
        """This worker ends, and has no streams any more."""
        self._requests.open_log_streams = 0
        self.send()

    def send(self) -> None:
        """Send what waits; called several times a second."""
        count = self._requests.open_log_streams
        if count != self._streams_reported and self._link.tell_others(STREAMS, _encode(count)):
            self._streams_reported = count
        for worker, entries in list(self._waiting.items()):
            if self._link.tell_others(ENTRIES, _encode(list(entries)), worker):
                del self._waiting[worker]

    def _process_of(self, worker: WorkerName) -> str:
        """The process's name in the metadata that Envoy's access log repeats."""
        return f"{self._link.gateway}/{worker}"

    def _forward(self, process: str, entry: AccessLogEntry) -> bool:
        """Whether ``process``, which picked, is another worker of this gateway: then it gets the entry."""
        for worker in self._link.siblings:
            if self._process_of(worker) == process:
                reported = entry.metadata.get(NAMESPACE, {})
                kept = {key: reported[key] for key in (PROCESS_KEY, PICK_KEY) if key in reported}
                waiting = self._waiting.setdefault(worker, deque(maxlen=MAX_WAITING))
                waiting.append(replace(entry, metadata={NAMESPACE: kept}))  # the rest may be large
                return True
        return False

    def _on_entries(self, caller: WorkerName | None, data: bytes) -> None:
        """Entries of requests that this worker has picked, or that one has which has ended meanwhile: the
        keeper sends those back."""
        for entry in _entries_decoder.decode(data):
            self._requests.on_log_entry(entry)

    def _on_streams(self, caller: WorkerName | None, data: bytes) -> None:
        if caller is not None:
            self._streams[caller] = _count_decoder.decode(data)
        self._requests.log_streams_elsewhere = sum(self._streams.values())

    def _on_joined(self, worker: WorkerName) -> None:
        self._streams_reported = 0

    def _on_gone(self, worker: WorkerName) -> None:
        """What it picked is counted as that of another gateway. If it had streams it was killed, and what it
        had not forwarded is lost."""
        if self._streams.pop(worker, 0):
            self._requests.on_entries_lost()
        self._requests.log_streams_elsewhere = sum(self._streams.values())
        for entry in self._waiting.pop(worker, ()):
            self._requests.on_log_entry(entry)
