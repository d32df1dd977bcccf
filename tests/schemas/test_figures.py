"""``make test-schemas``: no grammar admits what its schema forbids, and the docs have the figures."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("jsonschema", reason="make test-schemas installs it")

from tests.schemas.figures import of_store, of_suite, tables

DOCS = Path(__file__).parents[2] / "docs" / "structured-output.md"


def test_the_grammar_of_a_schema_admits_no_invalid_instance_of_the_test_suite() -> None:
    assert of_suite().wrong == []
    assert of_suite().counts["instances"] > 4000


@pytest.mark.timeout(600)
def test_whatever_is_drawn_from_a_grammar_of_schema_store_is_valid() -> None:
    assert of_store().wrong == []
    assert of_store().counts["instances"] > 900


def test_the_figures_of_the_docs_are_those_measured() -> None:
    assert "\n".join(tables()) in DOCS.read_text()
