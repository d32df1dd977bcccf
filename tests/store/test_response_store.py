"""The store of responses: what it gives to whom, what it removes, and what it does when the disk does not."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import stat
import time
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.http.errors import ApiError
from penstock.store import database
from penstock.store.database import FILE, StoreError, create
from penstock.store.response_object import Item, inputs_of
from penstock.store.response_store import ResponseStore
from penstock.store.stored_response import StoredResponse
from tests.store.stores import entry, opened


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def test_a_response_is_read_as_it_was_stored(tmp_path: Path) -> None:
    async def work() -> None:
        with opened(tmp_path) as store:
            response = entry(store)
            assert response.id.startswith(f"resp_{store.store_id}")
            assert len(response.id) == len("resp_") + 12 + 24
            await store.put(response)
            assert await store.get(response.id, "") == response
            assert await store.get(store.new_id(), "") is None
            assert await store.delete(response.id, "")
            assert await store.get(response.id, "") is None
            assert not await store.delete(response.id, "")
            kept = entry(store)
            waiting = store.put(kept)
        # Closing does what was asked for.
        await asyncio.sleep(0)
        assert waiting.done()
        with opened(tmp_path) as again:
            assert await again.get(kept.id, "") == kept
            assert again.store_id == store.store_id

    run(work())
    assert files(tmp_path) == [FILE]


def modes_of(directory: Path) -> dict[Path, int]:
    return {path: stat.S_IMODE(path.stat().st_mode) for path in directory.rglob("*")}


def test_files_are_their_users_alone(tmp_path: Path) -> None:
    async def work() -> None:
        with opened(tmp_path / "store") as store:
            await store.put(entry(store))
            modes = modes_of(tmp_path)
            assert sorted(modes.values()) == [0o600] * 4 + [0o700] * 2
            assert modes[tmp_path / "store"] == modes[tmp_path / "store" / "owners"] == 0o700

    before = os.umask(0)
    try:
        run(work())
    finally:
        os.umask(before)


def test_nobody_reads_what_another_key_has_stored(tmp_path: Path) -> None:
    async def work() -> None:
        with opened(tmp_path) as store:
            mine = entry(store, tenant="me")
            running = entry(store, tenant="me", status="in_progress")
            await asyncio.gather(store.put(mine), store.put(running))
            for tenant in ("", "other"):
                assert await store.get(mine.id, tenant) is None
                assert await store.entry(mine.id, tenant) is None
                assert await store.items([f"msg_{mine.id}"], tenant) == {}
                assert await store.page(running.id, tenant, -1, 1000) is None
                assert not await store.delete(mine.id, tenant)
                await store.cancel(running.id, tenant)
                with pytest.raises(ApiError) as foreign:
                    await store.chain(mine.id, tenant)
                with pytest.raises(ApiError) as unknown:
                    await store.chain("resp_none", tenant)
                assert foreign.value.message.replace(mine.id, "") == unknown.value.message.replace(
                    "resp_none", ""
                )
            assert await store.get(mine.id, "me") == mine
            assert await store.items([f"msg_{mine.id}"], "me")
            assert await store.get(running.id, "me") == running

    run(work())


def test_a_chain_is_whole_or_refused(tmp_path: Path) -> None:
    async def work() -> None:
        with opened(tmp_path) as store:
            chain = [entry(store, text="0")]
            for number in range(1, 5):
                chain.append(entry(store, text=str(number), previous_id=chain[-1].id))
            for each in chain:
                await store.put(each)
            assert await store.chain(chain[-1].id, "") == chain
            assert await store.chain(chain[2].id, "") == chain[:3]
            await store.delete(chain[1].id, "")
            with pytest.raises(ApiError, match="before it is not stored any more"):
                await store.chain(chain[-1].id, "")
            assert await store.chain(chain[0].id, "") == chain[:1]
            running = entry(store, status="in_progress")
            await store.put(running)
            with pytest.raises(ApiError, match="still generated") as refused:
                await store.chain(running.id, "")
            assert (refused.value.status, refused.value.param) == (400, "previous_response_id")

    run(work())


def test_a_chain_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.store.response_store.MAX_CHAIN", 3)

    async def work() -> None:
        with opened(tmp_path) as store:
            ids: list[str] = []
            for _ in range(4):
                response = entry(store, previous_id=ids[-1] if ids else None)
                await store.put(response)
                ids.append(response.id)
            with pytest.raises(ApiError, match="at most 3 responses"):
                await store.chain(ids[-1], "")
            assert await store.context(ids[-1], "", lambda found: [response.id for response in found]) == ids

    run(work())


def test_items_are_found_by_their_ids(tmp_path: Path) -> None:
    async def work() -> None:
        with opened(tmp_path) as store:
            response, other = entry(store, text="é\n"), entry(store)
            await store.put(response)
            await store.put(other)
            output, given, another = f"msg_{response.id}", f"in_{response.id}", f"msg_{other.id}"
            found = await store.items([output, given, another, "msg_none"], "")
            assert set(found) == {output, given, another}
            assert json.loads(found[output]) == {"id": output, "text": "é\n"}
            assert json.loads(found[given])["content"] == "é\n"
            await store.delete(response.id, "")
            assert set(await store.items([output, given, another], "")) == {another}

    run(work())


def test_a_response_is_read_once_for_many_of_its_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def noted(response: StoredResponse) -> list[Item]:
        read.append(response.id)
        return inputs_of(response)

    monkeypatch.setattr(database, "inputs_of", noted)

    async def work() -> None:
        with opened(tmp_path) as store:
            items = [{"id": f"in_{number}", "content": "x"} for number in range(100)]
            large, other = entry(store, input=json.dumps(items).encode()), entry(store)
            for response in (large, other):
                await store.put(response)
            read.clear()
            ids = [item["id"] for item in items]
            assert set(await store.items([*ids, f"in_{other.id}"], "")) == {*ids, f"in_{other.id}"}
            assert sorted(read) == sorted((large.id, other.id))
            monkeypatch.setattr("penstock.store.response_store.MAX_REFERRED_BYTES", len(large.input))
            assert set(await store.items([f"in_{other.id}"], "")) == {f"in_{other.id}"}
            with pytest.raises(ApiError, match="the items are those of responses with more than"):
                await store.items(ids[:1], "")

    run(work())


def test_old_responses_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        with opened(tmp_path, ttl_s=10_000.0) as store:
            old, new = entry(store, created_at=time.time() - 9000), entry(store)
            await asyncio.gather(store.put(old), store.put(new))
            assert await store.get(old.id, "") == old
            now = time.time()
            monkeypatch.setattr(database, "time", SimpleNamespace(time=lambda: now + 2000))
            assert await store.get(old.id, "") is None
            assert await store.get(new.id, "") == new
            with pytest.raises(ApiError):
                await store.chain(old.id, "")
            await store.put(entry(store))
            assert store._metrics.entries == 2
            assert store._metrics.removed == {"ttl": 1, "bytes": 0}

    run(work())


def test_the_size_is_bounded_by_removing_what_was_not_used_for_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.store.response_store.TOUCH_S", -1.0)

    async def work() -> None:
        most = 1 << 20
        with opened(tmp_path, most_bytes=most) as store:
            first = entry(store, text="x" * 10_000)
            running = entry(store, status="in_progress")
            await store.put(first)
            await store.put(running)
            ids = []
            for _ in range(120):
                response = entry(store, text="x" * 10_000)
                await store.put(response)
                ids.append(response.id)
                await store.chain(first.id, "")  # which uses it
                assert store._metrics.bytes <= most
            kept = [id for id in ids if await store.get(id, "") is not None]
            assert kept == ids[-len(kept) :]
            assert 40 < len(kept) < 60
            assert await store.get(first.id, "") == first
            assert await store.get(running.id, "") == running
            assert store._metrics.removed["bytes"] == 120 - len(kept)
            with pytest.raises(ApiError):
                await store.put(entry(store, text="x" * most))
            assert store._metrics.failures == 1
            assert store._metrics.entries == len(kept) + 2

    run(work())


def test_writes_that_wait_are_one_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits: list[database.Database] = []
    commit = database.Database.commit

    def counted(self: database.Database) -> None:
        commits.append(self)
        commit(self)

    monkeypatch.setattr(database.Database, "commit", counted)

    async def work() -> None:
        with opened(tmp_path) as store:
            await asyncio.gather(*(store.put(entry(store)) for _ in range(200)))
            assert store._metrics.entries == 200

    run(work())
    assert len(commits) < 20


def test_one_bad_write_does_not_spoil_the_others(tmp_path: Path) -> None:
    async def work() -> None:
        with opened(tmp_path) as store:
            good, twice = [entry(store) for _ in range(10)], entry(store)
            results = await asyncio.gather(
                *(store.put(each) for each in [*good[:5], twice, twice, *good[5:]]), return_exceptions=True
            )
            assert [isinstance(result, ApiError) for result in results] == [*[False] * 6, True, *[False] * 5]
            for each in [*good, twice]:
                assert await store.get(each.id, "") == each

    run(work())


def test_a_full_disk_fails_the_writes_and_no_more(tmp_path: Path) -> None:
    async def work() -> None:
        with opened(tmp_path) as store:
            before = entry(store)
            await store.put(before)
            pages = (await store._read(lambda db: db._run("PRAGMA page_count").fetchone()))[0]
            await store._read(lambda db: db._run(f"PRAGMA max_page_count={pages + 2}"))
            with pytest.raises(ApiError, match="response store failed") as failure:
                await store.put(entry(store, text="x" * 100_000))
            assert failure.value.code == "response_store_failed"
            assert await store.get(before.id, "") == before
            await store._read(lambda db: db._run(f"PRAGMA max_page_count={pages + 1000}"))
            after = entry(store, text="x" * 100_000)
            await store.put(after)
            assert await store.get(after.id, "") == after
            assert store._metrics.failures == 1

    run(work())


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"x" * 5000, "not a database"),
        ("CREATE TABLE other (x)", "another program"),
        (f"PRAGMA application_id={database.APPLICATION_ID}; PRAGMA user_version=99", "version 99"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | str, problem: str) -> None:
    if isinstance(content, bytes):
        (tmp_path / FILE).write_bytes(content)
    else:
        with sqlite3.connect(tmp_path / FILE) as connection:
            connection.executescript(content)
        connection.close()
    with pytest.raises(StoreError, match=problem):
        create(tmp_path)


def test_what_belongs_to_others_is_left_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "notes").touch()
    with pytest.raises(StoreError, match="holds other files"):
        create(tmp_path)
    with pytest.raises(StoreError, match="is no directory"):
        create(tmp_path / "notes")
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("CREATE TABLE other (x)")
    connection.close()
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(StoreError, match="another program"):
        create(tmp_path)
    assert (tmp_path / FILE).read_bytes() == before
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    (tmp_path / "volume" / "lost+found").mkdir(parents=True)
    create(tmp_path / "volume")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    async def work() -> None:
        with opened(tmp_path) as store:
            await asyncio.gather(*(store.put(entry(store, text="x" * 1000)) for _ in range(100)))

    run(work())
    data = bytearray((tmp_path / FILE).read_bytes())
    data[20 * 4096 : 30 * 4096] = os.urandom(10 * 4096)
    (tmp_path / FILE).write_bytes(data)
    with pytest.raises(StoreError, match=r"damaged|malformed"):
        create(tmp_path)


# -- responses in the background


def events(first: int, count: int) -> bytes:
    return b"".join(b'event: e\ndata: {"sequence_number":%d}\n\n' % n for n in range(first, first + count))


async def read_all(store: ResponseStore, id: str, after: int = -1, most: int = 100) -> bytes:
    data = b""
    while page := await store.page(id, "", after, most):
        data += page.data
        if page.last == after:
            break
        after = page.last
    return data


def test_events_are_read_from_each_number_on(tmp_path: Path) -> None:
    async def work() -> None:
        with opened(tmp_path) as store:
            response = entry(store, status="in_progress")
            await store.put(response)
            for first, count in ((0, 3), (3, 1), (4, 7)):
                assert await store.append(response.id, first, count, events(first, count))
            page = await store.page(response.id, "", 10, 100)
            assert page is not None
            assert (page.status, page.data, page.last) == ("in_progress", b"", 10)
            body = response.body.replace(b"in_progress", b"completed")
            assert await store.finish(response.id, "completed", body, 11, 2, events(11, 2))
            for after in range(-1, 13):
                assert await read_all(store, response.id, after) == events(after + 1, 12 - after)
            found = await store.get(response.id, "")
            assert found is not None
            assert (found.status, found.body) == ("completed", body)
            assert not await store.append(response.id, 13, 1, events(13, 1))

    run(work())


def test_what_runs_is_bounded_too(tmp_path: Path) -> None:
    async def work() -> None:
        with opened(tmp_path, most_bytes=1 << 20) as store:
            response = entry(store, status="in_progress")
            await store.put(response)
            kept = entry(store)
            await store.put(kept)
            padding = b":" + b"x" * (600 << 10) + b"\n\n"
            assert await store.append(response.id, 0, 1, padding)
            assert await store.append(response.id, 1, 1, padding)
            assert await store.get(kept.id, "") is None
            with pytest.raises(ApiError):
                await store.append(response.id, 2, 1, padding)
            with pytest.raises(ApiError) as refused:
                await store.put(entry(store, status="in_progress"))
            assert refused.value.status == 429
            assert await store.finish(response.id, "failed", response.body, 2, 1, events(2, 1))
            await store.put(entry(store, status="in_progress"))
            assert store._metrics.entries == 1

    run(work())


def test_an_end_by_cancel_or_delete_reaches_the_owner(tmp_path: Path) -> None:
    async def work() -> None:
        with opened(tmp_path) as owner, opened(tmp_path) as other:
            cancelled, deleted = entry(owner, status="in_progress"), entry(owner, status="in_progress")
            await owner.put(cancelled)
            await owner.put(deleted)
            assert await owner.running() == {cancelled.id, deleted.id}
            version = owner.version
            await other.cancel(cancelled.id, "")
            await other.cancel(cancelled.id, "")
            await owner.changed_since(version, 10.0)
            assert owner.version != version
            assert await owner.running() == {deleted.id}
            assert await other.delete(deleted.id, "")
            assert await owner.running() == set()
            for id in (cancelled.id, deleted.id):
                assert not await owner.append(id, 0, 1, events(0, 1))
                assert not await owner.finish(id, "completed", b"{}", 0, 1, events(0, 1))
            found = await owner.get(cancelled.id, "")
            assert found is not None
            assert found.status == json.loads(found.body)["status"] == "cancelled"
            await owner.disown([cancelled.id])
            assert await owner.get(deleted.id, "") is None

    run(work())


def test_what_a_dead_owner_generated_has_failed(tmp_path: Path) -> None:
    async def work() -> None:
        with opened(tmp_path) as store:
            dead = ResponseStore(tmp_path, most_bytes=1 << 30, ttl_s=3600)
            response, ended = entry(dead, status="in_progress"), entry(dead)
            await dead.put(response)
            await dead.put(ended)
            await dead.append(response.id, 0, 2, events(0, 2))
            found = await store.get(response.id, "")
            assert found is not None
            assert found.status == "in_progress"
            os.close(dead._owner._fd)  # as the kernel does
            found = await store.get(response.id, "")
            assert found is not None
            assert found.status == "failed"
            body = json.loads(found.body)
            assert body["status"] == "failed"
            assert body["error"]["code"] == "server_error"
            page = await store.page(response.id, "", 1, 1000)
            assert page is not None
            assert page.last == 2
            event = json.loads(page.data.split(b"data: ")[1])
            assert event == {"type": "response.failed", "sequence_number": 2, "response": body}
            assert await store.get(ended.id, "") == ended
            assert store._owner.others() == []
            dead._jobs.put(None)
            dead._thread.join()

    run(work())


def test_a_damaged_response_of_a_dead_owner_stops_nothing(tmp_path: Path) -> None:
    """It is met in housekeeping: the thread goes on for all others."""

    async def work() -> None:
        with opened(tmp_path) as dead:
            await dead.put(entry(dead, status="in_progress"))
            owner = dead._owner.id
        (tmp_path / "owners" / owner).touch()  # it has died instead
        with sqlite3.connect(tmp_path / FILE) as connection:
            connection.execute("UPDATE bodies SET data = ?", (b"damaged",))
        connection.close()
        with opened(tmp_path) as store:
            kept = entry(store)
            await store.put(kept)
            assert await store.get(kept.id, "") == kept

    run(work())


def test_an_owner_of_which_nothing_is_left_is_forgotten(tmp_path: Path) -> None:
    async def work() -> None:
        create(tmp_path)
        (tmp_path / "owners").mkdir()
        (tmp_path / "owners" / "0123456789abcdef").touch()
        with opened(tmp_path) as store:
            await store.running()  # the thread has started
            while store._owner.others():  # noqa: ASYNC110 - the thread is no task
                await asyncio.sleep(0.001)

    run(work())
