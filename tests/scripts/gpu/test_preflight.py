"""What is looked for before the first stage."""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from scripts.gpu import preflight
from scripts.gpu.fetch_wheels import missing
from scripts.gpu.machine import ROOT
from scripts.gpu.preflight import NEEDS, Found, look


def with_modules(folder: Path, **modules: str) -> dict[str, str]:
    """The environment of a process that can import these."""
    for name, code in modules.items():
        (folder / f"{name}.py").write_text(code)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}


def test_every_requirement_is_looked_for() -> None:
    wanted = {re.split(r"[^\w-]", each)[0] for each in missing((ROOT / "pyproject.toml").read_text(), [])}
    brings = packages_distributions()
    looked_for = {name.lower().replace("_", "-") for need in NEEDS for name in brings.get(need, [])}
    assert {name.lower().replace("_", "-") for name in wanted} <= looked_for


def test_modules_that_cannot_be_imported_are_named(tmp_path: Path) -> None:
    """Missing ones in one line, and a wheel for another Python, which raises, with what it says."""
    environment = with_modules(
        tmp_path, good="", bad="raise ImportError('wrong ELF class')", loud="print('x')"
    )
    found = look("cpu", ("good", "none_a", "bad", "loud", "none_b"), environment)
    assert [problem.partition("; ")[0] for problem in found.problems] == [
        f"{sys.executable} cannot import none_a, none_b (missing)",
        f"{sys.executable} cannot import bad (ImportError: wrong ELF class)",
    ]
    assert look("cpu", ("good", "loud"), environment) == Found()


def test_a_module_that_ends_the_process_is_told(tmp_path: Path) -> None:
    environment = with_modules(tmp_path, bad="import os; print('about to abort', flush=True); os.abort()")
    (problem,) = look("cpu", ("bad",), environment).problems
    assert "ended by SIGABRT" in problem
    assert "about to abort" in problem


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch and Triton as where there is a GPU of 24 GiB."""
    driver = SimpleNamespace(get_current_target=lambda: "sm_90")
    state = SimpleNamespace(driver=driver, capability=(9, 0), available=True)
    torch, triton = ModuleType("torch"), ModuleType("triton.runtime")
    torch.__dict__.update(
        __version__="2.11",
        version=SimpleNamespace(cuda="13.0"),
        cuda=SimpleNamespace(
            is_available=lambda: state.available,
            get_device_capability=lambda: state.capability,
            get_device_name=lambda: "H100",
            mem_get_info=lambda: (20 << 30, 24 << 30),
        ),
    )
    triton.__dict__["driver"] = SimpleNamespace(active=driver)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "triton.runtime", triton)
    return state


def test_a_gpu_is_described(gpu: SimpleNamespace) -> None:
    found = Found()
    preflight._find_gpu(found)
    assert found == Found(
        {
            "device": "H100, compute capability 9.0, 20.0 of 24.0 GiB free, PyTorch 2.11 (CUDA 13.0)",
            "kernels": "Triton compiles for sm_90",
        },
        [],
        20 << 30,
    )


def test_no_gpu_is_a_problem(gpu: SimpleNamespace) -> None:
    gpu.available, found = False, Found()
    preflight._find_gpu(found)
    message = "PyTorch 2.11 (CUDA 13.0) finds no CUDA device; --device cpu --tiny rehearses without one"
    assert found.problems == [message]


def test_no_compiler_is_told_and_stages_show_what_it_costs(gpu: SimpleNamespace) -> None:
    def fail() -> None:
        raise RuntimeError("Failed to find C compiler")

    gpu.driver.get_current_target, found = fail, Found()
    preflight._find_gpu(found)
    told = "Triton cannot compile kernels (RuntimeError: Failed to find C compiler)"
    assert found.facts["kernels"].startswith(told)
    gpu.capability, found = (7, 5), Found()
    preflight._find_gpu(found)
    assert "kernels" not in found.facts
