"""Each request has one line in the billing file, whoever dies meanwhile."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.gateway.billing import request_journal
from penstock.gateway.billing.billing_file import BillingFile, journal_folder
from penstock.gateway.billing.journal_slots import SLOTS, JournalSlots
from penstock.gateway.billing.request_journal import RequestJournal
from penstock.gateway.requests.caller import Caller
from penstock.gateway.responses.outcome import Outcome
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.responses.response_observer import Observation
from penstock.gateway.responses.token_usage import ReportedUsage
from tests.gateway.behaviours import good, stalled_in_stream
from tests.gateway.processes import WAIT_S, Gateway, Upstream, eventually, gateway

BODY = {"model": "m", "prompt": "p", "stream": True}
BEGAN = 1_767_225_599.0  # 2025-12-31T23:59:59Z


def lines_of(*files: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_float=Decimal) for file in files for line in file.read_text().splitlines()]


def options_of(tmp_path: Path, server: Upstream, *further: str) -> tuple[Path, tuple[str, ...]]:
    """The billing file, and options of a gateway with prices."""
    endpoints, bills = tmp_path / "endpoints.yaml", tmp_path / "bills.jsonl"
    endpoints.write_text(
        f"endpoints: [{server.url}]\ncurrency: USD\nmodels: {{m: {{prices: {{input: 0.1, output: 0.25}}}}}}\n"
    )
    return bills, ("--endpoints-file", str(endpoints), "--billing-file", str(bills), *further)


def ask(front: Gateway, id: str) -> bool:
    """Whether a request is answered, on a connection of its own."""
    try:
        reply = httpx.post(
            front.url + "/v1/completions", json=BODY, headers={"x-request-id": id}, timeout=WAIT_S
        )
    except httpx.HTTPError:
        return False
    return reply.status_code == 200 and reply.text.rstrip().endswith("[DONE]")


# -- real gateways


def test_workers_that_are_killed_under_load(tmp_path: Path) -> None:
    answered: set[str] = set()
    with Upstream(good) as server:
        bills, options = options_of(tmp_path, server, "--workers", "2", "--access-log", "none")
        with gateway(options=options) as front, ThreadPoolExecutor() as pool:
            enough = threading.Event()

            def ask_on_and_on(client: int) -> int:
                number = 0
                while not enough.is_set():
                    id = f"{client}-{number}"
                    number += 1
                    if ask(front, id):
                        answered.add(id)
                return number

            clients = [pool.submit(ask_on_and_on, client) for client in range(4)]
            for worker in front.workers:
                before = len(answered)
                eventually(lambda before=before: len(answered) > before + 20)  # type: ignore[misc]
                worker.kill()
            before = len(answered)
            eventually(lambda: len(answered) > before + 20)
            enough.set()
            assert sum(client.result() for client in clients) >= len(answered)
    lines = lines_of(bills)
    counts = Counter(line["request_id"] for line in lines)
    assert set(counts.values()) == {1}
    assert len({line["id"] for line in lines}) == len(lines)
    asked = {call.headers["x-request-id"] for call in server.calls if call.path == "/v1/completions"}
    assert asked <= counts.keys(), "whatever a server got has a line"
    by_id = {line["request_id"]: line for line in lines}
    done = [by_id[id] for id in answered]
    assert {
        (line["outcome"], line["input_tokens"], line["output_tokens"])
        for line in done
        if line["outcome"] == "ok"
    }
    assert {line["outcome"] for line in done} <= {"ok", "worker_lost"}, "a worker may die after its last byte"
    ended = [line for line in lines if line["outcome"] == "ok"]
    assert (
        sum(line["cost"] for line in ended) == len(ended) * (3 * Decimal("0.1") + 2 * Decimal("0.25")) / 10**6
    )
    assert not list(Path(journal_folder(str(bills))).glob("*.slots"))


def test_a_stream_whose_worker_is_killed(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: search, team: retrieval, key: sk-search-0123456789}]")
    with Upstream(stalled_in_stream) as server:
        bills, options = options_of(tmp_path, server, "--client-keys-file", str(keys))
        with gateway(options=options) as front:
            front.client.headers["authorization"] = "Bearer sk-search-0123456789"
            with front.client.stream(
                "POST", "/v1/completions", json=BODY, headers={"x-request-id": "a"}
            ) as reply:
                assert reply.status_code == 200
                [journal] = Path(journal_folder(str(bills))).glob("*.slots")
                eventually(lambda: server.url.encode() in journal.read_bytes())
                front.workers[0].kill()
                eventually(lambda: bills.read_text().endswith("\n"))
                with pytest.raises(httpx.HTTPError):
                    reply.read()
            eventually(lambda: len(front.workers) == 1 and front.client.get("/health").status_code == 200)
            [line] = lines_of(bills)
            assert {"id", "began", "time"} <= line.keys()
            known = {name: line[name] for name in line.keys() - {"id", "began", "time"}}
            assert known == {
                "request_id": "a",
                "path": "/v1/completions",
                "key": "search",
                "team": "retrieval",
                "model": "m",
                "target_model": "m",
                "endpoint": server.url,
                "attempts": 1,
                "outcome": "worker_lost",
            }


def test_a_gateway_that_is_killed(tmp_path: Path) -> None:
    """The next one writes what it has left, and completes the file."""
    with Upstream(stalled_in_stream) as server:
        bills, options = options_of(tmp_path, server)
        with (
            gateway(options=options) as front,
            front.client.stream("POST", "/v1/completions", json=BODY, headers={"x-request-id": "a"}),
        ):
            [worker] = front.workers
            front.process.send_signal(signal.SIGSTOP)
            worker.kill()
            front.process.kill()
            front.process.wait()
        with bills.open("a") as file:
            file.write('{"id":"torn')
        server.behaviour = good
        with gateway(options=options) as front:
            eventually(lambda: "worker_lost" in bills.read_text())
            assert ask(front, "b")
    assert [(line["request_id"], line["outcome"]) for line in lines_of(bills)] == [
        ("a", "worker_lost"),
        ("b", "ok"),
    ]


def test_a_file_that_is_moved_away_and_one_that_cannot_be_written(tmp_path: Path) -> None:
    moved = tmp_path / "bills.1"
    with Upstream(good) as server:
        bills, options = options_of(tmp_path, server)
        with gateway(options=options) as front:
            assert ask(front, "a")
            eventually(lambda: bills.read_text().endswith("\n"))
            bills.rename(moved)
            assert ask(front, "b")
            eventually(lambda: bills.exists() and bills.read_text().endswith("\n"))
            bills.rename(tmp_path / "bills.2")
            bills.mkdir()
            assert ask(front, "c")
            eventually(
                lambda: any("--billing-file" in line and "Is a directory" in line for line in front.lines)
            )
            assert front.counts("billing_waiting") == {"": 1}
            bills.rmdir()
            eventually(lambda: front.counts("billing_waiting") == {"": 0})
            assert front.counts("billing_records_total") == {"recorded": 3, "lost": 0}
            front.process.send_signal(signal.SIGHUP)
            eventually(lambda: any("has served all it had" in line for line in front.lines))
            assert ask(front, "d")
    files = lines_of(moved), lines_of(tmp_path / "bills.2"), lines_of(bills)
    assert [[line["request_id"] for line in file] for file in files] == [["a"], ["b"], ["c", "d"]]


# -- parts


def record(id: str = "r", **fields: Any) -> RequestRecord:
    values = {"model": "m", "target_model": "m", "began_at": 1.0, "ended_at": 3.5, "outcome": Outcome.OK}
    return RequestRecord("/v1/completions", id, "POST", **{**values, **fields})


class Folder:
    """A billing file with a journal of this process."""

    def __init__(self, tmp_path: Path) -> None:
        self.file = tmp_path / "bills"
        self.path = str(self.file)
        os.mkdir(journal_folder(self.path))

    def journal(self) -> RequestJournal:
        return RequestJournal(journal_folder(self.path), lambda: 4.0, lambda: BEGAN + 3.0)

    def write(self) -> list[dict[str, Any]]:
        with BillingFile(self.path):
            pass
        return lines_of(self.file)


def test_all_facts_of_a_line(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    journal = folder.journal()
    seen = Observation(ended=True, usage=ReportedUsage(7, 5, 3, 2), token_events=5)
    ended = record(seen=seen, caller=Caller("k", "k", team="t"), pool="p", endpoint="http://a:1", status=200)
    ended.cost, ended.currency, ended.attempts, ended.target_model = 1234500, "USD", 2, "n"
    journal.begin(ended)
    journal.end(ended)
    [line] = folder.write()
    assert line.pop("id").endswith("-0")
    assert line == {
        "request_id": "r",
        "began": "2025-12-31T23:59:59.000+00:00",
        "time": "2026-01-01T00:00:01.500+00:00",
        "path": "/v1/completions",
        "key": "k",
        "team": "t",
        "model": "m",
        "target_model": "n",
        "pool": "p",
        "endpoint": "http://a:1",
        "outcome": "ok",
        "status": 200,
        "attempts": 2,
        "input_tokens": 7,
        "cached_tokens": 3,
        "output_tokens": 5,
        "reasoning_tokens": 2,
        "tokens_from": "usage",
        "cost": Decimal("0.0012345"),
        "currency": "USD",
    }
    page = (Path(request_journal.__file__).parents[3] / "docs" / "gateway-billing.md").read_text()
    assert not [fact for fact in line if f"`{fact}`" not in page]


def test_lines_that_would_not_fit_have_shorter_names(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    journal = folder.journal()
    long = "\x01" * 10_000
    journal.end(
        record(long, model=long, target_model=long, endpoint="http://" + "a" * 5000, caller=Caller(team=long))
    )
    [line] = folder.write()
    assert (len(line["model"]), len(line["request_id"])) == (40, 40)


def test_what_some_readers_take_for_the_end_of_a_line_is_escaped(tmp_path: Path) -> None:
    """As are the characters that a terminal would act on."""
    folder = Folder(tmp_path)
    journal = folder.journal()
    name = "a\x7f\x85\x9b[31m\u2028\u2029é🦊"
    journal.end(record(name, model=name, caller=Caller("k", "k", team=name)))
    [line] = folder.write()
    assert line["request_id"] == line["model"] == line["team"] == name
    text = folder.file.read_text()[:-1]
    assert text.isprintable()
    assert "é🦊" in text


def test_a_journal_grows_takes_freed_slots_and_says_when_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_journal, "MAX_FILES", 2)
    folder = Folder(tmp_path)
    journal = folder.journal()
    for number in range(2 * SLOTS + 3):
        journal.end(record(str(number)))
    assert [(dict(each.labels), each.value) for each in journal.figures()] == [
        ({"state": "recorded"}, 2 * SLOTS),
        ({"state": "lost"}, 3),
        ({}, 2 * SLOTS),
    ]
    assert len(folder.write()) == 2 * SLOTS
    journal.end(record("later"))
    assert folder.write()[-1]["request_id"] == "later"


def test_what_was_written_by_a_writer_that_was_killed_is_not_written_again(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    journal = folder.journal()
    for id in "ab":
        journal.end(record(id))
    [file] = Path(journal_folder(folder.path)).glob("*.slots")
    whole = file.read_bytes()
    assert len(folder.write()) == 2
    file.write_bytes(whole)
    assert [line["request_id"] for line in folder.write()] == ["a", "b"]


def test_a_disk_that_is_full_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, write = Folder(tmp_path), os.write
    journal = folder.journal()
    journal.end(record("a"))
    assert len(folder.write()) == 1
    journal.end(record("b"))

    def full(file: int, data: bytes) -> int:
        if len(data) > 20:
            return write(file, data[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        assert len(folder.write()) == 1, "no part of a line stays"
    assert [line["request_id"] for line in folder.write()] == ["a", "b"]


def test_one_of_two_gateways_writes_for_both(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    journal = folder.journal()
    with BillingFile(folder.path):
        journal.end(record("a"))
        eventually(lambda: folder.file.read_text().count("\n") == 1)
        with BillingFile(folder.path):
            journal.end(record("b"))
        eventually(lambda: folder.file.read_text().count("\n") == 2)
    assert [line["request_id"] for line in lines_of(folder.file)] == ["a", "b"]


def test_a_foreign_file_is_kept(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.file.write_text("not ours")
    journal = folder.journal()
    journal.end(record("a"))
    with BillingFile(folder.path):
        pass
    first, second = folder.file.read_text().splitlines()
    assert (first, json.loads(second)["request_id"]) == ("not ours", "a")


def test_what_is_noted_last_of_a_lost_request_counts(tmp_path: Path) -> None:
    slots = JournalSlots.create(str(tmp_path))
    slots.end(0, b'{"id":"before","x":1}')
    slots.free(0)
    slots.begin(0, b'{"id":"a","x":1}')
    assert [line.text for line in slots.due(orphaned=True)] == [b'{"id":"a","x":1}']
    slots.update(0, b'{"id":"a","x":2}')
    assert slots.due(orphaned=False) == []
    assert [line.text for line in slots.due(orphaned=True)] == [b'{"id":"a","x":2}']
    slots.close()


def test_who_has_no_line(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    journal = folder.journal()
    journal.end(RequestRecord("/v1/completions", "r"))
    journal.end(record("nobody", status=401))
    assert folder.write() == []


def test_a_text_that_is_not_whole_is_due_later(tmp_path: Path) -> None:
    slots = JournalSlots.create(str(tmp_path))
    slots.begin(0, b'{"id":"a"}')
    slots.states[0] = 2  # as another processor may see it before the text
    assert slots.due(orphaned=False) == []
    slots.end(0, b'{"id":"b"}')
    assert [line.text for line in slots.due(orphaned=False)] == [b'{"id":"b"}']
    assert not JournalSlots.open(slots.path).is_orphaned()
    slots.close()
    assert JournalSlots.open(slots.path).is_orphaned()
