"""Installs this checkout into a virtual environment, for the Makefile. Says what it fetches and what failed.

Runs before anything is installed: the standard library alone. pip's own output is kept in a file, and its
end is shown when pip fails: without a terminal, pip is silent while it downloads and unpacks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
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

    def run(self, step: str, command: list[str], log: Path, directory: Path) -> None:
        """Runs ``command``, with its output in ``log`` and its temporary files in ``directory``."""
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
                self.say(f"{step}{_state(log, begin, directory)} ({self.seconds:.0f} s)")
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode != 0:
            with log.open("rb") as output:
                output.seek(begin)
                lines = output.read().decode(errors="replace").splitlines()
            print(*(f"    {line}" for line in lines[-SHOWN_LINES:]), sep="\n", flush=True)
            raise Failed(f"{step}: failed (exit code {process.returncode}; all output: {log})")


def _state(log: Path, begin: int, directory: Path) -> str:
    """What pip does, whose output starts at ``begin`` of ``log`` and whose downloads are in ``directory``."""
    with log.open("rb") as output:
        output.seek(begin)
        if b"Installing collected packages" in output.read():
            return ": unpacking"
    size = 0
    # pip's caching writes a second copy beside these directories.
    for root in directory.glob("pip-*"):
        for folder, _, names in os.walk(root):  # which passes over what is removed meanwhile
            for name in names:
                with contextlib.suppress(OSError):
                    size += os.path.getsize(os.path.join(folder, name))
    return f": {size / 1e6:.0f} MB fetched" if size else ""


class Installer:
    """Installs extras of this checkout into the environment at ``venv``."""

    def __init__(self, venv: Path, progress: Progress) -> None:
        self._venv = venv
        self._progress = progress
        self._python = str(venv / "bin" / "python")
        self._log = venv / "install.log"

    def install(self, extras: list[str], torch_index: str) -> None:
        import tomllib

        declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
        project = declared["project"]
        self._progress.say(f"{project['name']}[{','.join(extras)}] of this directory, into {self._venv}")
        self._make_environment()
        self._log.write_bytes(b"")
        index = self._torch_arguments(torch_index) if "torch" in extras else []
        if "dev" in extras:
            self._progress.say("tests, linters and every optional part: about 290 MB")
        # With the build's requirements: then the build needs no environment, and no download, of its own.
        wanted = declared["build-system"]["requires"] + project["dependencies"]
        for extra in extras:
            wanted += project["optional-dependencies"][extra]
        with tempfile.TemporaryDirectory(prefix=".install-", dir=self._venv) as directory:
            self._pip("packages", [*index, "-c", "constraints.txt", *wanted], Path(directory))
            itself = ["--no-deps", "--no-build-isolation", "-e", "."]
            self._pip(f"{project['name']} itself", itself, Path(directory))
        self._progress.say(f"done in {self._progress.seconds:.0f} s")

    def _make_environment(self) -> None:
        """Also completes one whose making was interrupted."""
        works = [self._python, "-m", "pip", "--version"]
        if Path(self._python).exists() and subprocess.run(works, capture_output=True).returncode == 0:
            return
        self._venv.mkdir(parents=True, exist_ok=True)
        # With a new pip: older ones take a download that was cut off for a forged one, and begin it again.
        command = [sys.executable, "-m", "venv", "--upgrade-deps", str(self._venv)]
        try:
            self._progress.run("virtual environment", command, self._log, self._venv)
        except Failed as error:
            raise Failed(f"{error}; on Debian and Ubuntu it needs the package python3-venv") from None

    def _torch_arguments(self, wanted: str) -> list[str]:
        """pip's arguments for the index of PyTorch's build; says how much is fetched."""
        say = self._progress.say
        index = self._cpu_index() if wanted == "auto" else "" if wanted == "none" else wanted
        if index == CPU_INDEX:
            say("what serving needs: about 260 MB, 190 of them PyTorch for CPUs (no NVIDIA GPU was found)")
        elif index or not sys.platform.startswith("linux") or self._has_sources():
            say(
                f"what serving needs: about 70 MB, and PyTorch from {index or 'the index that pip is set to'}"
            )
        else:
            say("what serving needs: about 2,800 MB, most of it PyTorch for CUDA (TORCH_INDEX names another)")
        return ["--extra-index-url", index] if index else []

    def _cpu_index(self) -> str:
        """The index of PyTorch for CPUs where it is needed and answers, else nothing."""
        if not sys.platform.startswith("linux"):
            return ""  # PyPI's is the build without CUDA
        if any(Path(path).exists() for path in NVIDIA) or self._has_sources():
            return ""
        if not _answers(f"{CPU_INDEX}/torch/"):
            self._progress.say(f"{CPU_INDEX} does not answer, so PyTorch comes from PyPI")
            return ""
        return CPU_INDEX

    def _has_sources(self) -> bool:
        """Whether whoever set up pip chose where packages come from."""
        listed = subprocess.run([self._python, "-m", "pip", "config", "list"], capture_output=True, text=True)
        return PIP_SOURCES.search(listed.stdout) is not None

    def _pip(self, step: str, arguments: list[str], directory: Path) -> None:
        command = [self._python, "-m", "pip", "install", "--progress-bar", "off", *arguments]
        self._progress.run(step, command, self._log, directory)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=ANSWER_S):
            return True
    except OSError:
        return False


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
