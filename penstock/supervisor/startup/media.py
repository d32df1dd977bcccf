"""The host's store of pictures' pages, and how many media workers fill it."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.distribution import pip_install
from penstock.engine.torch.media.families import seeing_family
from penstock.supervisor.signals import signals_blocked
from penstock.supervisor.startup.api_server_directories import MAX_PATH_BYTES, MEMORY
from penstock.supervisor.startup.model_resolution import ResolvedModel
from penstock.supervisor.startup.run_directory import RunDirectory

log = logging.getLogger(__name__)

CORES_PER_WORKER = 4
MAX_AUTO_WORKERS = 8
_SHARE = 0.9
"""Of the file system's room."""
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


class Media(NamedTuple):
    """What children learn of it. Without workers there is no store, but for engines of a host that has no API
    servers: they get pages from those of other hosts."""

    directory: str | None = None
    workers: int = 0
    capacity: int = 0
    """Bytes of the store."""


@contextlib.contextmanager
def media_of(config: ServeConfig, model: ResolvedModel, api_servers: int) -> Iterator[Media]:
    """A store in memory for the ``api_servers`` of this host, which is removed at the end; those that killed
    servers left behind are at the start. Raises ConfigError, StartupError."""
    workers = _workers(config, model) if api_servers else 0
    if not workers and (api_servers or not _engines_take_pages(config, model)):
        yield Media()
        return
    with contextlib.ExitStack() as stack:
        with signals_blocked():  # it is removed whatever comes
            owned = stack.enter_context(RunDirectory(None, [MEMORY], MAX_PATH_BYTES))
        directory = f"{owned.path}/media"
        os.mkdir(directory, 0o700)
        room = os.statvfs(directory)
        capacity = min(config.media_cache, int(_SHARE * room.f_bavail * room.f_frsize))
        if capacity < config.media_cache:
            log.warning("%s has room for a media cache of %d MiB", owned.path, capacity >> 20)
        yield Media(directory, workers, capacity)


def _workers(config: ServeConfig, model: ResolvedModel) -> int:
    """Media workers of this host, which has API servers. Raises ConfigError for options that do not fit."""
    wanted = config.media_workers
    if wanted == 0 or not config.max_images or config.runner == "pooling":
        return 0
    if not _takes_pictures(config, model):
        if wanted:
            raise ConfigError(
                f"--media-workers {wanted}: the model takes no images, or the engine serves it for text"
            )
        return 0
    if config.engine == "vllm":
        if config.media_python is None and importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                "the model's images are prepared by vLLM, which is not installed here; --media-python names "
                "a Python that has it"
            )
    elif importlib.util.find_spec("PIL") is None:
        raise ConfigError(
            f"the model takes images, and Pillow is not installed; run {pip_install('torch')}, "
            "or serve it for text: --language-model-only"
        )
    return wanted or max(1, min(MAX_AUTO_WORKERS, _cores() // CORES_PER_WORKER))


def _engines_take_pages(config: ServeConfig, model: ResolvedModel) -> bool:
    """Whether engines take pictures that another host's workers prepare: Penstock's own do."""
    text = config.media_workers == 0 or not config.max_images or config.runner == "pooling"
    return not text and config.engine != "vllm" and _takes_pictures(config, model)


def _takes_pictures(config: ServeConfig, model: ResolvedModel) -> bool:
    if config.language_model_only:
        return False
    if config.engine == "synthetic":
        if config.synthetic_image_tokens:
            from penstock.media.synthetic_processor import image_token

            image_token(model.tokenizer_dir)
        return config.synthetic_image_tokens > 0
    directory = Path(model.model_dir)
    if config.engine == "torch":
        sees = seeing_family(directory, config) is not None
    else:
        described: dict[str, Any] = msgspec.json.decode((directory / "config.json").read_bytes())
        sees = bool(config.media_workers or config.media_python) and "vision_config" in described
    if sees and not any((directory / name).is_file() for name in _PROCESSOR_FILES):
        raise ConfigError(
            f"model {model.served_names[0]} takes images, and {directory} has neither processor_config.json "
            "nor preprocessor_config.json, which say how they are prepared; --language-model-only serves text"
        )
    return sees


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
