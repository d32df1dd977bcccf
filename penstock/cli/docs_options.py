"""``penstock docs-options``: writes the options page of the documentation. Not listed in ``--help``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from penstock.cli.command import Command
from penstock.config.describe import option, option_group
from penstock.config.origins import Origins


@option_group
class DocsOptionsConfig:
    """Options of ``penstock docs-options``."""

    page: Annotated[
        str | None, option("File to write. Default: standard output.", "Output", positional=True)
    ] = None


def page() -> str:
    """The page for all commands that ``penstock --help`` lists."""
    from penstock.cli.main import COMMANDS, load
    from penstock.config.options_page import options_page

    return options_page((" ".join(entry.name), load(entry).config) for entry in COMMANDS if entry.help)


def run(config: DocsOptionsConfig, origins: Origins) -> int:
    """Write the page to the file, or print it."""
    if config.page is None:
        sys.stdout.write(page())
    else:
        Path(config.page).write_text(page(), encoding="utf-8")
    return 0


COMMAND = Command(("docs-options",), "Write the documentation of all options.", DocsOptionsConfig, run)
