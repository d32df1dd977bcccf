"""An endpoint's load from its ``/metrics``, whatever kind of server it is.

Only the lines of the names below are read: a scrape of a large server is hundreds of kilobytes, several
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
    """A reply to a scrape that says nothing about load: by a server that is there, but does not measure, or
    does not tell us."""


def read_load(text: bytes) -> EndpointLoad:
    """The load in an exposition. Several series of a name are several engines: requests are added up, of KV
    use the highest counts. Raises NoLoadError when none of the known names is in it."""
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
        elif value > newest:  # the value of a series is when it was written; old ones stay
            newest = value
            adapters, max_adapters = _read_adapters(dict(_LABEL.findall(labels)))
    if not found:
        raise NoLoadError("none of the known names of load metrics is in its /metrics")
    return EndpointLoad(int(waiting), int(running), min(kv_used, 1.0), adapters, max_adapters)


def _read_adapters(labels: dict[bytes, bytes]) -> tuple[frozenset[str], int]:
    names = b",".join([labels.get(b"running_lora_adapters", b""), labels.get(b"waiting_lora_adapters", b"")])
    most = labels.get(b"max_lora", b"0")
    loaded = frozenset(name.strip().decode(errors="replace") for name in names.split(b",") if name.strip())
    return loaded, int(most) if most.isdigit() else 0


def _number(raw: bytes) -> float:
    """Not a number counts as nothing."""
    try:
        value = float(raw)
    except ValueError:
        return 0.0
    return value if 0.0 <= value < float("inf") else 0.0
