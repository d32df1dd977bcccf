"""Values that must be the same on all hosts: the build, options that shape replies, the model."""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from penstock.adapters.lora_modules import lora_settings
from penstock.config.serve import ServeConfig
from penstock.distribution import build_id
from penstock.supervisor.startup.model_resolution import ResolvedModel
from penstock.wire.coordination import BUILD

_ENDS_BYTES = 1 << 16
"""Bytes of a weights file that the digest reads at each end: tensor names, offsets and some values. Whole
files may take minutes to read."""


def traits_of(config: ServeConfig, model: ResolvedModel) -> dict[str, str]:
    """Name → value. Engines add the values that they know when they have started."""
    model_dir = Path(model.model_dir)
    weights = config.engine != "synthetic" and config.load_format != "dummy"
    files = [model_dir / "config.json"]
    if weights:
        files += sorted(path for path in model_dir.iterdir() if path.suffix in (".safetensors", ".bin"))
    lora = lora_settings(config)
    limits = {"--max-loras": lora.max_loras, "--max-lora-rank": lora.max_lora_rank}
    return {
        BUILD: build_id(),
        "--data-parallel-size": str(config.data_parallel_size),
        "--engine": config.engine,
        "--served-model-name": model.served_names[0],
        "--block-size": str(config.block_size),
        "--seed": str(config.seed),
        "--enable-lora": str(lora.enabled),
        **{flag: str(limit) if lora.enabled else "" for flag, limit in limits.items()},
        "model (digest)": _digest(files),
        "tokenizer (digest)": _digest([Path(model.tokenizer_dir) / "tokenizer.json"]),
    }


def _digest(files: Iterable[Path]) -> str:
    """Digest of names, sizes and contents; of weights only both ends. Missing files are omitted."""
    digest = blake2b(digest_size=8)
    for path in files:
        if not path.is_file():
            continue
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {size}\n".encode())
            if path.suffix == ".json":
                digest.update(file.read())
            else:
                digest.update(file.read(_ENDS_BYTES))
                file.seek(max(0, size - _ENDS_BYTES))
                digest.update(file.read())
    return digest.hexdigest()
