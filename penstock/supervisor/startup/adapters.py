"""Adapters of the start: read and checked before any engine starts, and the first desired list."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.adapters.errors import AdapterError
from penstock.adapters.lora_modules import FLAG, LoraModule, LoraSettings, lora_settings
from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.supervisor.children.desired_state_store import DesiredStateStore
from penstock.wire.adapter_list import ADAPTERS, AdapterList
from penstock.wire.control import MAX_STATE_BYTES
from penstock.wire.messages import Adapter, LoraInfo

log = logging.getLogger(__name__)


def start_adapters(config: ServeConfig, served_names: Sequence[str]) -> list[Adapter]:
    """The adapters of ``--lora-modules``, with all of their files read. Raises ConfigError for options that
    contradict each other, and for an adapter that could not be run."""
    settings = lora_settings(config, served_names)
    if config.lora_dir is not None and not os.path.isdir(config.lora_dir):
        raise ConfigError(f"--lora-dir {config.lora_dir}: no such directory")
    return [_describe(module, settings, served_names[0]) for module in settings.modules]


def states_at_start(adapters: Sequence[Adapter]) -> DesiredStateStore:
    """What engines and API servers start with. Raises ConfigError for a list that is too long to be sent."""
    if not adapters:
        return DesiredStateStore()
    value = msgspec.to_builtins(AdapterList(list(adapters)))
    size = len(msgspec.json.encode(value))
    if size > MAX_STATE_BYTES:
        raise ConfigError(f"{FLAG}: names and paths have {size} bytes; the maximum is {MAX_STATE_BYTES}")
    return DesiredStateStore({ADAPTERS: value}, key=secrets.token_hex(16))  # no client's key


def _describe(module: LoraModule, settings: LoraSettings, model: str) -> Adapter:
    where = f"{FLAG} {module.name} ({module.path})"
    # As it was given: links may lead elsewhere on other hosts.
    path = os.path.abspath(os.path.expanduser(module.path))
    if not Path(path).is_dir():
        raise ConfigError(
            f"{where}: no such directory; an adapter of the Hugging Face hub must be downloaded first: "
            "hf download OWNER/NAME --local-dir DIRECTORY"
        )
    from penstock.adapters.adapter_files import describe_adapter  # other starts do without

    limits = LoraInfo(settings.max_loras, settings.max_lora_rank, settings.max_cpu_loras)
    try:
        files = describe_adapter(os.path.realpath(path), limits)
    except AdapterError as error:
        raise ConfigError(f"{where}: {error}") from None
    log.debug("adapter %s: rank %d, digest %s", module.name, files.rank, files.digest)
    return Adapter(module.name, path, module.base_model_name or model, files.digest, files.rank)
