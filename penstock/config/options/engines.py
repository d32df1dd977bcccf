"""Options of engines: batches, scheduling and memory."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.describe import option, option_group


@option_group
class EngineOptions:
    """Options of engines: batches, scheduling and memory."""

    engine: Annotated[
        Literal["torch", "synthetic", "vllm"],
        option(
            "Engine. torch: the built-in one; vllm: vLLM's; synthetic: pseudo-random tokens at a "
            "fixed rate, no model.",
            "Engine",
        ),
    ] = "torch"
    engine_args: Annotated[
        list[str] | None,
        option(
            "Options of vllm serve, for --engine vllm. On the command line they follow --, after all "
            "other options.",
            "Engine",
            rest=True,
        ),
    ] = None
    vllm_command: Annotated[
        str | None,
        option(
            "Command that runs vllm, for --engine vllm, such as /opt/vllm/bin/vllm: that of another "
            "environment, with its own version. Default: the vLLM of this environment.",
            "Engine",
            metavar="COMMAND",
        ),
    ] = None
    data_parallel_size: Annotated[
        int, option("Number of engine processes on all hosts together.", "Engine", ge=1, le=1024)
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        option(
            "Expert parallelism: split the experts of a mixture-of-experts model over the engines of "
            "--data-parallel-size, which then run in lock-step.",
            "Engine",
        ),
    ] = False
    max_num_seqs: Annotated[
        int,
        option(
            "Maximum running streams per engine; further ones wait in its queue.", "Engine", ge=1, le=65536
        ),
    ] = 1024
    max_num_batched_tokens: Annotated[
        int, option("Maximum tokens per engine step, prefill and decode together.", "Engine", ge=1)
    ] = 2048
    max_prefill_delay: Annotated[
        float,
        option(
            "Maximum duration of a mixed prefill/decode step, as a multiple of a decode-only step; "
            "0: no limit.",
            "Engine",
            ge=0,
        ),
    ] = 3.0
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        option(
            "Order in which requests are scheduled. fcfs: by arrival; priority: by priority value, "
            "lowest first, then by arrival.",
            "Engine",
        ),
    ] = "fcfs"
    max_num_queued_reqs: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        option(
            "Maximum queued requests, over all engines; further ones get 429. Default: no limit.",
            "Engine",
        ),
    ] = None
    max_num_queued_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        option(
            "Maximum prompt tokens of queued requests, over all engines; further requests get 429. "
            "Default: no limit.",
            "Engine",
        ),
    ] = None
    kept_prompt_bytes: Annotated[
        int,
        option(
            "Prompts that an engine keeps in memory, in bytes, so that API servers send of a conversation's "
            "next turn only its new tokens; 4 bytes per token. 0: none.",
            "Engine",
            ge=0,
            le=1 << 30,
        ),
    ] = 64 << 20
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        option(
            "Device of the torch engine. auto: a GPU, if PyTorch finds one, else the CPU.",
            "Engine",
        ),
    ] = "auto"
    async_scheduling: Annotated[
        Literal["auto", "on", "off"],
        option(
            "Launch each step before the tokens of the previous one are read. auto: only on a GPU.",
            "Engine",
        ),
    ] = "auto"
    enforce_eager: Annotated[
        bool,
        option(
            "Launch every kernel of a step by itself, and record no CUDA graphs. Without effect on a CPU.",
            "Engine",
        ),
    ] = False
    batch_invariant: Annotated[
        bool,
        option(
            "Compute every row so that its bits do not depend on the batch beside it. Of the torch engine, "
            "on a CPU.",
            "Engine",
        ),
    ] = False
    block_size: Annotated[int, option("KV cache block size, in tokens.", "Engine", ge=1, le=256)] = 16
    enable_prefix_caching: Annotated[
        bool,
        option(
            "Share KV cache blocks between requests whose prompts have a common prefix.",
            "Engine",
        ),
    ] = True
    kv_events_config: Annotated[
        str | None,
        option(
            "KV cache events: whether engines publish what their prefix caches gain and lose, and where; the "
            'fields are vLLM\'s. For instance {"enable_kv_cache_events": true, "endpoint": '
            '"tcp://10.0.0.5:5557", "replay_endpoint": "tcp://10.0.0.5:6557"}. Default: no events.',
            "Engine",
            metavar="JSON",
        ),
    ] = None
    kv_cache_memory: Annotated[
        Annotated[int, Meta(ge=1 << 16)] | None,
        option(
            "KV cache size of an engine, in bytes, or as 4G. Default: on a GPU what --gpu-memory-utilization "
            "leaves, on a CPU a share of the free memory.",
            "Engine",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        option(
            "Fraction of a GPU's memory for weights, activations, CUDA graphs and KV cache, as far as it is "
            "free. Engines of a host that share a GPU divide it. The torch engine ignores it on a CPU.",
            "Engine",
            gt=0,
            le=1,
        ),
    ] = 0.9
    threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        option(
            "CPU threads of the torch engine. Default: one less than the CPU cores that it may use, but at "
            "least 1; for vectors alone as many; on a GPU 1, once the weights are loaded.",
            "Engine",
        ),
    ] = None
