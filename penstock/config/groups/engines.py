"""Options of engines, their batches and their memory."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.describe import option
from penstock.config.groups.streams import StreamOptions


class EngineOptions(StreamOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of engines, their batches and their memory."""

    engine: Annotated[
        Literal["torch", "synthetic", "vllm"],
        option(
            "torch: the embedded engine; vllm: vLLM's engine; synthetic: tokens on a clock, no model.",
            "Engine",
        ),
    ] = "torch"
    engine_args: Annotated[
        list[str] | None,
        option(
            "Engine options of vLLM's own, written as for vllm serve, for --engine vllm. On the command line "
            "they follow --, behind everything else.",
            "Engine",
            rest=True,
        ),
    ] = None
    data_parallel_size: Annotated[
        int, option("Number of engine processes, on all hosts together.", "Engine", ge=1, le=1024)
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        option(
            "Split the experts of a mixture-of-experts model over the engines of --data-parallel-size, which "
            "then run in lock-step.",
            "Engine",
        ),
    ] = False
    dp_sync_interval: Annotated[
        int,
        option(
            "Steps that engines in lock-step make between two agreements on whether any has work.",
            "Engine",
            ge=1,
            le=1024,
        ),
    ] = 32
    max_num_seqs: Annotated[
        int, option("Streams an engine runs at the same time (its slots).", "Engine", ge=1, le=65536)
    ] = 1024
    max_num_batched_tokens: Annotated[
        int, option("Tokens an engine computes in one step, prefill and decode together.", "Engine", ge=1)
    ] = 2048
    max_prefill_delay: Annotated[
        float,
        option(
            "How many times as long as a step that only decodes a step with prompts may take, by estimate; "
            "0: no limit.",
            "Engine",
            ge=0,
        ),
    ] = 3.0
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        option(
            "Which request runs first: fcfs, the one that came first; priority, the one with the lowest "
            "priority value, then the one that came first.",
            "Engine",
        ),
    ] = "fcfs"
    max_num_queued_reqs: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        option(
            "Requests that may wait for a slot, in all engines together; further ones get 429. "
            "Default: no limit.",
            "Engine",
        ),
    ] = None
    max_num_queued_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        option(
            "Prompt tokens of the requests that may wait for a slot, in all engines together; further "
            "requests get 429. Default: no limit.",
            "Engine",
        ),
    ] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], option("Where the torch engine runs.", "Engine")] = (
        "auto"
    )
    async_scheduling: Annotated[
        Literal["auto", "on", "off"],
        option(
            "Launch a step before the tokens of the step before it are read; auto: on a GPU, where the host "
            "then works while the device does.",
            "Engine",
        ),
    ] = "auto"
    block_size: Annotated[int, option("Tokens per KV cache block.", "Engine", ge=1, le=256)] = 16
    enable_prefix_caching: Annotated[
        bool,
        option(
            "Keep what was computed, for requests whose prompts begin alike: they share KV cache blocks.",
            "Engine",
        ),
    ] = True
    kv_cache_memory: Annotated[
        Annotated[int, Meta(ge=1 << 16)] | None,
        option("Bytes for the KV cache; default: a share of what is free on the device.", "Engine"),
    ] = None
    gpu_memory_utilization: Annotated[
        float, option("Share of GPU memory to use for model and KV cache.", "Engine", gt=0, le=1)
    ] = 0.9
    threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        option("CPU threads of the torch engine; default: the cores it may use.", "Engine"),
    ] = None
