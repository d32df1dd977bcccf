from __future__ import annotations

import pytest

from penstock.config.errors import ConfigError
from penstock.http.sockets import descriptors
from penstock.http.sockets.descriptors import RESERVED, connection_room


@pytest.mark.parametrize(
    ("files", "per_connection", "room"), [(100, 1, 100), (100, 2, 50), (1, 1, 1), (3, 2, 1)]
)
def test_connections_are_as_many_as_there_is_room_for(
    files: int, per_connection: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "descriptor_limit", lambda: files + RESERVED + 20)
    monkeypatch.setattr(descriptors, "_open_now", lambda: 20)
    assert connection_room(per_connection) == room


@pytest.mark.parametrize(("files", "per_connection"), [(0, 1), (1, 2), (-15, 1)])
def test_a_limit_that_leaves_no_connection_is_an_error(
    files: int, per_connection: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = files + RESERVED + 20
    monkeypatch.setattr(descriptors, "descriptor_limit", lambda: limit)
    monkeypatch.setattr(descriptors, "_open_now", lambda: 20)
    needed = per_connection + RESERVED + 20
    with pytest.raises(
        ConfigError, match=rf"the limit of {limit} open files .* {needed} at least are needed"
    ):
        connection_room(per_connection)


def test_the_systems_own_figures_make_sense() -> None:
    assert 2 < descriptors._open_now() < descriptors.descriptor_limit()
