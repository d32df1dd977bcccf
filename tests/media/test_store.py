"""The host's store of pictures' pages: leases, room, and what killed processes leave."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from penstock.media.pages import PageFacts, sealed
from penstock.media.store import MAX_ATTEMPTS, MediaStore, StoreFull

FACTS = PageFacts(ids=np.arange(3, dtype="<i4").tobytes(), features=3, grid=(1, 2, 3))
OTHER_PROCESS = """
import sys
from penstock.media.store import MediaStore
store = MediaStore(sys.argv[1], int(sys.argv[2]))
kept = []
for line in sys.stdin:
    kept.append(eval(line))
    print(kept[-1] is not None, flush=True)
"""


def array(size: int = 1000) -> dict[str, np.ndarray]:
    return {"pixel_values": np.arange(size, dtype=np.uint8)}


def sealed_size(size: int = 1000) -> int:
    return sum(map(len, sealed(FACTS, array(size))))


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MediaStore]:
    there = MediaStore(str(tmp_path), 10 * sealed_size())
    yield there
    there.close()


class Other:
    """Another process with the store."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def do(self, call: str) -> bool:
        """Make a call, and say whether it gave anything; what it gave is kept."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(call + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline() == "True\n"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def other_process(store: MediaStore) -> Iterator[Other]:
    command = [sys.executable, "-c", OTHER_PROCESS, store.directory, str(store.capacity)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        try:
            yield Other(process)
        finally:
            process.kill()


def files(store: MediaStore) -> list[str]:
    return sorted(path.name for path in Path(store.directory).iterdir() if path.is_file())


def test_what_is_written_is_read_through_a_map_that_outlives_its_lease(store: MediaStore) -> None:
    assert store.lease(key(1)) is None
    with store.write(key(1), FACTS, array()) as lease:
        assert lease.size == store.used_bytes() == sealed_size()
    lease.close()
    found = store.lease(key(1))
    assert found is not None
    with found:
        pages = found.pages()
    assert pages.facts == FACTS
    Path(store.directory, key(1).hex()).unlink()
    np.testing.assert_array_equal(pages.arrays["pixel_values"], array()["pixel_values"])
    with pytest.raises(ValueError, match="read-only"):
        pages.arrays["pixel_values"][0] = 1
    assert len(sealed(FACTS, array(0))) == 3


def test_a_sealed_file_is_nobody_elses_and_not_written_again(store: MediaStore) -> None:
    store.write(key(1), FACTS, array()).close()
    path = Path(store.directory, key(1).hex())
    assert path.stat().st_mode & 0o777 == 0o400
    with store.write(key(1), FACTS, array(7)) as lease:
        assert lease.size == sealed_size()
    assert files(store) == [key(1).hex(), "account"]
    assert store.used_bytes() == sealed_size()


def test_the_least_recently_used_of_what_nobody_holds_leaves_first(store: MediaStore) -> None:
    held = [store.write(key(number), FACTS, array()) for number in range(10)]
    assert store.used_bytes() == store.capacity
    with pytest.raises(StoreFull, match=f"{sealed_size()} bytes do not fit: {store.capacity} of"):
        store.write(key(10), FACTS, array())
    for number in (0, 1, 2, 3):
        held[number].close()
    again = store.lease(key(0))
    assert again is not None
    again.close()  # used last
    store.write(key(10), FACTS, array()).close()
    there = files(store)
    assert key(1).hex() not in there
    assert {key(0).hex(), key(3).hex(), *(key(number).hex() for number in range(4, 11))} <= {*there}
    assert store.used_bytes() <= store.capacity
    with pytest.raises(StoreFull):
        store.write(key(11), FACTS, array(20_000))


def test_a_store_of_small_files_is_bounded_by_their_number(
    store: MediaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.media.store.MAX_FILES", 4)
    for number in range(9):
        store.write(key(number), FACTS, array(1)).close()
    assert 2 <= len(files(store)) - 1 <= 4
    assert key(8).hex() in files(store)


def test_an_account_left_wrong_by_a_killed_process_is_made_anew(store: MediaStore) -> None:
    store.write(key(1), FACTS, array()).close()
    account = Path(store.directory, "account")
    account.write_bytes(account.read_bytes()[:-1] + b"\0")
    Path(store.directory, key(1).hex()).unlink()
    assert store.used_bytes() == 0


def test_leases_and_unfinished_files_end_with_their_process(store: MediaStore) -> None:
    store.write(key(1), FACTS, array(8000)).close()
    with other_process(store) as other:
        assert other.do(f"store.lease({key(1)!r})")
        assert not other.do(f"store.lease({key(2)!r})")
        assert other.do(f"store._reserve({sealed_size()})")  # where a writer may be killed
        assert store.used_bytes() == sealed_size(8000) + sealed_size()
        with pytest.raises(StoreFull):
            store.write(key(2), FACTS, array(8000))
        other.kill()
        store.write(key(2), FACTS, array(8000)).close()
    assert files(store) == [key(2).hex(), "account"]
    assert store.used_bytes() == sealed_size(8000)


def test_one_process_prepares_a_key_and_a_killed_one_frees_it(store: MediaStore) -> None:
    with other_process(store) as other:
        assert other.do(f"[flight := store.single_flight({key(1)!r}), flight.__enter__()]")
        with pytest.raises(BlockingIOError), store.single_flight(key(1), wait=False):
            pass
        with store.single_flight(b"\1" + key(1)[1:], wait=False):  # another lock
            pass
        waited = threading.Event()

        def wait() -> None:
            with store.single_flight(key(1)):
                waited.set()

        waiter = threading.Thread(target=wait)
        waiter.start()
        assert not waited.is_set()
        other.kill()
        waiter.join(30)
        assert waited.is_set()


def test_a_picture_that_has_ended_two_workers_is_refused(store: MediaStore) -> None:
    for _ in range(MAX_ATTEMPTS):
        assert store.begin_attempt(key(1))
    assert not store.begin_attempt(key(1))
    assert store.begin_attempt(key(2))
    store.end_attempt(key(2))
    store.end_attempt(key(2))
    for _ in range(MAX_ATTEMPTS):
        assert store.begin_attempt(key(2))


def test_attempts_are_counted_where_there_is_no_room(store: MediaStore) -> None:
    for attempts in range(1, MAX_ATTEMPTS + 1):
        assert store.begin_attempt(key(1))
        (counted,) = Path(store.directory, "attempts").iterdir()
        assert (counted.stat().st_size, counted.stat().st_blocks) == (attempts, 0)


def test_the_attempts_of_so_many_pictures_are_counted(
    store: MediaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.media.store.MAX_COUNTED", 3)
    for number in range(9):
        assert store.begin_attempt(key(number))
    assert len([*Path(store.directory, "attempts").iterdir()]) == 3


def test_two_processes_share_a_small_store(store: MediaStore) -> None:
    """Both write and lease the same keys: nothing is torn, and the account is right at the end."""
    with other_process(store) as other:
        script = (
            "[lease.close() for i in range(300) for lease in [store.write((i % 23).to_bytes(32, 'big'), "
            "__import__('penstock.media.pages').media.pages.PageFacts(b'', i % 23), "
            "{'a': __import__('numpy').full(1000, i % 23, 'u1')})]]"
        )
        writer = threading.Thread(target=other.do, args=[script])
        writer.start()
        for index in range(300):
            number = index % 23
            with suppress(StoreFull):
                arrays = {"a": np.full(1000, number, "u1")}
                store.write(key(number), PageFacts(b"", number), arrays).close()
            lease = store.lease(key((number + 5) % 23))
            if lease is not None:
                with lease:
                    facts, read = lease.pages()
                    assert {facts.features} == {*read["a"].tolist()}
        writer.join(60)
        assert other.do("True")
    there = [path for path in Path(store.directory).iterdir() if path.is_file() and path.name != "account"]
    assert store.used_bytes() == sum(path.stat().st_size for path in there) <= store.capacity


def test_the_description_is_no_page(tmp_path: Path) -> None:
    store = MediaStore(str(tmp_path), 1 << 20)
    assert store.description() is None
    store.describe(b"first")
    store.describe(b"second")
    assert MediaStore(str(tmp_path), 1 << 20).description() == b"second"
    assert store.used_bytes() == 0
