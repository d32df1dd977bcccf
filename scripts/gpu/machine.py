"""What the machine and its Python have, and the wheels that it lacks."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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
    yield "commit", _output("git", "-C", str(ROOT), "log", "-1", "--format=%h of %cs")


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


def install_wheels(wheels: Path, site: Path) -> str:
    """Installs all wheels of a folder into the folder ``site``, from no index; returns a line about it.

    Where pip fails, which an environment may lack, they are unpacked: these wheels are only files. Raises
    RuntimeError when there are none.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise RuntimeError(f"{wheels} has no wheels")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--root-user-action=ignore"]
    ran = subprocess.run([*command, "--target", str(site), *map(str, found)], capture_output=True, text=True)
    size = sum(path.stat().st_size for path in found) / 1e6
    told = f"{len(found)}, {size:.1f} MB: {', '.join(path.name.split('-')[0] for path in found)}"
    if ran.returncode == 0:
        return told
    for path in found:
        try:
            with zipfile.ZipFile(path) as archive:
                archive.extractall(site)
        except zipfile.BadZipFile as error:
            raise RuntimeError(f"{path.name}: {error}") from None
    return f"{told}; unpacked, as pip failed: {' '.join(ran.stderr.split())[-200:]}"


def environment(site: Path, device: str) -> dict[str, str]:
    """That of the stages: the repository and ``site`` on Python's path, and no network."""
    paths = [str(ROOT), str(site), os.environ.get("PYTHONPATH", "")]
    given = {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONDONTWRITEBYTECODE": "",  # each process would compile the sources again
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        given |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **given}
