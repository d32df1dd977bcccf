"""Builds the engine (torch, vllm or synthetic) of an engine process, with its rank's part of the limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.config.serve import ServeConfig
from penstock.engine.base import Engine
from penstock.wire.control import Launch
from penstock.wire.sockets import process_group_spec
from penstock.wire.vllm.addresses import bind_address
from penstock.wire.vllm.attachment_file import AttachmentFile


def build_engine(launch: Launch, progress: Callable[[str, float | None], None]) -> Engine:
    """The engine of ``launch.config.engine``; imports the code of that engine only. Raises ConfigError."""
    config = with_rank_limits(launch.config, launch.index)
    if config.engine == "synthetic":
        from penstock.engine.synthetic.engine import SyntheticEngine

        return SyntheticEngine(
            config,
            launch.model_dir,
            progress,
            tokenizer_dir=launch.tokenizer_dir,
            script=launch.script,
        )
    if config.engine == "vllm":
        return _attached_engine(launch, config, progress)
    group = None
    if config.enable_expert_parallel:
        group = process_group_spec(
            launch.run_dir,
            rank=launch.index,
            size=launch.engine_count,
            epoch=launch.epoch,
            incarnation=launch.incarnation,
        )
    from penstock.engine.torch.engine import TorchEngine

    return TorchEngine(
        config,
        launch.model_dir,
        progress,
        tokenizer_dir=launch.tokenizer_dir,
        draft_dir=launch.draft_dir,
        rank=launch.index,
        group=group,
    )


def _attached_engine(
    launch: Launch, config: ServeConfig, progress: Callable[[str, float | None], None]
) -> Engine:
    """Attach an engine of vLLM's: one that is started elsewhere (``--attach``), or one that is started
    here. Raises ConfigError."""
    from penstock.engine.attach.attach import attach
    from penstock.engine.attach.engine import AttachedEngine, ModelFacts
    from penstock.engine.attach.launch.start_engine import start_engine

    model = ModelFacts(launch.model_dir)
    run_dir, rank = launch.run_dir, launch.index
    if config.attach is not None:
        address = bind_address(config.attach)
        attached = attach(config, address, AttachmentFile(run_dir, address[1], rank), rank, progress)
    else:
        attached = start_engine(
            config,
            launch.model_dir,
            run_dir=run_dir,
            rank=rank,
            epoch=launch.epoch,
            given=launch.given,
            progress=progress,
        )
    return AttachedEngine(config, model, attached, run_dir=run_dir, rank=rank, given=launch.given)


def with_rank_limits(config: ServeConfig, rank: int) -> ServeConfig:
    """The configuration of one engine: the queue limits of the whole server, divided among the ranks."""
    engines = config.data_parallel_size

    def part(limit: int | None) -> int | None:
        return None if limit is None else limit // engines + (rank < limit % engines)

    return replace(
        config,
        max_num_queued_reqs=part(config.max_num_queued_reqs),
        max_num_queued_tokens=part(config.max_num_queued_tokens),
    )
