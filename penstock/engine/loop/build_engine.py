"""Builds the engine (torch, vllm or synthetic) of an engine process, with its rank's part of the limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.config.serve import ServeConfig
from penstock.engine.base import Engine
from penstock.wire.control import Launch
from penstock.wire.sockets import process_group_spec
from penstock.wire.vllm.addresses import bind_address


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
    group = None
    if config.enable_expert_parallel:
        group = process_group_spec(
            launch.run_dir,
            rank=launch.index,
            size=launch.engine_count,
            epoch=launch.epoch,
            incarnation=launch.incarnation,
        )
    if config.attach is not None:
        from penstock.engine.vllm_remote.engine import AttachedEngine

        return AttachedEngine(
            config,
            launch.model_dir,
            progress,
            address=bind_address(config.attach),
            run_dir=launch.run_dir,
            rank=launch.index,
            given=launch.given,
        )
    if config.engine == "vllm":
        from penstock.engine.vllm.versions import check_installed

        check_installed()  # before the import, which may fail with another version
        from penstock.engine.vllm.engine import VllmEngine

        return VllmEngine(
            config,
            launch.model_dir,
            progress,
            run_dir=launch.run_dir,
            rank=launch.index,
            given=launch.given,
            group=group,
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
