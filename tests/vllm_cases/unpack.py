"""Unpacks vLLM's tests of its parsers from its source distribution; nothing of it is built or installed.

``python tests/vllm_cases/unpack.py DIRECTORY``
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "0.33.0"
PARTS = (
    "tests/tool_parsers/",
    "tests/reasoning/",
    "tests/parser/",
    "vllm/parser/",
    "vllm/tool_parsers/",
    "vllm/reasoning/",
)
BACKEND = """
import os
def prepare_metadata_for_build_wheel(directory, settings=None):
    os.mkdir(os.path.join(directory, "vllm.dist-info"))
    with open("PKG-INFO") as head, open(os.path.join(directory, "vllm.dist-info", "METADATA"), "w") as out:
        out.write(head.read())
    return "vllm.dist-info"
"""
"""In place of vLLM's build backend, which needs PyTorch to tell pip the version."""


def main() -> None:
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        backend = Path(folder) / "setuptools"
        backend.mkdir()
        (backend / "__init__.py").touch()
        (backend / "build_meta.py").write_text(BACKEND)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=vllm"]
        command += ["--no-build-isolation", "--dest", folder, f"vllm=={VERSION}"]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": folder})
        [archive] = Path(folder).glob("vllm-*.tar.gz")
        with tarfile.open(archive) as sources:
            for member in sources:
                member.name = member.name.partition("/")[2]
                if member.isfile() and member.name.startswith(PARTS) and member.name.endswith(".py"):
                    sources.extract(member, target, filter="data")
    (target / "tests" / "__init__.py").touch()


if __name__ == "__main__":
    main()
