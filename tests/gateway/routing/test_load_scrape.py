"""Loads as the servers of the field publish them."""

from __future__ import annotations

import pytest

from penstock.gateway.routing.endpoint import EndpointLoad
from penstock.gateway.routing.load_scrape import MAX_LINE_BYTES, LoadReader, NoLoadError

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="1"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:lora_requests_info{max_lora="4",running_lora_adapters="old",waiting_lora_adapters=""} 1.763e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters="c"} 1.764e+09
"""
OLD_VLLM = b"vllm:num_requests_waiting 2\nvllm:num_requests_running 5\nvllm:gpu_cache_usage_perc 0.125\n"
SGLANG = b'sglang:num_queue_reqs{tp_rank="0"} 6.0\nsglang:num_running_reqs 7.0\nsglang:token_usage 0.75\n'
LLAMA_CPP = (
    b"llamacpp:requests_processing 1\nllamacpp:requests_deferred 2\nllamacpp:kv_cache_usage_ratio 0.5\n"
)


def read_load(text: bytes, size: int = 1 << 20) -> EndpointLoad:
    """The load in an exposition that comes in pieces of ``size``."""
    reader = LoadReader()
    for at in range(0, len(text), size):
        reader.feed(text[at : at + size])
    return reader.load()


@pytest.mark.parametrize(
    ("text", "load"),
    [
        (VLLM, EndpointLoad(1, 7, 0.5, frozenset("abc"), 4)),
        (OLD_VLLM, EndpointLoad(2, 5, 0.125)),
        (SGLANG, EndpointLoad(6, 7, 0.75)),
        (LLAMA_CPP, EndpointLoad(2, 1, 0.5)),
        (b"vllm:num_requests_waiting NaN\nvllm:num_requests_running -1\n", EndpointLoad()),
        (b"vllm:num_requests_waiting 1e30\nvllm:num_requests_running 1e308\n" * 2, EndpointLoad()),
        (b'vllm:lora_requests_info{max_lora="%b"} 1\n' % (b"9" * 5000), EndpointLoad()),
    ],
)
def test_loads(text: bytes, load: EndpointLoad) -> None:
    for size in (1, 7, 1 << 20):
        assert read_load(text, size) == load
    assert read_load(text.removesuffix(b"\n")) == load, "the end of its last line may be missing"


def test_a_line_without_end_takes_no_memory() -> None:
    reader = LoadReader()
    reader.feed(b"vllm:num_requests_waiting 2\nother{x=")
    for _ in range(40):
        reader.feed(b"y" * 4096)
        assert len(reader._line) <= MAX_LINE_BYTES
    reader.feed(b"\nvllm:num_requests_running 3\n")
    assert reader.load() == EndpointLoad(2, 3)


@pytest.mark.parametrize("text", [b"", b"<html>", b"process_cpu_seconds_total 1\n"])
def test_other_expositions_say_nothing(text: bytes) -> None:
    with pytest.raises(NoLoadError):
        read_load(text)
