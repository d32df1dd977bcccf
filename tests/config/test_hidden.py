from __future__ import annotations

import pytest

from penstock.config.hidden import hide_credentials


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:pw@host:80/x", "http://***@host:80/x"),
        ("redis://:p/w?x#y@z@host/0", "redis://***@host/0"),
        ("'http://pw@host' is not valid", "'http://***@host' is not valid"),
        ("user:pw@host", "***@host"),
        ("is 'user:p/w@host'", "is '***@host'"),
        ("redis://host/0?username=a&password=b", "redis://host/0?***"),
        ("http://u:p@a http://b http://u:p@c", "http://***@a http://b http://***@c"),
        ("http://host:80", "http://host:80"),
        ("name@example.org at 12:30", "name@example.org at 12:30"),
    ],
)
def test_nothing_else_is_hidden(text: str, shown: str) -> None:
    assert hide_credentials(text) == shown
