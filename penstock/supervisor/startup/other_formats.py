"""Tells what a name of a model is, where it is something that no engine here loads."""

from __future__ import annotations

import re
from pathlib import Path

_GGUF = (
    "it is of GGUF, llama.cpp's format, which Penstock does not read; give a directory or a hub id with "
    "safetensors, mostly that of the model that it was made from"
)
# unsloth/Qwen3-0.6B-GGUF:Q4_K_M, hf.co/owner/name:UD-IQ2_XXS, owner/name/file-Q8_0.gguf, owner/name-GGUF
_QUANTIZATION = r"(?:UD-)?(?:I?Q\d|TQ\d|BF16|F16|F32|MXFP4)[\w-]*"
_GGUF_NAME = re.compile(
    rf".*(?:\.gguf(?:\.part\d+\w*)?|[-_.]gguf(?::[\w.-]+)?|:{_QUANTIZATION})/?", re.IGNORECASE
)
_TAGGED = re.compile(r"[\w.-]+(?:/[\w.-]+)?:[\w.-]+")
_ADDRESS = re.compile(r"(?:https?://)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:[/?:#].*)?")


def other_format(name: str) -> str | None:
    """What to do instead of giving ``name``, a path or a hub id; None if it may be a model."""
    path = Path(name).expanduser()
    if path.is_dir():
        return _of_directory(path)
    if _GGUF_NAME.fullmatch(name) or _is_gguf(path):
        return _GGUF
    if path.exists():
        return None
    if address := _ADDRESS.fullmatch(name):
        return f"it is an address; the model's hub id is {address[1]}"
    if _TAGGED.fullmatch(name):
        return (
            f"hub ids have no tags: give {name.partition(':')[0]}, and a branch or a commit with --revision"
        )
    return None


def _of_directory(path: Path) -> str | None:
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return None
    if any(each.suffix.lower() == ".gguf" for each in path.iterdir()):
        return _GGUF
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        return "it is a LoRA adapter: give its base model, and --enable-lora --lora-modules NAME=PATH"
    return None


def _is_gguf(path: Path) -> bool:
    """Whether a file begins as one of GGUF does."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except (OSError, ValueError):
        return False
