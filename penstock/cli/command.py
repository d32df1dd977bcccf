"""The interface of a command. A module of this package with one command exposes it as ``COMMAND``.

``penstock complete`` for example is a module with::

    def run(config: CompleteConfig, origins: Origins) -> int: ...

    COMMAND = Command(("complete",), "Continue a text with a served model.", CompleteConfig, run)

Flags, variables, file keys, help and documentation are derived from the fields of the config class, which
are described with :func:`penstock.config.describe.option`. :mod:`penstock.cli.main` lists the commands and
imports a module when its command runs. Importing a module must stay cheap: heavy imports (torch, numpy,
uvloop, httpx, rich …) belong inside ``run``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.config.origins import Origins

C = TypeVar("C")

ReadOptions = Callable[[], tuple[C, Origins]]
"""Reads the options of a command: of the same command line, and of files as they are. Raises ConfigError."""


@dataclass(frozen=True, slots=True)
class Command(Generic[C]):
    """One command: its words after ``penstock``, one line of help, its options and its function.

    ``run(config, origins)`` gets the checked config and the origins of its values, and returns the exit code:
    0 for success, 1 for a failure reported on standard error, 2 for an invalid config.
    """

    name: tuple[str, ...]
    help: str
    config: type[C]
    run: Callable[..., int]
    handles_signals: bool = False
    """Whether ``run`` has handlers for SIGINT and SIGTERM; otherwise SIGINT raises KeyboardInterrupt."""
    rereads_options: bool = False
    """Whether ``run`` gets a third argument: a :data:`ReadOptions` that reads the options once more."""
    check: Callable[[C, Origins, list[str]], int] | None = None
    """What runs in the place of ``run`` with the option ``check``: it also gets the problems of the options,
    and returns the exit code."""
    examples: tuple[tuple[str, str], ...] = ()
    """Command lines and what they do, at the top of its help."""
    replaces_servers: bool = False
    """Whether it runs in the place of ``vllm serve`` and others, whose flags and variables get advice."""
