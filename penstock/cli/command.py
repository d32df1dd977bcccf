"""What a command is: every module of this package that holds one exposes it as ``COMMAND``.

``penstock bench host`` for example is a module with::

    def run(config: BenchHostConfig, origins: Origins) -> int: ...

    COMMAND = Command(("bench", "host"), "Measure the host cost of an API server.", BenchHostConfig, run)

Flags, variables, file keys, help and documentation come from the fields of the config Struct, written with
:func:`penstock.config.describe.option`. :mod:`penstock.cli.main` lists name and module of each command and
imports a module only when it is needed. Importing one must stay cheap: heavy imports (torch, numpy, uvicorn,
httpx, rich …) belong inside ``run``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from penstock.config.origins import Origins

C = TypeVar("C", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Command(Generic[C]):
    """One command: its words after ``penstock``, one line of help, its options and what it does.

    ``run`` gets the checked config and where its values came from, and returns the exit code: 0 for success,
    1 for a failure it has reported on standard error, 2 for a config that cannot be run.
    """

    name: tuple[str, ...]
    help: str
    config: type[C]
    run: Callable[[C, Origins], int]
