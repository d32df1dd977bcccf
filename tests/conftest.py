"""Options and fixtures that all tests share."""

from __future__ import annotations

import gc
import logging
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from penstock import logging_setup

if TYPE_CHECKING:
    from tests.certificates import Certificates

# How long an example takes says more about a loaded machine than about the code. The examples are the same in
# every run, so that a change is judged by what it changes; the slow tests look for others.
settings.register_profile(
    "same", deadline=None, database=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("others", settings.get_profile("same"), derandomize=False)


LONG = frozenset(
    {
        "tests/engine/torch/test_speculation.py",
        "tests/engine/torch/test_kernels.py",
        "tests/engine/torch/test_fake_cuda.py",
        "tests/engine/torch/test_out_of_memory.py",
        "tests/engine/torch/test_lora.py",
        "tests/engine/torch/test_graph_memory.py",
        "tests/engine/torch/test_weight_loader.py",
        "tests/examples/test_grpo.py",
        "tests/gateway/test_retries.py",
        "tests/hostile/routes/test_bodies.py",
    }
)
"""Files that take longest, and go first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tests, too")
    parser.addoption(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the torch engine's tests run"
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("others" if config.getoption("--slow") else "same")
    # Read when Triton is imported, which other tests may do before those of the kernels, which run on the CPU
    # then. vLLM has kernels of its own.
    if config.getoption("--device") == "cpu" and find_spec("vllm") is None:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    # Threads of one operation wait for each other in a loop: beside another process of tests, that takes many
    # times the time of one thread. An engine sets its number itself.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A shell starts what runs in its background with SIGINT ignored, and children inherit that: then tests
    # that interrupt a process would wait for ever.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, which the supervisor heeds


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected lives to the end: no collection of garbage walks over it, here or in the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # files go to processes in this order, of which none waits at the end
        items.sort(key=lambda item: item.location[0] not in LONG)
    if not config.getoption("--slow"):
        skip = pytest.mark.skip(reason="slow: run with --slow")
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """A test that runs a command sets up the log as in its process: the next one has none of it."""
    loggers = [logging.getLogger(), logging.getLogger("penstock")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    root = loggers[0]
    root.handlers[:] = [each for each in root.handlers if not isinstance(each, logging_setup._StandardError)]


@pytest.fixture
def run_dir() -> Iterator[str]:
    """A directory for sockets, whose paths are short: pytest's own may have too long ones."""
    with tempfile.TemporaryDirectory(prefix="penstock-", dir="/tmp") as directory:
        yield directory


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What is to be closed when the test is over."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    from tests.certificates import make  # trustme is not installed wherever tests run

    return make(tmp_path_factory.mktemp("certificates"))
