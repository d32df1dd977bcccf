"""Resolves MODEL and --tokenizer to directories on this machine."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import penstock
from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.distribution import pip_install
from penstock.engine.model_length import check_max_model_len
from penstock.engine.torch.supported_models import check_supported
from penstock.generation.model_aliases import check_aliases
from penstock.supervisor.startup.model_download import download_model
from penstock.supervisor.startup.other_formats import other_format
from penstock.supervisor.startup.tokenizer_conversion import ensure_tokenizer_json
from penstock.wire.messages import Adapter

DEMO_DIR = Path(penstock.__file__).parent / "demo"
DEMO_NAME = "penstock-demo"

# Hugging Face's rule for "name" and "owner/name".
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """Absolute directories, and the model names that clients may use; the first one is reported."""

    model_dir: str
    tokenizer_dir: str
    served_names: list[str]
    draft_dir: str | None = None
    """Directory of --draft-model."""


def resolve_model(config: ServeConfig, run_dir: str, *, for_engine: bool = True) -> ResolvedModel:
    """Find or download the model, and check that it has what the engine needs.

    A converted tokenizer is written to ``run_dir``. ``for_engine`` False: for an API server, which needs
    neither weights nor the engine's libraries. Raises ConfigError, StartupError.
    """
    if for_engine:
        _check_software(config)
    model_dir = _model_directory(config, for_engine=for_engine)
    draft_dir = _draft_directory(config) if for_engine and config.draft_model is not None else None
    if for_engine:
        _check_model(config, model_dir)
    names = list(config.served_model_name or []) or [config.model or DEMO_NAME]
    tokenizer_dir = _tokenizer_directory(config, model_dir, run_dir)
    return ResolvedModel(
        str(model_dir), str(tokenizer_dir), names, None if draft_dir is None else str(draft_dir)
    )


def check_prompt_files(config: ServeConfig, model: ResolvedModel) -> None:
    """Raises ConfigError for a --chat-template, variables for it, or a --compaction-prompt-file that API
    servers could not use."""
    variables = config.default_chat_template_kwargs
    if variables is not None:
        from penstock.generation.prompt.chat_template import parse_variables

        try:
            parse_variables(variables)
        except ValueError as error:
            raise ConfigError(f"--default-chat-template-kwargs {variables}: {error}") from None
    if config.compaction_prompt_file is not None:
        from penstock.generation.compaction.compaction import read_prompt

        read_prompt(config.compaction_prompt_file)
    if config.chat_template is None:
        return
    from penstock.generation.prompt.chat_template import ChatTemplate

    try:
        ChatTemplate.load(model.tokenizer_dir, config.chat_template)
    except ValueError as error:
        raise ConfigError(f"--chat-template {config.chat_template}: {error}") from None


def check_model_aliases(config: ServeConfig, model: ResolvedModel, adapters: Sequence[Adapter] = ()) -> None:
    """Raises ConfigError for a --model-alias of what is neither the model nor one of ``adapters``, those of
    the start, unless requests may load others."""
    names = [*model.served_names, *(adapter.name for adapter in adapters)]
    try:
        later = check_aliases(config.model_alias or (), names, loads=config.lora_dir is not None)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for alias in later:
        log.warning("--model-alias %s: no adapter has this name yet", alias)


def _check_software(config: ServeConfig) -> None:
    if config.attach is not None:
        return  # the engines have theirs
    if config.engine == "torch":
        _require_torch()
    elif config.engine == "vllm":
        _require_vllm(config.vllm_command)


def _check_model(config: ServeConfig, model_dir: Path) -> None:
    if config.engine != "synthetic" and not (model_dir / "config.json").is_file():
        raise ConfigError(
            f"model {config.model or DEMO_NAME}: no config.json in {model_dir}; "
            f"--engine {config.engine} needs a Hugging Face model directory"
        )
    if config.engine == "torch":
        check_supported(model_dir, with_experts=config.enable_expert_parallel, runner=config.runner)
    if config.max_model_len is not None and (config.engine == "torch" or _takes_its_length(config)):
        check_max_model_len(model_dir, config.max_model_len)


def _takes_its_length(config: ServeConfig) -> bool:
    """Whether vLLM's engine is started here, and nothing has it take more than config.json states."""
    if config.engine != "vllm" or config.attach is not None or "VLLM_ALLOW_LONG_MAX_MODEL_LEN" in os.environ:
        return False
    return not any(each.replace("_", "-").startswith("--hf-overrides") for each in config.engine_args or ())


def _require_torch() -> None:
    absent = [name for name in ("torch", "transformers", "safetensors") if not importlib.util.find_spec(name)]
    if absent:
        raise ConfigError(
            f"--engine torch: {' and '.join(absent)} cannot be imported; run {pip_install('torch')}, "
            "or take --engine synthetic, which needs no model"
        )


def _require_vllm(command: str | None) -> None:
    if command is None and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"--engine vllm: vLLM is not installed; run {pip_install('vllm')}, name that of another "
            "environment with --vllm-command, or take --engine torch"
        )
    if command is None:
        return
    try:
        program, *_ = shlex.split(command)
    except ValueError:
        raise ConfigError(f"--vllm-command {command}: it is no command") from None
    if shutil.which(program) is None:
        raise ConfigError(f"--vllm-command {command}: there is no program {program}")


def _model_directory(config: ServeConfig, *, for_engine: bool) -> Path:
    if config.model is None:
        if config.revision is not None:
            raise ConfigError(f"--revision {config.revision}: the bundled demo model has no revisions")
        return DEMO_DIR
    if not config.model:
        raise ConfigError("model: an empty name; leave it out for the bundled demo model")
    path = _local_directory("model", config.model)
    if path is not None:
        if config.revision is not None:
            raise ConfigError(
                f"--revision {config.revision}: {config.model} is a directory; revisions are for hub ids"
            )
        return path
    loads = for_engine and config.attach is None and config.engine != "synthetic"
    if not loads or config.load_format == "dummy":
        return download_model(config.model, config.revision, weights=False)
    _check_model(
        config, download_model(config.model, config.revision, weights=False)
    )  # before gigabytes come
    return download_model(config.model, config.revision, weights=True)


def _draft_directory(config: ServeConfig) -> Path:
    """The directory of --draft-model, which the torch engine can load."""
    name = config.draft_model
    assert name is not None
    path = _local_directory("--draft-model", name)
    if path is None:
        path = download_model(name, None, weights=config.load_format != "dummy")
    if not (path / "config.json").is_file():
        raise ConfigError(f"--draft-model {name}: no config.json in {path}")
    try:
        check_supported(path)
    except ConfigError as error:
        raise ConfigError(f"--draft-model {name}: {error}") from None
    return path


def _local_directory(option: str, name: str) -> Path | None:
    """The directory ``name``, absolute; None: it is a hub id. Raises ConfigError when it is neither."""
    if instead := other_format(name):
        raise ConfigError(f"{option} {name}: {instead}")
    path = Path(name).expanduser()
    if path.is_dir():
        return path.absolute()
    if path.exists():
        raise ConfigError(f"{option} {name}: is a file; give its directory")
    if not _HUB_ID.fullmatch(name):
        raise ConfigError(f"{option} {name}: no such directory, nor a hub id (owner/name)")
    return None


def _tokenizer_directory(config: ServeConfig, model_dir: Path, run_dir: str) -> Path:
    if config.tokenizer is None:
        return ensure_tokenizer_json(model_dir, run_dir)
    path = _local_directory("--tokenizer", config.tokenizer)
    return ensure_tokenizer_json(path or download_model(config.tokenizer, None, weights=False), run_dir)
