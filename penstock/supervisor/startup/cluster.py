"""What the hosts of a fleet must have in common: the key, the release, the options that shape replies, the
model."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from penstock import __version__
from penstock.config.errors import ConfigError
from penstock.config.options import ServeConfig
from penstock.supervisor.startup.model_resolution import ResolvedModel
from penstock.wire.curve import ClusterKey

log = logging.getLogger(__name__)

KEY_FILE_PREFIX = "penstock-cluster-key-1 "
"""Before the secret key, in the only line of a key file."""
_ENDS_BYTES = 1 << 16
"""Of a weights file at each of its ends: names and places of tensors, and values. Whole ones may take minutes
to read."""


def write_cluster_key(path: Path) -> None:
    """Make a key file that only its owner can read. Raises FileExistsError, OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "w", encoding="ascii") as file:
        file.write(f"{KEY_FILE_PREFIX}{ClusterKey.generate().secret}\n")


def read_cluster_key(path: str) -> str:
    """The secret key. Raises ConfigError, which does not show it."""
    try:
        with open(path, encoding="ascii") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(256).strip()
        if not text.startswith(KEY_FILE_PREFIX):
            raise ValueError("is no key file; penstock keys FILE makes one")
        secret = ClusterKey(text.removeprefix(KEY_FILE_PREFIX)).secret
    except (OSError, ValueError) as error:
        raise ConfigError(f"--cluster-key-file {path}: {error}") from None
    if mode & stat.S_IROTH:
        log.warning("--cluster-key-file %s can be read by every user of this machine; chmod o-r it", path)
    return secret


def traits_of(config: ServeConfig, model: ResolvedModel) -> dict[str, str]:
    """By name, what may not differ among hosts. Engines add what they know when they have started."""
    model_dir = Path(model.model_dir)
    weights = config.engine != "synthetic" and config.load_format != "dummy"
    files = [model_dir / "config.json"]
    if weights:
        files += sorted(path for path in model_dir.iterdir() if path.suffix in (".safetensors", ".bin"))
    return {
        "version": ".".join(__version__.split(".")[:2]),
        "--data-parallel-size": str(config.data_parallel_size),
        "--engine": config.engine,
        "--served-model-name": model.served_names[0],
        "--block-size": str(config.block_size),
        "--seed": str(config.seed),
        "model (digest)": _digest(files),
        "tokenizer (digest)": _digest([Path(model.tokenizer_dir) / "tokenizer.json"]),
    }


def _digest(files: Iterable[Path]) -> str:
    """Of sizes and contents; of long files both ends. Those that are not there are left out."""
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
