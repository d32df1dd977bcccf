"""Records of attachments in the run directory."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from penstock.wire.vllm.attachment_file import Attachment, AttachmentFile

FOUND = Attachment((4001, 4002), b"\x81\xa1a\x01")


def test_a_successor_finds_what_was_left(tmp_path: Path) -> None:
    assert AttachmentFile(str(tmp_path), 29550, 1).load() is None
    AttachmentFile(str(tmp_path), 29550, 1).save(FOUND)
    assert AttachmentFile(str(tmp_path), 29550, 1).load() == FOUND
    assert AttachmentFile(str(tmp_path), 29550, 0).load() is None


def test_a_start_with_another_port_by_mistake_costs_nothing(tmp_path: Path) -> None:
    AttachmentFile(str(tmp_path), 29550, 0).save(FOUND)
    AttachmentFile(str(tmp_path), 29600, 0).save(Attachment((29601, 29602)))
    assert AttachmentFile(str(tmp_path), 29550, 0).load() == FOUND


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"{}", b'{"ports": [1]}', b'{"ports": [1, 2], "ready": 5}']
)
def test_what_cannot_be_read_is_ignored_and_told(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = AttachmentFile(str(tmp_path), 0, 0)
    file.save(FOUND)
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert file.load() is None
    assert str(path) in caplog.text
    file.save(FOUND)
    assert file.load() == FOUND
