"""Stored responses at two API servers: read, followed and cancelled at either, and what is left of them when
one is killed or replaced."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.store.database import FILE
from tests.integration.server import SYNTHETIC, TLS, Server, client_of_each, total, wait_until
from tests.store.stores import opened

WAIT_S = 60
MINE, OTHER = {"authorization": "Bearer mine"}, {"authorization": "Bearer other"}
MEMORY = Path("/dev/shm")
LONG = 50_000
"""Tokens of responses that run until they are cancelled, however slow the machine is: four minutes."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = (
        "--synthetic-step-ms",
        "5",
        "--max-model-len",
        str(2 * LONG),
        "--api-server-count",
        "2",
        "--response-store",
        "memory",
        "--api-key",
        "mine",
        "--api-key",
        "other",
    )
    with Server(*SYNTHETIC, *options, directory=tmp_path_factory.mktemp("fleet")) as running:
        wait_until(lambda: _ready(running), WAIT_S, "connecting to the engine")
        opened_files = running.children("api-server")[0].open_files()
        [directory] = {Path(file.path).parents[1] for file in opened_files if Path(file.path).name == FILE}
        assert directory.parent == MEMORY
        yield running
    assert not directory.exists()


def _ready(fleet: Server) -> bool:
    with connections(fleet) as pair:
        return all(client.get("/ready").status_code == 200 for client in pair)


def connections(fleet: Server, headers: dict[str, str] = MINE) -> AbstractContextManager[list[httpx.Client]]:
    """Two clients, each with a connection to another API server."""
    return client_of_each(fleet, 2, WAIT_S, headers)


def create(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "input": "hello", "max_output_tokens": 20, "temperature": 0, **fields}
    made: dict[str, Any] = client.post("/v1/responses", json=body).raise_for_status().json()
    return made


def retrieve(client: httpx.Client, id: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"/v1/responses/{id}").raise_for_status().json()
    return found


def follow(client: httpx.Client, id: str, after: int | None = None) -> list[str]:
    """The events of a response, to its end."""
    query = {"stream": "true"} | ({} if after is None else {"starting_after": str(after)})
    reply = client.get(f"/v1/responses/{id}", params=query).raise_for_status()
    assert reply.headers["content-type"].startswith("text/event-stream")
    return events_of(reply.text)


def events_of(text: str) -> list[str]:
    return [event for event in text.split("\n\n")[:-1] if not event.startswith(":")]


def beginning(pieces: Iterator[str], events: int) -> str:
    """Of a stream, with so many events at least."""
    text = ""
    while len(events_of(text)) < events:
        text += next(pieces)
    return text


def data_of(event: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(event.partition("data: ")[2])
    return data


def test_a_response_is_read_continued_and_deleted_at_either(fleet: Server) -> None:
    with connections(fleet) as (one, two):
        first = create(one)
        assert retrieve(two, first["id"]) == first
        second = create(two, input="more", previous_response_id=first["id"])
        items = one.get(f"/v1/responses/{second['id']}/input_items", params={"order": "asc"}).json()
        assert [item["role"] for item in items["data"]] == ["user", "assistant", "user"]
        assert items["data"][1] == first["output"][0]
        last = items["data"][-1]["id"]
        page = two.get(f"/v1/responses/{second['id']}/input_items", params={"limit": "1"}).json()
        assert (page["first_id"], page["last_id"], page["has_more"]) == (last, last, True)
        rest = two.get(f"/v1/responses/{second['id']}/input_items", params={"after": last}).json()
        assert [item["id"] for item in rest["data"]] == [item["id"] for item in items["data"]][1::-1]
        deleted = two.delete(f"/v1/responses/{first['id']}")
        assert deleted.json() == {"id": first["id"], "object": "response", "deleted": True}
        assert one.delete(f"/v1/responses/{first['id']}").status_code == 404
        assert retrieve(one, second["id"]) == second
        refused = one.post("/v1/responses", json={"input": "x", "previous_response_id": second["id"]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "previous_response_not_found")


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("stream=true&starting_after=x", "starting_after"),
        ("stream=true", "stream"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=none", "after"),
    ],
)
def test_a_bad_query_is_refused_by_name(fleet: Server, query: str, field: str) -> None:
    with connections(fleet) as (one, _):
        id = create(one)["id"]
        refused = one.get(f"/v1/responses/{id}{'' if query.startswith('/') else '?'}{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


def test_another_key_sees_nothing(fleet: Server) -> None:
    with connections(fleet) as (one, _), connections(fleet, OTHER) as (_, other):
        done = create(one)["id"]
        running = create(one, background=True, max_output_tokens=LONG)["id"]
        for id in (done, running):
            unknown = id[:-4] + "0000"
            for method, path in (
                ("GET", ""),
                ("DELETE", ""),
                ("GET", "?stream=true"),
                ("POST", "/cancel"),
                ("GET", "/input_items"),
            ):
                replies = [other.request(method, f"/v1/responses/{each}{path}") for each in (id, unknown)]
                assert [reply.status_code for reply in replies] == [404, 404], (method, path)
                assert replies[0].text.replace(id, "") == replies[1].text.replace(unknown, "")
            body = {"input": "x", "previous_response_id": id}
            assert other.post("/v1/responses", json=body).status_code == 404
        assert retrieve(one, running)["status"] in ("queued", "in_progress")
        assert one.delete(f"/v1/responses/{running}").status_code == 200


def test_events_of_a_background_response_are_followed_from_each_number_on(fleet: Server) -> None:
    """By its creator until it leaves, then by others at both API servers."""
    with connections(fleet) as (one, two):
        body = {"input": "hello", "max_output_tokens": LONG, "background": True, "stream": True}
        with (
            httpx.Client(base_url=fleet.url, headers=MINE, timeout=WAIT_S, verify=TLS) as creator,
            creator.stream("POST", "/v1/responses", json=body) as reply,
        ):
            seen = events_of(beginning(reply.iter_text(), 100))
        id = data_of(seen[0])["response"]["id"]
        assert retrieve(two, id)["status"] == "in_progress"
        with two.stream("GET", f"/v1/responses/{id}?stream=true&starting_after=2") as reply:
            pieces = reply.iter_text()
            text = beginning(pieces, 120)
            one.post("/abort_requests", json={"all": True}).raise_for_status()
            live = events_of(text + "".join(pieces))
        events = follow(one, id)
        assert [data_of(event)["sequence_number"] for event in events] == list(range(len(events)))
        assert live == events[3:]
        assert events[: len(seen)] == seen
        final = data_of(events[-1])
        assert final["type"] == "response.incomplete"
        assert final["response"] == retrieve(one, id) == retrieve(two, id)
        for after in (0, 1, 50, len(events) - 2, len(events) - 1, len(events) + 5):
            assert follow(two, id, after) == events[after + 1 :]


def test_a_background_response_is_cancelled_at_the_other_api_server(fleet: Server) -> None:
    with connections(fleet) as (one, two):
        done = create(one)
        refused = one.post(f"/v1/responses/{done['id']}/cancel")
        assert (refused.status_code, "background" in refused.text) == (400, True)
        id = create(one, background=True, max_output_tokens=LONG)["id"]
        for client in (two, two, one):
            cancelled = client.post(f"/v1/responses/{id}/cancel").raise_for_status().json()
            assert (cancelled["id"], cancelled["status"]) == (id, "cancelled")
        follow(two, id)  # which ends
        wait_until(lambda: not running(fleet), WAIT_S, "the end of the response")
        finished = create(two, background=True, max_output_tokens=1)["id"]
        follow(two, finished)
        assert two.post(f"/v1/responses/{finished}/cancel").json()["status"] == "incomplete"


def running(fleet: Server) -> float:
    """Background responses and streams that run."""
    text = fleet.metrics(**MINE)
    lines = [line.split() for line in text.splitlines()]
    names = ("penstock:background_responses{", "penstock:streams{")
    return sum(float(line[1]) for line in lines if line and line[0].startswith(names))


def test_openais_client_reads_follows_and_cancels(fleet: Server) -> None:
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="mine", max_retries=0) as client:
        first = client.responses.create(model="m", input="hello", max_output_tokens=5)
        second = client.responses.create(
            model="m", input="more", max_output_tokens=5, previous_response_id=first.id
        )
        assert client.responses.retrieve(second.id) == second
        items = list(client.responses.input_items.list(second.id, limit=1, order="asc"))  # of three pages
        assert [item.type for item in items] == ["message"] * 3
        background = client.responses.create(
            model="m", input="hello", max_output_tokens=30, background=True, stream=True
        )
        events = list(background)
        id = events[0].response.id  # type: ignore[union-attr]
        assert list(client.responses.retrieve(id, stream=True, starting_after=4)) == events[5:]
        long = client.responses.create(model="m", input="hello", max_output_tokens=LONG, background=True)
        assert client.responses.cancel(long.id).status == "cancelled"
        client.responses.delete(long.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(long.id)


def test_a_replaced_api_server_finishes_what_runs_in_the_background(fleet: Server) -> None:
    before = {process.pid for process in fleet.children("api-server")}
    with connections(fleet) as (one, two):
        done = create(one)
        short = create(one, background=True, max_output_tokens=200)["id"]
        long = [create(each, background=True, max_output_tokens=LONG)["id"] for each in (one, two)]
    fleet.process.send_signal(signal.SIGHUP)  # they have no connections any more, which they would wait for

    def replaced() -> bool:
        return len({process.pid for process in fleet.children("api-server")} - before) == 2

    wait_until(replaced, WAIT_S, "the replacement")
    with connections(fleet) as (one, two):
        assert {retrieve(one, id)["status"] for id in long} == {"in_progress"}
        assert data_of(follow(two, short)[-1])["type"] == "response.incomplete"
        assert retrieve(one, short)["usage"]["output_tokens"] == 200
        assert retrieve(two, done["id"]) == done
        for id in long:
            assert two.post(f"/v1/responses/{id}/cancel").json()["status"] == "cancelled"
    wait_until(
        lambda: not {process.pid for process in fleet.children("api-server")} & before, WAIT_S, "their end"
    )


def test_what_was_acknowledged_outlives_a_killed_api_server(fleet: Server) -> None:
    with connections(fleet) as pair:
        done = [create(client) for client in pair]
        ids = [create(client, background=True, max_output_tokens=LONG)["id"] for client in pair]
        killed = fleet.children("api-server")[0]
        killed.kill()
    wait_until(lambda: len(fleet.children("api-server")) == 2 and _ready(fleet), WAIT_S, "the restart")
    with connections(fleet) as (one, two):
        assert [retrieve(two, each["id"]) for each in done] == done
        statuses = [retrieve(one, id)["status"] for id in ids]
        assert sorted(statuses) == ["failed", "in_progress"]
        failed, goes_on = sorted(ids, key=lambda id: statuses[ids.index(id)] != "failed")
        events = [data_of(event) for event in follow(two, failed)]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"] == retrieve(one, failed)
        assert events[-1]["response"]["error"]["code"] == "server_error"
        assert two.post(f"/v1/responses/{goes_on}/cancel").json()["status"] == "cancelled"
    wait_until(lambda: not running(fleet), WAIT_S, "the end of the response")


def test_a_shutdown_ends_what_runs_and_keeps_the_rest(tmp_path: Path) -> None:
    store = tmp_path / "kept"
    options = ("--response-store-dir", str(store), "--drain-timeout", "3", "--synthetic-step-ms", "5")
    with Server(*SYNTHETIC, *options, directory=tmp_path) as server:
        with httpx.Client(base_url=server.url, timeout=WAIT_S, verify=TLS) as client:
            done = create(client)
            short = create(client, background=True, max_output_tokens=50)["id"]
            long = create(client, background=True, max_output_tokens=2000)["id"]
        server.end()

    async def look() -> None:
        with opened(store) as left:
            found = [await left.get(id, "") for id in (done["id"], short, long)]
            assert [each and each.status for each in found] == ["incomplete", "incomplete", "failed"]
            assert found[0] is not None
            assert json.loads(found[0].body) == done
            assert found[2] is not None
            assert "stopped" in json.loads(found[2].body)["error"]["message"]

    asyncio.run(look())
    assert {path.name for path in store.rglob("*") if path.is_file()} == {FILE, "seal.key"}


SESSIONS, TURNS = 200, 20


@pytest.mark.slow
def test_many_sessions_leave_nothing_behind(tmp_path: Path) -> None:
    """Every tenth turn is given up in mid-stream."""
    options = ("--api-server-count", "2", "--response-store-dir", str(tmp_path / "kept"))
    with Server(*SYNTHETIC, *options, directory=tmp_path) as server:
        servers = server.children("api-server")
        with connections(server, {}) as pair:
            for client in pair:
                create(client)
        idle = [process.num_fds() for process in servers]
        done, left = asyncio.run(asyncio.wait_for(talk_all(server.url), 300))
        assert (done, left) == (SESSIONS * TURNS * 9 // 10, SESSIONS * TURNS // 10)

        def settled() -> bool:
            text = server.metrics()
            return total(text, "penstock:streams") == 0 and total(text, "penstock:connections") == 1

        wait_until(settled, WAIT_S, "the end of all streams")
        text = server.metrics()
        stored = total(text, "penstock:responses_stored_total")
        ended = total(text, "penstock:requests_total", outcome="length")
        aborted = total(text, "penstock:requests_total", outcome="abort")
        assert total(text, "penstock:response_store_failures_total") == 0
        assert (stored, ended + aborted) == (ended, SESSIONS * TURNS + 2)
        assert ended >= done + 2  # on a busy machine, some end before their client gives up
        assert aborted > left / 2
        assert [process.num_fds() for process in servers] == idle
    with sqlite3.connect(tmp_path / "kept" / FILE) as connection:
        counts = [
            connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("responses", "bodies", "inputs", "items", "events")
        ]
        ((entries, size),) = connection.execute("SELECT count, bytes FROM store")
        ((summed,),) = connection.execute("SELECT sum(bytes) FROM responses")
    connection.close()
    assert counts == [stored, stored, stored, 2 * stored, 0]
    assert (entries, size) == (stored, summed)


async def talk_all(url: str) -> tuple[int, int]:
    """All sessions at the same time: turns that ended, and turns that were given up."""
    limits = httpx.Limits(max_connections=SESSIONS)
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, limits=limits, verify=TLS) as client:
        counts = await asyncio.gather(*(talk(client, number) for number in range(SESSIONS)))
    return sum(done for done, _ in counts), sum(left for _, left in counts)


async def talk(client: httpx.AsyncClient, number: int) -> tuple[int, int]:
    last, done, left = None, 0, 0
    for turn in range(TURNS):
        gives_up = (number + turn) % 10 == 0
        body = {
            "input": f"turn {turn}",
            "max_output_tokens": 1000 if gives_up else 5,
            "previous_response_id": last,
            "stream": True,
        }
        async with client.stream("POST", "/v1/responses", json=body) as reply:
            assert reply.status_code == 200, await reply.aread()
            text = ""
            async for piece in reply.aiter_text():
                text += piece
                if gives_up and "output_text.delta" in text:
                    break
        if gives_up:
            left += 1
        else:
            final = data_of(events_of(text)[-1])
            assert final["type"] == "response.incomplete"
            last, done = final["response"]["id"], done + 1
    return done, left
