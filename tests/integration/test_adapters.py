"""LoRA adapters of a real fleet: loaded through any API server, over deaths and many changes at once."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from tests.adapters import make_adapter
from tests.integration.clients import Streams, texts_of, until_interrupted
from tests.integration.golden import write_model
from tests.integration.hosts import Hosts, up
from tests.integration.server import SYNTHETIC, Server, client_of_each, wait_until

SERVERS, ENGINES = 3, 2
WAIT_S = 90
PROMPT: dict[str, Any] = {"prompt": "x", "max_tokens": 8, "temperature": 0, "ignore_eos": True}

Clients = list[httpx.Client]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of adapters: first, second, a1, ..., a9."""
    directory = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(["first", "second", *(f"a{number}" for number in range(1, 10))]):
        make_adapter(directory / name, seed=seed)
    make_adapter(directory / "wide", rank=32)
    outside = make_adapter(tmp_path_factory.mktemp("outside") / "adapter")
    (directory / "link").symlink_to(outside)
    return directory


def fleet_of(adapters: Path, directory: Path, servers: int, engines: int) -> Server:
    return Server(
        *SYNTHETIC,
        *("--api-server-count", str(servers), "--data-parallel-size", str(engines)),
        *("--enable-lora", "--lora-modules", f"start={adapters / 'first'}", "--lora-dir", str(adapters)),
        directory=directory,
    )


@pytest.fixture(scope="module")
def fleet(adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with fleet_of(adapters, tmp_path_factory.mktemp("fleet"), SERVERS, ENGINES) as running:
        yield running


@pytest.fixture
def clients(fleet: Server) -> Iterator[Clients]:
    """One connection to each API server."""
    with client_of_each(fleet, SERVERS, WAIT_S) as found:
        yield found
        for name in listed(found[0]) - {"m", "start"}:
            assert unload(found[0], name).status_code == 200


def load(
    client: httpx.Client, name: str, path: str, *, replace: bool = False, key: str = ""
) -> httpx.Response:
    body = {"lora_name": name, "lora_path": path, "load_inplace": replace}
    return client.post("/v1/load_lora_adapter", json=body, headers={"idempotency-key": key} if key else {})


def unload(client: httpx.Client, name: str, *, key: str = "") -> httpx.Response:
    headers = {"idempotency-key": key} if key else {}
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=headers)


def complete(client: httpx.Client, model: str, **options: Any) -> httpx.Response:
    return client.post("/v1/completions", json=PROMPT | {"model": model} | options)


def text_of(client: httpx.Client, model: str, **options: Any) -> str:
    reply = complete(client, model, **options)
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == model
    return text_in(reply)


def text_in(reply: httpx.Response) -> str:
    text: str = reply.json()["choices"][0]["text"]
    return text


def listed(client: httpx.Client) -> set[str]:
    return {card["id"] for card in client.get("/v1/models").raise_for_status().json()["data"]}


def test_an_adapter_of_the_start(clients: Clients) -> None:
    texts = {text_of(client, "start") for client in clients for _ in range(4)}
    assert len(texts) == 1
    assert texts != {text_of(clients[0], "m")}
    for client in clients:
        [card] = [card for card in client.get("/v1/models").json()["data"] if card["id"] == "start"]
        assert card["parent"] == "m"


def test_after_a_200_every_api_server_has_it_or_not(clients: Clients) -> None:
    for turn, client in enumerate(clients):
        reply = load(client, "new", "second")
        assert reply.status_code == 200, reply.text
        body = reply.json()
        assert (body["operation"], body["outcome"], body["failed"]) == ("load_adapter", "done", [])
        assert [receipt["rank"] for receipt in body["engines"]] == list(range(ENGINES))
        assert all(receipt["result"]["loaded"] for receipt in body["engines"])
        assert (body["adapter"]["name"], body["adapter"]["rank"]) == ("new", 8)
        assert len({text_of(each, "new", seed=turn) for each in clients for _ in range(ENGINES)}) == 1
        assert all("new" in listed(each) for each in clients)
        reply = unload(clients[turn - 1], "new")
        assert reply.status_code == 200, reply.text
        for each in clients:
            assert (complete(each, "new").status_code, "new" in listed(each)) == (404, False)


def test_the_same_by_the_routes_of_administration(fleet: Server, clients: Clients) -> None:
    reply = clients[0].post("/admin/adapters", json={"name": "new", "path": "second"})
    assert reply.status_code == 200, reply.text
    [start, new] = clients[1].get("/admin/adapters").json()["adapters"]
    assert (start["name"], new["name"], new["engines"], new["missing"]) == ("start", "new", [0, 1], {})
    assert [each["name"] for each in fleet.get("/status").json()["adapters"]] == ["start", "new"]
    assert clients[2].delete("/admin/adapters/new").status_code == 200
    assert clients[2].delete("/admin/adapters/new").status_code == 404
    assert complete(clients[1], "new").status_code == 404


def test_a_stream_finishes_with_the_weights_it_began_with(fleet: Server, clients: Clients) -> None:
    long = PROMPT | {"model": "new", "max_tokens": 300}
    assert load(clients[0], "new", "a1").status_code == 200
    whole = text_of(clients[0], "new", max_tokens=300)
    for change in (
        lambda: load(clients[1], "new", "a2", replace=True),
        lambda: unload(clients[2], "new"),
    ):
        with Streams(fleet.url, [long | {"seed": seed} for seed in range(6)]) as streams:
            streams.until_each_has(1)
            reply = change()
            assert reply.status_code == 200, reply.text
            streams.until_all_ended()
            assert streams.outcomes == [None] * 6
            assert set(streams.texts) == {whole}
        if complete(clients[0], "new").status_code == 200:
            replaced = text_of(clients[0], "new", max_tokens=300)
            assert replaced != whole
            whole = replaced
    assert complete(clients[0], "new").status_code == 404


def test_again_with_other_files_and_with_a_key(clients: Clients) -> None:
    first = load(clients[0], "new", "a1", key="load it")
    assert first.status_code == 200
    again = load(clients[1], "new", "a1")
    assert again.status_code == 200
    assert all(receipt["repeated"] for receipt in again.json()["engines"])
    other = load(clients[1], "new", "a2")
    assert (other.status_code, other.json()["error"]["param"]) == (400, "load_inplace")
    assert str(first.json()["adapter"]["path"]) in other.json()["error"]["message"]
    assert load(clients[1], "new", "a2", replace=True).status_code == 200
    # a client that has not seen the first reply sends its request again
    repeated = load(clients[2], "new", "a1", key="load it")
    assert repeated.status_code == 200
    text = text_of(clients[2], "new")
    assert load(clients[0], "a2", "a2").status_code == 200
    assert text == text_of(clients[0], "a2")
    reused = load(clients[0], "new", "a3", key="load it")
    assert (reused.status_code, reused.json()["outcome"]) == (409, "conflict")
    assert "Idempotency-Key" in reused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({"lora_name": "x", "lora_path": "none"}, 400, "lora_path", "No such file"),
        ({"lora_name": "x", "lora_path": "/etc"}, 400, "lora_path", "must lie below --lora-dir"),
        ({"lora_name": "x", "lora_path": "../a"}, 400, "lora_path", "must not contain '..'"),
        ({"lora_name": "x", "lora_path": "link"}, 400, "lora_path", "must lie below --lora-dir"),
        ({"lora_name": "x", "lora_path": "wide"}, 400, "lora_path", "--max-lora-rank is 16"),
        ({"lora_name": "x", "lora_path": ""}, 400, "lora_path", "1 to 4096 characters"),
        ({"lora_name": "m", "lora_path": "a1"}, 400, "lora_name", "name of the model"),
        ({"lora_name": "", "lora_path": "a1"}, 400, "lora_name", "1 to 256"),
        ({"lora_name": "a,b", "lora_path": "a1"}, 400, "lora_name", "','"),
        ({"lora_name": 7, "lora_path": "a1"}, 400, "body.lora_name", "lora_name"),
        ({"lora_name": "x"}, 400, "body.lora_path", "lora_path"),
    ],
)
def test_what_is_wrong_is_named(
    fleet: Server, body: dict[str, Any], status: int, param: str, message: str
) -> None:
    reply = fleet.post("/v1/load_lora_adapter", body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param), reply.text
    assert message in error["message"]


def test_an_adapter_that_is_not_loaded_cannot_be_unloaded(fleet: Server) -> None:
    reply = fleet.post("/v1/unload_lora_adapter", {"lora_name": "never"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "lora_name")
    assert "start" in reply.json()["error"]["message"]


def test_names_with_percent_signs(clients: Clients) -> None:
    for name in ("100%", "100%25"):
        assert load(clients[0], name, "a1").status_code == 200
    assert clients[1].get("/v1/models/100%2525").json()["id"] == "100%25"
    assert clients[1].delete("/admin/adapters/100%2525").status_code == 200
    assert listed(clients[2]) == {"m", "start", "100%"}


def test_only_adapters_are_unloaded(clients: Clients) -> None:
    reply = clients[0].post("/v1/unload_lora_adapter", json={"lora_name": "m"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "lora_name")
    assert reply.json()["error"]["message"] == "No adapter has the name 'm'. Loaded are: start."


def test_keys_of_the_start_are_no_client_s(clients: Clients) -> None:
    reply = clients[0].post("/reset_prefix_cache", headers={"idempotency-key": "start"})
    assert reply.status_code == 200, reply.text


def test_requests_whose_adapter_is_replaced_while_they_are_tokenized(clients: Clients) -> None:
    """Their prompts are so long that a thread makes them into tokens."""
    assert load(clients[0], "new", "a1").status_code == 200
    rng = random.Random(1)
    for _ in range(4):
        prompts = [" ".join(str(rng.random()) for _ in range(60)) for _ in range(300)]
        body = {"model": "new", "max_tokens": 1, "prompt": prompts}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(clients[1].post, "/v1/completions", json=body)
            while not asked.done():
                for path in ("a2", "a1"):
                    assert load(clients[0], "new", path, replace=True).status_code == 200
            assert asked.result().status_code == 200, asked.result().text[:500]


def test_a_page_in_a_browser_loads_nothing(fleet: Server) -> None:
    body = {"lora_name": "x", "lora_path": "a1"}
    assert fleet.post("/v1/load_lora_adapter", body, origin="http://evil.example").status_code == 403


def test_processes_that_come_back_have_it(fleet: Server, clients: Clients) -> None:
    assert load(clients[0], "new", "a3").status_code == 200
    text = text_of(clients[0], "new")
    for role in ("engine", "api-server"):
        replace_one(fleet, role)
        for _ in range(20):
            reply = fleet.post("/v1/completions", PROMPT | {"model": "new"})
            assert (reply.status_code, reply.json()["choices"][0]["text"]) == (200, text)
    wait_until(
        lambda: fleet.get("/admin/adapters").json()["adapters"][1]["engines"] == [0, 1],
        WAIT_S,
        "both engines",
    )


def replace_one(fleet: Server, role: str) -> None:
    """End a process by force, and wait until another one is there."""
    before = fleet.children(role)
    before[0].kill()

    def replaced() -> bool:
        now = fleet.children(role)
        return len(now) == len(before) and before[0] not in now

    wait_until(replaced, WAIT_S, f"another {role}")


def test_an_adapter_that_no_engine_has_after_a_restart(tmp_path: Path) -> None:
    """It is refused with 404: with 503, gateways would send the server nothing at all."""
    path = make_adapter(tmp_path / "adapters" / "gone")
    with fleet_of_own(tmp_path) as fleet:
        assert fleet.post("/admin/adapters", {"name": "gone", "path": "gone"}).status_code == 200
        shutil.rmtree(path)
        replace_one(fleet, "engine")
        wait_until(
            lambda: fleet.post("/v1/completions", PROMPT | {"model": "m"}).status_code == 200, WAIT_S, "it"
        )
        reply = fleet.post("/v1/completions", PROMPT | {"model": "gone"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "adapter_not_loaded"), reply.text
        assert "retry-after" not in reply.headers
        [told] = fleet.get("/admin/adapters").json()["adapters"]
        assert told["engines"] == []
        assert told["missing"]["0"].endswith("it does not exist")
        make_adapter(path)
        assert fleet.post("/admin/adapters", {"name": "gone", "path": "gone"}).status_code == 200
        assert fleet.post("/v1/completions", PROMPT | {"model": "gone"}).status_code == 200


def fleet_of_own(directory: Path) -> Server:
    """One engine, with adapters of a directory of its own."""
    options = ("--enable-lora", "--lora-dir", str(directory / "adapters"))
    return Server(*SYNTHETIC, *options, directory=directory)


def test_a_server_without_adapters_says_so(server: Server) -> None:
    body = {"lora_name": "x", "lora_path": "/a"}
    reply = server.post("/v1/load_lora_adapter", body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "no_lora")
    assert server.get("/admin/adapters").json() == {"adapters": []}


def test_many_changes_at_any_api_server(fleet: Server) -> None:
    storm(fleet, SERVERS, ENGINES, changes=40, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_200_changes_with_an_engine_and_an_api_server_killed(adapters: Path, tmp_path: Path) -> None:
    with fleet_of(adapters, tmp_path, servers=4, engines=3) as fleet:
        storm(fleet, 4, 3, changes=200, seed=2, kill={60: "engine", 120: "api-server"})


class Background:
    """Threads that stream from the model and from an adapter, and compare what they get."""

    def __init__(self, fleet: Server, expected: dict[str, str]) -> None:
        self._fleet = fleet
        self._expected = expected
        self._stop = threading.Event()
        self.wrong: list[str] = []
        self.replies = self.broken = 0
        """Replies, and connections that were lost with their API server."""
        self._threads = [threading.Thread(target=self._run, args=(model,)) for model in [*expected] * 2]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, model: str) -> None:
        while not self._stop.is_set():
            try:
                with httpx.Client(base_url=self._fleet.url, timeout=WAIT_S) as client:
                    while not self._stop.is_set():
                        reply = complete(client, model, max_tokens=64)
                        self.replies += 1
                        if reply.status_code != 200 or text_in(reply) != self._expected[model]:
                            self.wrong.append(f"{model}: {reply.status_code} {reply.text[:300]}")
            except httpx.TransportError:
                self.broken += 1


def storm(
    fleet: Server, servers: int, engines: int, changes: int, seed: int, kill: dict[int, str] | None = None
) -> None:
    """Changes one after the other at random API servers, while streams of another adapter and of the model
    run; after each 200 every API server is asked. ``kill``: a role whose process is killed -9 in the middle
    of a change, by the change's number."""
    draw = random.Random(seed)
    texts: dict[str, str] = {}
    present: set[str] = set()
    with contextlib.ExitStack() as stack:

        def connect() -> Clients:
            return stack.enter_context(client_of_each(fleet, servers, WAIT_S))

        clients = connect()
        expected = {model: text_of(clients[0], model, max_tokens=64) for model in ("m", "start")}
        with Background(fleet, expected) as background, ThreadPoolExecutor(1) as pool:
            for number in range(changes):
                name = f"a{draw.randint(1, 9)}"
                at = draw.randrange(servers)
                key = f"{seed} {number}"
                change = pool.submit(alter, clients[at], name, key, gone=name in present)
                victim = (kill or {}).get(number)
                if victim is not None:
                    draw.choice(fleet.children(victim)).kill()
                try:
                    reply = change.result()
                except httpx.TransportError:  # its API server was killed: the client asks another one
                    clients = connect()
                    reply = alter(clients[at - 1], name, key, gone=name in present)
                assert reply.status_code == 200, reply.text
                assert [receipt["rank"] for receipt in reply.json()["engines"]] == list(range(engines))
                present ^= {name}
                if victim == "api-server":
                    clients = connect()
                for client in clients:
                    asked = complete(client, name)
                    assert asked.status_code == (200 if name in present else 404), asked.text
                    assert (name in listed(client)) == (name in present)
                    if name in present:
                        assert texts.setdefault(name, text_in(asked)) == text_in(asked)
        assert background.wrong == []
        assert background.replies > changes
        assert background.broken <= 2 * len(expected) * len([*(kill or {})])
        for name in sorted(present):
            assert unload(clients[0], name).status_code == 200


def alter(client: httpx.Client, name: str, key: str, *, gone: bool) -> httpx.Response:
    """Load an adapter, or unload it if it shall be gone."""
    return unload(client, name, key=key) if gone else load(client, name, name, key=key)


def test_streams_of_adapters_go_on_when_their_engine_is_killed(adapters: Path, tmp_path: Path) -> None:
    bodies = [
        {"model": model, "prompt": "x", "max_tokens": 400, "ignore_eos": True, "seed": seed}
        for seed in range(4)
        for model in ("m", "start", "other")
    ]
    with fleet_of(adapters, tmp_path, servers=1, engines=2) as fleet:
        assert fleet.post("/admin/adapters", {"name": "other", "path": "a1"}).status_code == 200
        undisturbed = texts_of(fleet.url, bodies)
        assert len(set(undisturbed)) == len(bodies)

        def kill_one() -> None:
            (victim, _) = fleet.children("engine")
            with Streams(fleet.url, bodies) as streams:
                streams.until_each_has(3)
                fleet.kill(victim)
                streams.until_all_ended()
            assert (streams.failures, streams.texts) == ([], undisturbed)

        until_interrupted(fleet, kill_one)


def test_real_adapters_in_two_torch_engines_of_which_one_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model = tmp_path / "tiny-llama"
    model.mkdir()
    write_model(model)
    sizes = layer_sizes(model)
    for seed in range(3):
        make_adapter(tmp_path / "adapters" / f"t{seed}", sizes, seed=seed, scale=0.3)
    options = ("--dtype", "float32", "--max-model-len", "2048", "--served-model-name", "tiny-llama")
    own = ("--threads", "1", "--enable-lora", "--lora-dir", str(tmp_path / "adapters"), "--max-loras", "2")
    with Server(str(model), *options, *own, "--data-parallel-size", "2", directory=tmp_path) as fleet:
        for seed in range(3):
            reply = fleet.post("/v1/load_lora_adapter", {"lora_name": f"t{seed}", "lora_path": f"t{seed}"})
            assert reply.status_code == 200, reply.text
        bodies = [
            {"model": model, "prompt": "def main():", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
            for model in ("tiny-llama", "t0", "t1", "t2")
            for _ in range(2)
        ]
        undisturbed = [fleet.complete(**body)["choices"][0]["text"] for body in bodies[::2]]
        assert len(set(undisturbed)) == 4

        def kill_one() -> None:
            (victim, _) = fleet.children("engine")
            with Streams(fleet.url, bodies) as streams:
                streams.until_each_has(1)
                fleet.kill(victim)
                streams.until_all_ended()
            assert streams.failures == []
            assert streams.texts == [text for text in undisturbed for _ in range(2)]

        until_interrupted(fleet, kill_one)


def test_a_trainer_saves_an_adapter_again_and_again_under_its_path(tmp_path: Path) -> None:
    """Streams go on with the files that they began with, and each reply tells by which it was computed."""
    pytest.importorskip("torch")
    model = tmp_path / "tiny-llama"
    model.mkdir()
    write_model(model)
    sizes, path = layer_sizes(model), tmp_path / "adapters" / "policy"
    options = ("--dtype", "float32", "--max-model-len", "4096", "--served-model-name", "tiny-llama")
    own = ("--threads", "1", "--enable-lora", "--lora-dir", str(path.parent), "--max-loras", "2")
    fleet_size = ("--api-server-count", "2", "--data-parallel-size", "2")
    body = {"model": "policy", "prompt": "def main():", "temperature": 0, "ignore_eos": True}
    short = body | {"max_tokens": 60, "return_weight_versions": True}
    make_adapter(path, sizes, seed=0, scale=0.3)
    with (
        Server(str(model), *options, *own, *fleet_size, directory=tmp_path) as fleet,
        client_of_each(fleet, 2, WAIT_S) as clients,
    ):
        assert load(clients[0], "policy", "policy").status_code == 200
        digests, texts = [], []
        for seed in range(1, 4):
            with Streams(fleet.url, [body | {"max_tokens": 300}] * 4) as streams:
                streams.until_each_has(1)
                shutil.rmtree(path)
                make_adapter(path, sizes, seed=seed, scale=0.3)
                assert load(clients[0], "policy", "policy").json()["error"]["param"] == "load_inplace"
                reply = load(clients[1], "policy", "policy", replace=True)
                assert reply.status_code == 200, reply.text
                results = [receipt["result"] for receipt in reply.json()["engines"]]
                streams.until_all_ended()
            assert streams.failures == []
            assert len(set(streams.texts)) == 1
            assert not texts or streams.texts[0].startswith(texts[-1])
            assert results == [{"loaded": True, "digest": results[0]["digest"]}] * 2
            digests.append(results[0]["digest"])
            choices = [client.post("/v1/completions", json=short).json()["choices"][0] for client in clients]
            for choice in choices:
                span = {"start": 0, "end": 60, "version": "default", "adapter": digests[-1]}
                assert choice["weight_versions"] == [span]
            texts.append(choices[0]["text"])
        assert len(set(digests)) == len(set(texts)) == 3
        base = clients[0].post("/v1/completions", json=short | {"model": "tiny-llama"}).json()
        assert base["choices"][0]["weight_versions"] == [{"start": 0, "end": 60, "version": "default"}]


def layer_sizes(model: Path) -> dict[str, tuple[int, int]]:
    """Output and input features of the attention and MLP layers, as the model's weights tell them."""
    start = (model / "model.safetensors").read_bytes()
    header = json.loads(start[8 : 8 + int.from_bytes(start[:8], "little")])
    shapes = {
        name.removesuffix(".weight"): entry["shape"] for name, entry in header.items() if "_proj" in name
    }
    return {name: (shape[0], shape[1]) for name, shape in shapes.items()}


def test_engines_of_another_host_have_them_too(adapters: Path, tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "--enable-lora")
    own = ("--lora-dir", str(adapters))
    with hosts.head(*own, "--lora-modules", f"start={adapters / 'first'}") as head:
        assert head.post("/admin/adapters", {"name": "early", "path": "a1"}).status_code == 200
        with hosts.host(1) as other:
            wait_until(lambda: up(head) == [0, 1], WAIT_S, "the engine of the other host")
            reply = head.post("/admin/adapters", {"name": "late", "path": "a2"})
            assert reply.status_code == 200, reply.text
            assert [receipt["rank"] for receipt in reply.json()["engines"]] == [0, 1]
            for name in ("start", "early", "late"):
                pins = ({"X-data-parallel-rank": "0"}, {"X-data-parallel-rank": "1"})
                replies = [head.post("/v1/completions", PROMPT | {"model": name}, **pin) for pin in pins]
                assert [reply.status_code for reply in replies] == [200, 200]
                assert len({text_in(reply) for reply in replies}) == 1
            head.process.kill()
            with hosts.head(*own) as successor:  # it numbers its changes from the beginning
                wait_until(lambda: up(successor) == [0, 1], WAIT_S, "the engine of the other host")
                assert other.process.poll() is None
                assert {card["id"] for card in successor.get("/v1/models").json()["data"]} == {"m"}
                reply = successor.post("/admin/adapters", {"name": "new", "path": "a3"})
                assert reply.status_code == 200, reply.text
                assert [receipt["repeated"] for receipt in reply.json()["engines"]] == [False, False]
