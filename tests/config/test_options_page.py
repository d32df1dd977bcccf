from __future__ import annotations

from pathlib import Path

import penstock
from penstock.cli.docs_options import page
from penstock.cli.main import COMMANDS, load, main
from penstock.config.introspect import options_of

PAGE = Path(penstock.__file__).parents[1] / "docs" / "options.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: .venv/bin/penstock docs-options docs/options.md"


def test_the_page_has_every_option_once_per_command() -> None:
    sections = {section.partition("\n")[0]: section for section in page().split("\n## penstock ")[1:]}
    for entry in COMMANDS:
        for option in options_of(load(entry).config):
            if entry.help:
                assert sections[" ".join(entry.name)].count(f"`{option.flag}` |") == 1


def test_what_is_allowed_is_said_in_words_not_as_a_pattern() -> None:
    assert "matching ^" not in page()


def test_every_row_of_a_table_has_four_cells() -> None:
    rows = [line for line in page().splitlines() if line.startswith("|")]
    assert {row.replace("\\|", "").count("|") for row in rows} == {5}


def test_the_command_writes_the_page(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    assert main(["docs-options", str(tmp_path / "options.md")]) == 0
    assert (tmp_path / "options.md").read_text(encoding="utf-8") == page()
    assert main(["docs-options"]) == 0
    assert capsys.readouterr().out == page()
