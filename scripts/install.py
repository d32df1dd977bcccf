"""Installs this checkout into a virtual environment, for the Makefile. Says what it fetches and what failed.

Runs before anything is installed: the standard library alone. pip's own output is kept in a file, and its
end is shown when pip fails: without a terminal, pip is silent while it downloads and unpacks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyPI's PyTorch for Linux is built for CUDA and brings 2.7 GB of NVIDIA's libraries."""
NVIDIA = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg")
PIP_SOURCES = re.compile(r"(index-url|extra-index-url|no-index|find-links)=")
ANSWER_S = 5.0
SHOWN_LINES = 15


class Failed(Exception):
    """A step failed; its output was shown."""


class Progress:
    """Lines on standard output: at each step, and every ``interval`` seconds of it."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._said = self._began = time.monotonic()

    def say(self, text: str) -> None:
        self._said = time.monotonic()
        print(f"install: {text}", flush=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def run(self, step: str, command: list[str], log: Path, directory: Path, total: float = 0.0) -> None:
        """Runs ``command``, with ``directory`` for temporary files. ``total``: the MB that it fetches."""
        environ = os.environ | {"TMPDIR": str(directory), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        with log.open("ab") as output:
            begin = output.tell()
            process = subprocess.Popen(
                command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, self._said + self._interval - time.monotonic()))
                    break
                fetched = _fetched(directory)
                share = f", {fetched:.0f} of {total:.0f} MB" if total and fetched else ""
                self.say(f"{step}{share} ... {self.seconds:.0f} s")
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode != 0:
            with log.open("rb") as output:
                output.seek(begin)
                lines = output.read().decode(errors="replace").splitlines()
            print(*(f"    {line}" for line in lines[-SHOWN_LINES:]), sep="\n", flush=True)
            raise Failed(f"{step} failed (exit code {process.returncode}; all output: {log})")


def _fetched(directory: Path) -> float:
    """MB that pip has downloaded; pip's caching writes a second copy beside these directories."""
    size = 0
    for path in directory.glob("pip-*/**/*"):
        with contextlib.suppress(OSError):  # moved meanwhile
            size += path.stat().st_size if path.is_file() else 0
    return size / 1e6


class Installer:
    """Installs extras of this checkout into the environment at ``venv``."""

    def __init__(self, venv: Path, progress: Progress) -> None:
        self._venv = venv
        self._progress = progress
        self._python = str(venv / "bin" / "python")

    def install(self, extras: list[str], torch_index: str) -> None:
        import tomllib

        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        name, optional = project["project"]["name"], project["project"]["optional-dependencies"]
        say = self._progress.say
        say(f"{name}[{','.join(extras)}] of this directory, into {self._venv}")
        self._make_environment()
        self._log = self._venv / "install.log"
        self._log.write_bytes(b"")
        index = self._index_arguments(torch_index) if "torch" in extras else []
        # With the build's requirements: then the build needs no environment, and no download, of its own.
        wanted = project["build-system"]["requires"] + project["project"]["dependencies"]
        for extra in extras:
            wanted += optional[extra]
        with tempfile.TemporaryDirectory(prefix=".install-", dir=self._venv) as directory:
            found = self._resolve(wanted, index, Path(directory))
            if found:
                total = self._announce(found)
                pins = [f"{item['metadata']['name']}=={item['metadata']['version']}" for item in found]
                self._pip(
                    f"fetching and installing {len(pins)} packages",
                    [*index, "--no-deps", *pins],
                    Path(directory),
                    total,
                )
            self._pip(f"installing {name}", ["--no-deps", "--no-build-isolation", "-e", "."], Path(directory))
        say(f"done in {self._progress.seconds:.0f} s")

    def _make_environment(self) -> None:
        """Also completes one whose making was interrupted."""
        works = [self._python, "-m", "pip", "--version"]
        if Path(self._python).exists() and subprocess.run(works, capture_output=True).returncode == 0:
            return
        self._venv.mkdir(parents=True, exist_ok=True)
        try:
            self._progress.run(
                "making the virtual environment",
                [sys.executable, "-m", "venv", str(self._venv)],
                self._venv / "install.log",
                self._venv,
            )
        except Failed as error:
            raise Failed(f"{error}; Debian and Ubuntu keep it in the package python3-venv") from None

    def _index_arguments(self, wanted: str) -> list[str]:
        """Where PyTorch comes from besides pip's own index."""
        if wanted not in ("", "auto"):
            return [] if wanted == "none" else ["--extra-index-url", wanted]
        if not sys.platform.startswith("linux"):
            return []  # PyPI's is the build without CUDA
        if any(Path(path).exists() for path in NVIDIA) or shutil.which("nvidia-smi"):
            self._progress.say("PyTorch for CUDA: this machine has an NVIDIA GPU")
            return []
        listed = subprocess.run([self._python, "-m", "pip", "config", "list"], capture_output=True, text=True)
        if PIP_SOURCES.search(listed.stdout):
            return []  # whoever set up pip chose where packages come from
        if not _answers(f"{CPU_INDEX}/torch/"):
            self._progress.say(f"{CPU_INDEX} does not answer: PyTorch comes from PyPI, with CUDA")
            return []
        self._progress.say("PyTorch for CPUs: this machine has no NVIDIA GPU")
        return ["--extra-index-url", CPU_INDEX]

    def _resolve(self, wanted: list[str], index: list[str], directory: Path) -> list[dict]:
        """What is to be fetched, as pip reports it: without packages that the environment has."""
        report = directory / "report.json"
        arguments = [*index, "--dry-run", "--report", str(report), "-c", "constraints.txt", *wanted]
        self._pip("choosing versions", arguments, directory)
        return json.loads(report.read_text())["install"]

    def _announce(self, found: list[dict]) -> float:
        """Says how much is fetched; returns the MB."""
        with ThreadPoolExecutor(16) as pool:
            sizes = list(pool.map(_size, (item["download_info"]["url"] for item in found)))
        total = sum(size or 0.0 for size in sizes)
        largest = sorted(
            ((size, item["metadata"]["name"]) for size, item in zip(sizes, found, strict=True) if size),
            key=lambda pair: -pair[0],
        )[:3]
        names = ", ".join(f"{name} {size:.0f}" for size, name in largest)
        unknown = sum(size is None for size in sizes)
        more = f", and {unknown} of unknown size" if unknown else ""
        self._progress.say(
            f"{len(found)} packages, {total:.0f} MB ({names}){more}, less those in pip's cache"
            if total
            else f"{len(found)} packages{more or ', all of them on this machine'}"
        )
        return total

    def _pip(self, step: str, arguments: list[str], directory: Path, total: float = 0.0) -> None:
        command = [self._python, "-m", "pip", "install", "--progress-bar", "off", *arguments]
        self._progress.run(step, command, self._log, directory, total)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=ANSWER_S):
            return True
    except OSError:
        return False


def _size(url: str) -> float | None:
    """MB to fetch; 0 for a file of this machine, None if its server does not say."""
    if url.startswith("file:"):
        return 0.0
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=ANSWER_S) as reply:
            return int(reply.headers["Content-Length"]) / 1e6
    except (OSError, TypeError, ValueError):
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venv", type=Path)
    parser.add_argument("extras", help="of pyproject.toml, separated by commas")
    parser.add_argument("--torch-index", default="auto", help="auto, none, or the URL of an index of PyTorch")
    parser.add_argument("--interval", type=float, default=4.0, help="seconds between lines of progress")
    arguments = parser.parse_args()
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        print(f"install: Python 3.11 or later is needed; {sys.executable} is {found}")
        print("install: name another one: make serve PYTHON=python3.12")
        return 1
    progress = Progress(arguments.interval)
    try:
        Installer(arguments.venv.absolute(), progress).install(
            arguments.extras.split(","), arguments.torch_index
        )
    except Failed as error:
        progress.say(f"{error}")
        progress.say("run the same command again to go on: what was fetched is kept in pip's cache")
        return 1
    except KeyboardInterrupt:
        progress.say("interrupted; run the same command again to go on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
