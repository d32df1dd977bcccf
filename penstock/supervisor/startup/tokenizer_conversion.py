"""Makes sure that a model has a tokenizer.json, the only form that API servers read."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
from pathlib import Path

from penstock.config.errors import ConfigError
from penstock.exit_codes import StartupError
from penstock.module_command import module_command

log = logging.getLogger(__name__)

# Vocabulary files that transformers can convert → modules needed for that → packages that hold them.
_TRANSFORMERS = {"transformers": "transformers"}
_SENTENCEPIECE = _TRANSFORMERS | {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}
_CONVERTIBLE = {
    "tokenizer.model": _SENTENCEPIECE,
    "spiece.model": _SENTENCEPIECE,
    "sentencepiece.bpe.model": _SENTENCEPIECE,
    "vocab.json": _TRANSFORMERS,
    "vocab.txt": _TRANSFORMERS,
}
_TIMEOUT_S = 300.0


def ensure_tokenizer_json(model_dir: Path, run_dir: str) -> Path:
    """``model_dir`` if it has a tokenizer.json, else a directory in ``run_dir`` with a converted one.

    transformers converts in another process, so that this one never imports it. Raises ConfigError when
    there is nothing to convert or a package is missing, StartupError when the conversion fails.
    """
    if (model_dir / "tokenizer.json").is_file():
        return model_dir
    source = next((name for name in _CONVERTIBLE if (model_dir / name).is_file()), None)
    if source is None:
        raise ConfigError(f"no tokenizer.json in {model_dir}; name a directory that has one with --tokenizer")
    absent = [package for module, package in _CONVERTIBLE[source].items() if not _importable(module)]
    if absent:
        raise ConfigError(
            f"no tokenizer.json in {model_dir}, only {source}; "
            f"to have it converted, run pip install {' '.join(absent)}"
        )
    log.info("converting %s of %s to tokenizer.json", source, model_dir)
    target = Path(run_dir) / "tokenizer"
    _convert(model_dir, target, source)
    if not (target / "tokenizer.json").is_file():
        raise StartupError(f"{model_dir}: transformers gave no tokenizer.json for {source}")
    return target


def _importable(module: str) -> bool:
    """Whether ``module`` is installed; does not import it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package
        return False


def _convert(model_dir: Path, target: Path, source: str) -> None:
    try:
        result = subprocess.run(
            [
                *module_command("penstock.supervisor.startup.tokenizer_conversion_main"),
                str(model_dir),
                str(target),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
    except subprocess.TimeoutExpired as error:
        raise StartupError(f"{model_dir}: converting {source} took more than {_TIMEOUT_S:g} s") from error
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        raise StartupError(f"{model_dir}: {source} cannot be converted to tokenizer.json: {lines[-1]}")
