"""How many drafts are accepted on texts of several kinds."""

from __future__ import annotations

import pytest

from penstock.engine.batch.slots import SlotTable
from penstock.engine.speculation.ngram import NgramProposer
from penstock.engine.speculation.proposer import Proposer
from penstock.engine.speculation.suffix import SuffixProposer
from tests.engine.speculation.replay import MakeProposer, docs, edits, noise, quotation, records, replay


def suffix(table: SlotTable) -> Proposer:
    return SuffixProposer(table, store_bytes=1 << 22, seed=1)


PROPOSERS = pytest.mark.parametrize("make", [NgramProposer, suffix])


@PROPOSERS
def test_a_quotation_is_accepted(make: MakeProposer) -> None:
    report = replay(make, quotation(), drafts=4)
    assert report.accepted_per_step > 3.7
    assert report.acceptance > 0.95


@PROPOSERS
def test_an_edited_copy_is_accepted_between_edits(make: MakeProposer) -> None:
    report = replay(make, edits()[:2], drafts=4, rows=2)
    assert report.accepted_per_step > 1.8
    assert report.acceptance > 0.75


@PROPOSERS
def test_random_tokens_have_no_drafts(make: MakeProposer) -> None:
    report = replay(make, noise(2), drafts=4, rows=2)
    assert report.proposed / report.steps < 0.01


def test_records_of_one_schema_are_accepted() -> None:
    streams = records(20)
    report = replay(suffix, streams, drafts=8, rows=4)
    assert report.accepted_per_step > 1.7
    assert report.acceptance > 0.6
    assert report.accepted_per_step > 1.5 * replay(NgramProposer, streams, drafts=8, rows=4).accepted_per_step


@PROPOSERS
def test_pages_have_short_drafts(make: MakeProposer) -> None:
    report = replay(make, docs(2), drafts=4, rows=2)
    assert 0.1 < report.accepted_per_step < 1
    assert report.proposed / report.steps < 1.5
