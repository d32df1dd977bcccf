"""What the machine and its Python have, and the wheels that it lacks."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from penstock import __version__

ROOT = Path(__file__).resolve().parents[2]
NVIDIA_SMI = ("name", "memory.total", "memory.used", "driver_version", "power.limit", "clocks.max.sm")
PACKAGES = ("torch", "triton", "transformers", "numpy", "tokenizers", "safetensors")
COMMAND_S = 10.0


def facts() -> Iterator[tuple[str, str]]:
    """Names and values, the cheapest first. Imports nothing large."""
    yield "GPU", _output("nvidia-smi", f"--query-gpu={','.join(NVIDIA_SMI)}", "--format=csv,noheader")
    yield "machine", f"{len(os.sched_getaffinity(0))} CPU cores, {platform.platform()}"
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "packages", ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    commit = _output("git", "-C", str(ROOT), "log", "-1", "--format=%h of %cs")
    yield "Penstock", f"{__version__}, sources {digest(ROOT)}, commit {commit}"


def digest(root: Path) -> str:
    """Of the Python files of ``penstock`` and ``scripts/gpu``, which a copy without git has as well: the
    beginning of a SHA-256 of their paths and contents."""
    found = hashlib.sha256()
    for path in sorted([*(root / "penstock").rglob("*.py"), *(root / "scripts" / "gpu").rglob("*.py")]):
        found.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(missing)"


def _output(*command: str) -> str:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"none ({error})"
    return "; ".join(ran.stdout.split("\n")).strip("; ") or f"none ({ran.stderr.strip()[:100]})"


def unpack_wheels(wheels: Path, site: Path) -> str:
    """Unpacks a folder's wheels, as pip may be missing; returns a line about them."""
    told, found = [], sorted(wheels.glob("*.whl"))
    for path in found:
        told.append(path.name.split("-")[0])
        try:
            with zipfile.ZipFile(path) as archive:
                archive.extractall(site)
        except Exception as error:  # noqa: BLE001 - however it is damaged; the machine may have what it brings
            told[-1] += f" (damaged: {type(error).__name__}: {error})"
    size = sum(path.stat().st_size for path in found) / 1e6
    return f"{len(found)} in {wheels}, {size:.1f} MB: {', '.join(told) or 'fetch_wheels fills a folder'}"


def environment(site: Path, device: str) -> dict[str, str]:
    """That of the stages: Python's path, no network; temporary files go with ``site``, whoever is killed."""
    (site / "tmp").mkdir(exist_ok=True)
    paths = [str(ROOT), str(site), os.environ.get("PYTHONPATH", "")]
    given = {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONDONTWRITEBYTECODE": "",  # each process would compile the sources again
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8",
        "TMPDIR": str(site / "tmp"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        given |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **given}
