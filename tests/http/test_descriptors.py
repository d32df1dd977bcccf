from __future__ import annotations

import logging

import pytest

from penstock.http import descriptors
from penstock.http.connection_settings import Limits
from penstock.http.descriptors import RESERVED, limit_to_descriptors


@pytest.mark.parametrize(
    ("files", "per_connection", "room"),
    [(100 + RESERVED + 20, 1, 100), (100 + RESERVED + 20, 2, 50), (30, 1, 1), (100_000, 1, 1000)],
)
def test_connections_are_as_many_as_there_is_room_for(
    files: int,
    per_connection: int,
    room: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(descriptors, "descriptor_limit", lambda: files)
    monkeypatch.setattr(descriptors, "_open_now", lambda: 20)
    caplog.set_level(logging.DEBUG)
    limits = limit_to_descriptors(Limits(max_connections=1000), per_connection=per_connection)
    assert limits.max_connections == room
    assert (limits.max_lingering < RESERVED) == (room < 1000)
    assert [str(room) in text for text in caplog.messages] == [True] * (room < 1000)


def test_only_a_limit_that_was_set_is_worth_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for files in (500, 20_000):
        monkeypatch.setattr(descriptors, "descriptor_limit", lambda files=files: files)
        limit_to_descriptors(Limits())
        limit_to_descriptors(Limits(max_connections=30_000))
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.INFO, logging.WARNING, logging.DEBUG, logging.WARNING]
    assert ["--max-connections 30000" in text for text in caplog.messages] == [False, True] * 2


def test_the_systems_own_figures_make_sense() -> None:
    assert 2 < descriptors._open_now() < descriptors.descriptor_limit()
