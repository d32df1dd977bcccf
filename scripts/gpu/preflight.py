"""What the stages need, looked for in a process of its own before the first of them: modules that can be
imported, and for a GPU a device that PyTorch finds, with a compiler for its kernels."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from scripts.gpu.children import run_child
from scripts.gpu.measuring import shortened

FOUND = "found: "  # begins the line with what was found; JSON follows
SECONDS = 90.0  # PyTorch's libraries are read from a cold disk
NEEDS = (
    *("torch", "transformers", "safetensors", "numpy", "tokenizers", "huggingface_hub", "httpx"),
    *(
        "h11",
        "jinja2",
        "prometheus_client",
        "yaml",
        "rich",
        "psutil",
        "uvloop",
        "httptools",
        "hpack",
        "wsproto",
        "msgspec",
    ),
    *("orjson", "zmq", "fastokens", "llguidance", "setproctitle", "cryptography"),
)
"""Modules: Penstock's requirements, and those of its torch engine."""


@dataclass
class Found:
    """``problems``: what forbids a run, a line each; ``free``: bytes of the device's memory."""

    facts: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    free: int | None = None


def look(device: str, needs: tuple[str, ...], environment: Mapping[str, str]) -> Found:
    """What a stage with this environment finds."""
    lines: list[str] = []
    command = [sys.executable, "-m", "scripts.gpu.preflight", device, *needs]
    ended = run_child(command, SECONDS, lines.append, environment)
    for line in lines:
        if line.startswith(FOUND):
            return Found(**json.loads(line.removeprefix(FOUND)))
    return Found(problems=[f"a process that imports {', '.join(needs)}: {ended.status}: {lines[-1:]}"])


def _import(found: Found, needs: list[str]) -> None:
    errors: dict[str, list[str]] = {}
    for name in needs:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever a module raises, it cannot be used
            kind = "missing" if isinstance(error, ModuleNotFoundError) else f"{type(error).__name__}: {error}"
            errors.setdefault(kind, []).append(name)
    for kind, names in errors.items():
        found.problems.append(
            f"{sys.executable} cannot import {', '.join(names)} ({shortened(kind)}); run the Python with "
            f"PyTorch, and with --wheels for Python {sys.version_info[0]}.{sys.version_info[1]}"
        )


def _find_gpu(found: Found) -> None:
    import torch

    build = f"PyTorch {torch.__version__} (CUDA {torch.version.cuda or 'none'})"
    if not torch.cuda.is_available():
        found.problems.append(f"{build} finds no CUDA device; --device cpu --tiny rehearses without one")
        return
    capability = torch.cuda.get_device_capability()
    found.free, total = torch.cuda.mem_get_info()
    found.facts["device"] = (
        f"{torch.cuda.get_device_name()}, compute capability {capability[0]}.{capability[1]}, "
        f"{found.free / 2**30:.1f} of {total / 2**30:.1f} GiB free, {build}"
    )
    if capability < (8, 0):
        return  # no kernels are compiled
    try:  # before its first kernel Triton compiles a module of C for the driver
        from triton.runtime import driver

        found.facts["kernels"] = f"Triton compiles for {driver.active.get_current_target()}"
    except Exception as error:  # noqa: BLE001 - of a missing compiler, of missing headers, of the driver
        found.facts["kernels"] = (
            f"Triton cannot compile kernels ({type(error).__name__}: {shortened(str(error))}): they need a "
            "C compiler and Python's headers (Debian's packages gcc, libc6-dev and python3-dev)"
        )  # stages c to f fail and say the same, if that is so; a and b show what else there is


def main() -> None:
    found = Found()
    device, *needs = sys.argv[1:]
    _import(found, needs)
    if device == "cuda" and not found.problems:
        _find_gpu(found)
    print(f"\n{FOUND}{json.dumps(vars(found))}", flush=True)


if __name__ == "__main__":
    main()
