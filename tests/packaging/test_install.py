"""scripts/install.py, which `make serve` and `make test` run, with a package index of its own."""

from __future__ import annotations

import io
import os
import re
import shutil
import ssl
import subprocess
import sys
import threading
import venv
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pip
import pytest

from tests.certificates import Certificates
from tests.packaging.conftest import ROOT

WAIT_S = 60.0
# Wheels of pure Python, of a size that takes more than one read.
BALLAST = b"#" * 3_000_000
BACKEND = """
from zipfile import ZipFile
def build_editable(directory, *_):
    with ZipFile(f"{directory}/thing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("thing.py", "")
        for name, text in FILES.items():
            wheel.writestr(f"thing-1.0.dist-info/{name}", text.replace("NAME", "thing"))
    return "thing-1.0-py3-none-any.whl"
FILES = """
PROJECT = """
[build-system]
requires = ["backend"]
build-backend = "backend"
[project]
name = "thing"
version = "1.0"
dependencies = ["large"]
[project.optional-dependencies]
serving = ["small>=1"]
testing = ["other"]
"""


FILES = {
    "METADATA": "Metadata-Version: 2.1\nName: NAME\nVersion: 1.0\n",
    "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "RECORD": "",
}


def metadata(name: str) -> bytes:
    return FILES["METADATA"].replace("NAME", name).encode()


def wheel(name: str, content: bytes) -> bytes:
    file = io.BytesIO()
    with ZipFile(file, "w") as archive:
        archive.writestr(f"{name}.py", content)
        for file_name, text in FILES.items():
            archive.writestr(f"{name}-1.0.dist-info/{file_name}", text.replace("NAME", name))
    return file.getvalue()


class Index(ThreadingHTTPServer):
    """A package index; ``breaks``: sends half of the large wheel and closes the connection; else it waits
    for ``go_on`` there."""

    daemon_threads = True

    def __init__(self, certificates: Certificates) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates.both)
        # pip keeps nothing that came without TLS.
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.authority = certificates.authority
        contents = {"small": b"", "other": b"", "large": BALLAST, "backend": f"{BACKEND}{FILES}".encode()}
        self.wheels = {f"{name}-1.0-py3-none-any.whl": wheel(name, text) for name, text in contents.items()}
        self.fetched: list[str] = []
        self.breaks = True
        self.go_on = threading.Event()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.server_address[1]}/simple/"


class Handler(BaseHTTPRequestHandler):
    server: Index

    def do_HEAD(self) -> None:
        self.head(len(self.server.wheels[self.path.split("/")[-1]]), "application/octet-stream")

    def do_GET(self) -> None:
        name = self.path.strip("/").split("/")[-1]
        if self.path.startswith("/simple/"):
            file = f"{name}-1.0-py3-none-any.whl"
            digest = sha256(self.server.wheels[file]).hexdigest()
            link = f'<a href="/files/{file}#sha256={digest}" data-dist-info-metadata="true">{file}</a>'
            self.whole(f"<!DOCTYPE html><html><body>{link}</body></html>".encode(), "text/html")
        elif name.endswith(".metadata"):
            self.whole(metadata(name.partition("-")[0]), "application/octet-stream")
        else:
            self.server.fetched.append(name)
            body = self.server.wheels[name]
            if name.startswith("large"):
                self.head(len(body), "application/octet-stream")
                self.wfile.write(body[: len(body) // 2])
                if self.server.breaks:
                    return
                assert self.server.go_on.wait(WAIT_S)
                self.wfile.write(body[len(body) // 2 :])
            else:
                self.whole(body, "application/octet-stream")

    def head(self, length: int, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.send_header("Cache-Control", "max-age=1000" if "stream" in kind else "no-cache")  # as PyPI
        self.end_headers()

    def whole(self, body: bytes, kind: str) -> None:
        self.head(len(body), kind)
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def index(certificates: Certificates) -> Iterator[Index]:
    with Index(certificates) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.go_on.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small project with the installer, and an environment that borrows pip: making one takes seconds."""
    tree = tmp_path / "tree"
    (tree / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "install.py", tree / "scripts")
    (tree / "pyproject.toml").write_text(PROJECT)
    (tree / "constraints.txt").write_text("small==1.0\n")
    venv.create(tree / ".venv", symlinks=True)
    (site,) = (tree / ".venv" / "lib").glob("python*/site-packages")
    (site / "pip").symlink_to(Path(pip.__file__).parent)
    return tree


def install(tree: Path, index: Index) -> subprocess.Popen[str]:
    own = {
        "PIP_INDEX_URL": index.url,
        "PIP_CACHE_DIR": str(tree / "cache"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_CERT": index.authority,
    }
    # requests prefers *_CA_BUNDLE to PIP_CERT.
    foreign = re.compile(r"PIP_|.*_CA_BUNDLE$")
    inherited = {name: text for name, text in os.environ.items() if not foreign.match(name)}
    return subprocess.Popen(
        [sys.executable, "scripts/install.py", "--interval", "0.2", ".venv", "serving"],
        cwd=tree,
        env=inherited | own | {"PIP_RETRIES": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_failed_download_is_explained_and_the_next_run_goes_on(tree: Path, index: Index) -> None:
    failed = install(tree, index)
    output, _ = failed.communicate(timeout=WAIT_S)
    assert failed.returncode == 1
    print(output)
    assert "install: thing[serving] of this directory" in output
    assert "install: packages: failed (exit code" in output
    assert "run the same command again" in output.splitlines()[-1]
    assert "    error: " in output.lower()  # what pip said

    index.breaks = False
    said = []
    with install(tree, index) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if sum("packages: 1 MB fetched" in earlier for earlier in said) == 2:
                index.go_on.set()
        assert process.wait(WAIT_S) == 0, "".join(said)
    assert said[-1].startswith("install: done in ")
    assert sum("small" in name for name in index.fetched) == 1  # from pip's cache
    assert not [name for name in index.fetched if name.startswith("other")]
    works = [tree / ".venv" / "bin" / "python", "-c", "import thing, large, small"]
    subprocess.run(works, check=True)


def test_an_old_python_is_refused_by_name() -> None:
    code = (
        "import sys, runpy; sys.version_info = (3, 9, 18); sys.argv = ['install.py', '/nowhere', 'torch'];"
        f"runpy.run_path({str(ROOT / 'scripts' / 'install.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Python 3.11 or later is needed" in done.stdout
    assert "PYTHON=python3.12" in done.stdout
