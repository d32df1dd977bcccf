"""Two processes' claims are two calls here: flock counts open files, not processes."""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path

import pytest

from penstock.exit_codes import StartupError
from penstock.placement.port_claim import claim_port

A, B = 0x123, 0x456
WHERE = "10.0.0.1", 8000


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_port_belongs_to_one_fleet_until_the_last_of_its_servers_has_left() -> None:
    with claim_port(*WHERE, A):
        with claim_port(*WHERE, A):
            refusal = r"10\.0\.0\.1, port 8000: API servers of another fleet"
            with pytest.raises(StartupError, match=refusal), claim_port(*WHERE, B):
                pass
            with claim_port("10.0.0.1", 8001, B), claim_port("::1", 8000, B):
                pass
        with pytest.raises(StartupError), claim_port(*WHERE, B):
            pass
    with claim_port(*WHERE, B), pytest.raises(StartupError), claim_port(*WHERE, A):
        pass


def hold_until_killed(told: multiprocessing.connection.Connection) -> None:
    with claim_port(*WHERE, A):
        told.send("claimed")
        told.recv()


def test_a_claim_ends_with_its_process() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    holder = context.Process(target=hold_until_killed, args=(theirs,))
    holder.start()
    assert ours.recv() == "claimed"
    with pytest.raises(StartupError), claim_port(*WHERE, B):
        pass
    holder.kill()
    holder.join()
    with claim_port(*WHERE, B):
        pass
