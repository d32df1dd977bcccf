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
    rb"^(%b)(?:\{([^\n]*)\})? +([^ \n]+)" % "|".join([*_WAITING, *_RUNNING, *_KV_USED, _ADAPTERS]).encode(),
    re.MULTILINE,
)
_LABEL = re.compile(rb'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


class NoLoadError(ValueError):
    """A scrape found no load: the server is up, but does not export it, or denies access."""


def read_load(text: bytes) -> EndpointLoad:
    """The load in an exposition. Several series of a name are several engines: requests are summed, KV use is
    the maximum. Raises NoLoadError when it has none of the known names."""
    waiting, running, kv_used = 0.0, 0.0, 0.0
    adapters: frozenset[str] = frozenset()
    max_adapters, newest = 0, -1.0
    found = False
    for raw_name, labels, raw_value in _LINE.findall(text):
        found = True
        name, value = raw_name.decode(), _number(raw_value)
        if name in _WAITING:
            waiting += value
        elif name in _RUNNING:
            running += value
        elif name in _KV_USED:
            kv_used = max(kv_used, value)
        elif value > newest:  # the value of a series is its timestamp; old series stay
            newest = value
            adapters, max_adapters = _read_adapters(dict(_LABEL.findall(labels)))
    if not found:
        raise NoLoadError("its /metrics has none of the known load metrics")
    return EndpointLoad(int(waiting), int(running), min(kv_used, 1.0), adapters, max_adapters)


def _read_adapters(labels: dict[bytes, bytes]) -> tuple[frozenset[str], int]:
    names = b",".join([labels.get(b"running_lora_adapters", b""), labels.get(b"waiting_lora_adapters", b"")])
    most = labels.get(b"max_lora", b"0")
    loaded = frozenset(name.strip().decode(errors="replace") for name in names.split(b",") if name.strip())
    return loaded, int(most) if most.isdigit() else 0


def _number(raw: bytes) -> float:
    """The value of a sample; 0 for what is not a finite number of at least 0."""
    try:
        value = float(raw)
    except ValueError:
        return 0.0
    return value if 0.0 <= value < float("inf") else 0.0
