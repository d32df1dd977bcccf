"""Downloads the wheels that a machine with PyTorch and transformers lacks, to be carried to it.

    python -m scripts.gpu.fetch_wheels wheels

They are Penstock's own requirements (pyproject.toml) but those that the machine has (``--has``), at the
versions of constraints.txt. What these need, the machine has.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from scripts.gpu.machine import ROOT

MAX_MB = 30.0
PRESENT = (
    "numpy",
    "tokenizers",
    "huggingface-hub",
    "httpx",
    "h11",
    "jinja2",
    "prometheus-client",
    "pyyaml",
    "rich",
    "psutil",
    "uvloop",
)
"""Requirements that a machine has which was set up to run and test models."""
_LEGACY = ("manylinux2014", "manylinux_2_12", "manylinux2010", "manylinux_2_5", "manylinux1")


def missing(pyproject: str, present: Sequence[str]) -> list[str]:
    """The requirements in the text of a pyproject.toml whose names are not ``present``."""
    wanted: list[str] = tomllib.loads(pyproject)["project"]["dependencies"]
    have = {_name(each) for each in present}
    return [each for each in wanted if _name(each) not in have]


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else requirement


def platforms(machine: str, newest_glibc: int) -> list[str]:
    """Tags of wheels that run with glibc 2.``newest_glibc``: pip takes each for itself alone."""
    known = [f"manylinux_2_{minor}" for minor in range(newest_glibc, 16, -1)]
    return [f"{each}_{machine}" for each in (*known, *_LEGACY)]


def main(arguments: Sequence[str]) -> int:
    """1 when pip fails or the wheels are too large to carry."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu.fetch_wheels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="the machine's Python (default: 3.12)")
    parser.add_argument("--machine", default="x86_64", help="its architecture (default: x86_64)")
    parser.add_argument("--glibc", type=int, default=39, help="minor version of its glibc 2.x (default: 39)")
    parser.add_argument("--has", nargs="*", default=PRESENT, metavar="NAME", help="requirements that it has")
    options = parser.parse_args(arguments)
    wanted = missing((ROOT / "pyproject.toml").read_text(encoding="utf-8"), options.has)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={options.python}"]
    command += [f"--platform={each}" for each in platforms(options.machine, options.glibc)]
    command += [f"--constraint={ROOT / 'constraints.txt'}", f"--dest={options.folder}", *wanted]
    if subprocess.run(command).returncode:
        wanted_for = f"Python {options.python}, {options.machine}, glibc 2.{options.glibc}"
        print(f"this Python has no pip, or the index is out of reach, or lacks a wheel for {wanted_for}")
        return 1
    wheels = sorted(options.folder.glob("*.whl"))
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 1e6:6.2f} MB  {wheel.name}")
    size = sum(wheel.stat().st_size for wheel in wheels) / 1e6
    print(f"{size:6.2f} MB  in all, {len(wheels)} wheels")
    if size > MAX_MB:
        print(f"more than {MAX_MB:.0f} MB: too much to carry", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
