"""Reads an endpoint's load from its ``/metrics``, for several kinds of servers.

Only lines with the names below are parsed: a scrape of a large server is hundreds of kilobytes, several
times a second for each of many endpoints.
"""

from __future__ import annotations

import re

from penstock.gateway.routing.endpoint import EndpointLoad

_WAITING = (
    "vllm:num_requests_waiting",
    "sglang:num_queue_reqs",
    "llamacpp:requests_deferred",
    "tgi_queue_size",
)
_RUNNING = (
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "llamacpp:requests_processing",
    "tgi_batch_current_size",
)
_KV_USED = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
)
_ADAPTERS = "vllm:lora_requests_info"
_LINE = re.compile(
    rb"\n(%b)(?:\{([^\n]*)\})? +([^ \n]+)" % "|".join([*_WAITING, *_RUNNING, *_KV_USED, _ADAPTERS]).encode()
)
"""A line with the end of the line before it, which is found five times as fast as the beginning of one."""
MAX_LINE_BYTES = 64 << 10
"""Maximum bytes that are read of a line."""
MAX_VALUE = 1 << 40
"""A larger value is none. The sums of a page's series fit into 64 bits, which workers exchange."""
_LABEL = re.compile(rb'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


class NoLoadError(ValueError):
    """A scrape found no load: the server is up, but does not export it, or denies access."""


class LoadReader:
    """Reads the load in an exposition as it comes, in pieces. Several series of a name are several engines:
    requests are summed, KV use is the maximum."""

    def __init__(self) -> None:
        self._line = b""
        """Start of the line that is incomplete."""
        self._found = False
        self._waiting = self._running = self._kv_used = 0.0
        self._adapters: tuple[frozenset[str], int] = frozenset(), 0
        self._adapters_at = -1.0

    def feed(self, piece: bytes) -> None:
        """Read the lines that ``piece`` completes. A line is read up to MAX_LINE_BYTES."""
        end = piece.rfind(b"\n") + 1
        if end:
            self._read(self._line + piece[:end])
            self._line = piece[end:]
        else:
            self._line = (self._line + piece)[:MAX_LINE_BYTES]

    def load(self) -> EndpointLoad:
        """The load; nothing else comes. Raises NoLoadError when there was none of the known names."""
        self._read(self._line)
        if not self._found:
            raise NoLoadError("its /metrics has none of the known load metrics")
        adapters, max_adapters = self._adapters
        return EndpointLoad(
            int(self._waiting), int(self._running), min(self._kv_used, 1.0), adapters, max_adapters
        )

    def _read(self, lines: bytes) -> None:
        for raw_name, labels, raw_value in _LINE.findall(b"\n" + lines):
            self._found = True
            name, value = raw_name.decode(), _number(raw_value)
            if name in _WAITING:
                self._waiting += value
            elif name in _RUNNING:
                self._running += value
            elif name in _KV_USED:
                self._kv_used = max(self._kv_used, value)
            elif value > self._adapters_at:  # the value of a series is its timestamp; old series stay
                self._adapters_at = value
                self._adapters = _read_adapters(dict(_LABEL.findall(labels)))


def _read_adapters(labels: dict[bytes, bytes]) -> tuple[frozenset[str], int]:
    names = b",".join([labels.get(b"running_lora_adapters", b""), labels.get(b"waiting_lora_adapters", b"")])
    most = labels.get(b"max_lora", b"0")
    loaded = frozenset(name.strip().decode(errors="replace") for name in names.split(b",") if name.strip())
    return loaded, int(_number(most))


def _number(raw: bytes) -> float:
    """The value of a sample; 0 for what is not a number from 0 to MAX_VALUE."""
    try:
        value = float(raw)
    except ValueError:
        return 0.0
    return value if 0.0 <= value <= MAX_VALUE else 0.0
