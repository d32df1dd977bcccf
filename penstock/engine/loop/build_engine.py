"""Builds the engine (torch, vllm or synthetic) of an engine process, with its rank's part of the limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from penstock.config.serve import ServeConfig
from penstock.engine.base import Engine
from penstock.engine.media.page_supply import PageSupply
from penstock.engine.pooling.beside_text import TextAndVectors
from penstock.engine.pooling.description import PoolingDescription, describe_pooling
from penstock.engine.pooling.engine import PoolingEngine
from penstock.engine.vocabulary import read_vocab_size
from penstock.media.store import MediaStore
from penstock.wire.control import Launch
from penstock.wire.messages import EngineInfo
from penstock.wire.sockets import process_group_spec
from penstock.wire.vllm.addresses import bind_address
from penstock.wire.vllm.attachment_file import AttachmentFile


def build_engine(launch: Launch, progress: Callable[[str, float | None], None]) -> Engine:
    """The engine of ``launch.config.engine``; imports the code of that engine only. Raises ConfigError."""
    config = with_rank_limits(launch.config, launch.index)
    if config.engine == "synthetic":
        return _synthetic_engine(launch, config, progress)
    if config.engine == "vllm":
        return _attached_engine(launch, config, progress)
    described = describe_pooling(Path(launch.model_dir), config.runner)
    if described is not None and not described.generates:
        return _torch_pooling(launch, config, described, progress)
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

    text = TorchEngine(
        config,
        launch.model_dir,
        progress,
        tokenizer_dir=launch.tokenizer_dir,
        draft_dir=launch.draft_dir,
        rank=launch.index,
        group=group,
        pages=_page_supply(launch),
    )
    if described is None:
        return text
    from penstock.engine.torch.pooling.decoders import beside

    return beside(config, text, described, launch.model_dir)


def _page_supply(launch: Launch) -> PageSupply | None:
    """Pages of pictures from the host's store; None: there is none, and no picture is taken."""
    if launch.media_dir is None:
        return None
    return PageSupply(MediaStore(launch.media_dir, launch.media_capacity))


def _synthetic_engine(
    launch: Launch, config: ServeConfig, progress: Callable[[str, float | None], None]
) -> Engine:
    from penstock.engine.synthetic.engine import SyntheticEngine
    from penstock.engine.synthetic.faults import Faults
    from penstock.engine.synthetic.pooling import SyntheticPooling

    described = describe_pooling(Path(launch.model_dir), config.runner)
    text = SyntheticEngine(
        config,
        launch.model_dir,
        progress,
        tokenizer_dir=launch.tokenizer_dir,
        script=launch.script,
        pages=_page_supply(launch),
    )
    if config.runner == "generate" or (config.runner == "auto" and described is None):
        return text
    model = SyntheticPooling(
        config.synthetic_dimensions,
        config.synthetic_labels,
        step_s=config.synthetic_step_ms / 1000,
        faults=Faults(config.synthetic_fault),
        generates=config.runner == "both",
    )
    pooling = PoolingEngine(config, model, msgspec.structs.replace(text.info, pooling=model.info))
    return TextAndVectors(config, text, pooling) if config.runner == "both" else pooling


def _torch_pooling(
    launch: Launch,
    config: ServeConfig,
    described: PoolingDescription,
    progress: Callable[[str, float | None], None],
) -> Engine:
    from penstock.engine.torch.pooling.loader import load_pooling_model

    model = load_pooling_model(config, launch.model_dir, described, progress, launch.index)
    info = EngineInfo(
        engine="torch",
        max_model_len=described.longest(config.max_model_len),
        vocab_size=read_vocab_size(Path(launch.model_dir)),
        max_num_seqs=config.max_num_seqs,
        device=model.device,
        dtype=model.dtype,
        pooling=model.info,
    )
    return PoolingEngine(config, model, info)


def _attached_engine(
    launch: Launch, config: ServeConfig, progress: Callable[[str, float | None], None]
) -> Engine:
    """Attach an engine of vLLM's: one that is started elsewhere (``--attach``), or one that is started
    here. Raises ConfigError."""
    from penstock.engine.attach.attach import attach
    from penstock.engine.attach.engine import AttachedEngine, ModelFacts
    from penstock.engine.attach.launch.start_engine import start_engine
    from penstock.media.store import MediaStore

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
    store = None if launch.media_dir is None else MediaStore(launch.media_dir, launch.media_capacity)
    return AttachedEngine(
        config, model, attached, run_dir=run_dir, rank=rank, given=launch.given, store=store
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
