"""Pictures through several API servers to several engines, of which parts die."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.pictures import data_url, noise, png
from tests.integration.server import Server, wait_until

SIDE = 28 * 4
TOKENS = 16
OPTIONS = ("--engine", "synthetic", "--synthetic-image-tokens", "64", "--media-workers", "2")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Three API servers, two engines, two media workers."""
    fleet = ("--api-server-count", "3", "--data-parallel-size", "2")
    with Server(*OPTIONS, *fleet, directory=tmp_path_factory.mktemp("images")) as server:
        store = store_of(server)
        assert store.exists()
        yield server
    assert not store.exists()


def store_of(server: Server) -> Path:
    """The directory of the media cache."""
    files = server.children("media-worker")[0].open_files()
    [account] = [Path(file.path) for file in files if file.path.endswith("/account")]
    return account.parent


def body(*pictures: bytes, text: str = "What is it?", **more: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    parts += [{"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in pictures]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0, **more}


async def chats(server: Server, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The replies to concurrent requests, each over a connection of its own, so that all API servers have
    some."""

    async def one(request: dict[str, Any]) -> dict[str, Any]:
        async with httpx.AsyncClient(timeout=120) as client:
            reply = await client.post(f"{server.url}/v1/chat/completions", json=request)
        assert reply.status_code == 200, reply.text
        made: dict[str, Any] = reply.json()
        return made

    return await asyncio.gather(*map(one, bodies))


def text_of(reply: dict[str, Any]) -> str:
    text: str = reply["choices"][0]["message"]["content"]
    return text


def test_a_picture_is_decoded_once_and_encoded_once_per_engine(images: Server) -> None:
    picture = png(SIDE, SIDE, 1)

    def outcome(name: str) -> float:
        return images.metric("penstock:media_images_total", outcome=name) - before.get(name, 0.0)

    before: dict[str, float] = {}
    before |= {name: outcome(name) for name in ("decoded", "found", "remembered")}
    encoded = images.metric("penstock:encoder_images_total")
    replies = asyncio.run(chats(images, [body(picture) for _ in range(60)]))
    assert len({text_of(reply) for reply in replies}) == 1
    text = asyncio.run(chats(images, [body()]))[0]["usage"]["prompt_tokens"]
    assert {reply["usage"]["prompt_tokens"] - text for reply in replies} == {TOKENS}

    wait_until(lambda: outcome("remembered") + outcome("found") + outcome("decoded") >= 60, 30, "metrics")
    assert outcome("decoded") == 1
    assert outcome("found") <= 2  # once for each other API server
    wait_until(lambda: images.metric("penstock:encoder_images_total") > encoded, 30, "the engines' metrics")
    assert images.metric("penstock:encoder_images_total") <= encoded + 2


def test_another_picture_has_another_reply(images: Server) -> None:
    one, other, both, swapped = asyncio.run(
        chats(
            images,
            [
                body(png(SIDE, SIDE, 2)),
                body(png(SIDE, SIDE, 3)),
                body(png(SIDE, SIDE, 2), png(SIDE, SIDE, 3)),
                body(png(SIDE, SIDE, 3), png(SIDE, SIDE, 2)),
            ],
        )
    )
    assert len({text_of(reply) for reply in (one, other, both, swapped)}) == 4


def test_a_picture_of_megabytes_is_served(images: Server) -> None:
    picture = noise(700, 700)
    assert len(picture) > 1 << 20
    one, again = asyncio.run(chats(images, [body(picture), body(picture)]))
    assert text_of(one) == text_of(again)
    block = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture).decode()}
    content = [{"type": "text", "text": "What is it?"}, {"type": "image", "source": block}]
    message = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 4,
        "temperature": 0,
        "model": "x",
    }
    reply = httpx.post(f"{images.url}/v1/messages", json=message | {"model": model(images)}, timeout=120)
    assert reply.status_code == 200, reply.text
    assert reply.json()["content"][0]["text"] == text_of(one)
    for size in (110, 600):  # what is stored is made on the event loop, and in a thread
        url = data_url(noise(size, size))
        item = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
        previous = None
        for turn in (1, 2):
            request = {"input": [item], "previous_response_id": previous, "max_output_tokens": 2}
            reply = httpx.post(f"{images.url}/v1/responses", json=request, timeout=120)
            assert reply.status_code == 200, reply.text
            previous, usage = reply.json()["id"], reply.json()["usage"]
            assert usage["input_tokens_details"]["image_tokens"] > (turn - 1) * usage["input_tokens"] / 3
            shown = images.get(f"/v1/responses/{previous}/input_items").json()["data"]
            assert {
                part["image_url"] for item in shown for part in item.get("content", ()) if "image_url" in part
            } == {url}


def model(server: Server) -> str:
    name: str = server.get("/v1/models").json()["data"][0]["id"]
    return name


def test_every_api_sees_a_picture_and_counts_what_the_engine_gets(images: Server) -> None:
    picture = png(SIDE, SIDE, 9)
    data, url = base64.b64encode(picture).decode(), data_url(picture)
    chat, text = body(picture), body()
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    talk = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Look."}, block]}]}
    item = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    turns = {
        "contents": [{"parts": [{"text": "Look."}, {"inlineData": {"mimeType": "image/png", "data": data}}]}]
    }
    with httpx.Client(base_url=images.url, timeout=120) as client:

        def post(path: str, request: dict[str, Any], status: int = 200) -> Any:
            reply = client.post(path, json=request)
            assert reply.status_code == status, reply.text
            return reply.json()

        [card] = client.get("/v1/models").json()["data"]
        assert card["input_modalities"] == ["text", "image"]
        model = card["id"]
        usage = post("/v1/chat/completions", chat)["usage"]
        details = usage["prompt_tokens_details"]
        assert (details["image_tokens"], details["multimodal_tokens"]) == (TOKENS, {"image": TOKENS})
        counted = post("/tokenize", {"messages": chat["messages"]})
        assert counted["count"] == len(counted["tokens"]) == usage["prompt_tokens"]
        plain = post("/v1/chat/completions", text)["usage"]["prompt_tokens_details"]
        assert plain["multimodal_tokens"] is None
        assert "image_tokens" not in plain
        error = post("/v1/chat/completions/render", chat, 400)["error"]
        assert error["param"] == "messages[0].content[1].image_url.url"
        said = post("/v1/messages", talk | {"max_tokens": 2})["usage"]
        count = post("/v1/messages/count_tokens", talk)["input_tokens"]
        assert count == said["input_tokens"] + said.get("cache_read_input_tokens", 0)
        first = post("/v1/responses", {"input": [item], "max_output_tokens": 2})
        assert first["usage"]["input_tokens_details"]["image_tokens"] == TOKENS
        more = {"input": [item], "previous_response_id": first["id"]}
        then = post("/v1/responses", more | {"max_output_tokens": 2})["usage"]
        assert then["input_tokens_details"]["image_tokens"] == 2 * TOKENS
        assert post("/v1/responses/input_tokens", more)["input_tokens"] == then["input_tokens"]
        path = f"/v1beta/models/{model}"
        seen = post(f"{path}:generateContent", turns | {"generationConfig": {"maxOutputTokens": 2}})
        assert seen["usageMetadata"]["promptTokenCount"] == post(f"{path}:countTokens", turns)["totalTokens"]
        asked = {"model": model, "stream": False, "options": {"num_predict": 2}}
        told = post(
            "/api/chat", asked | {"messages": [{"role": "user", "content": "Look.", "images": [data]}]}
        )
        assert told["prompt_eval_count"] > TOKENS
        same = post("/api/generate", asked | {"prompt": "Look.", "images": [data]})
        assert same["prompt_eval_count"] == told["prompt_eval_count"]


def test_no_request_fails_when_workers_and_engines_are_killed(images: Server) -> None:
    def prepared() -> float:
        return images.metric("penstock:media_images_total", outcome="decoded")

    async def run() -> list[dict[str, Any]]:
        before = prepared()
        bodies = [body(noise(28, 28 * (1 + number % 4), number), max_tokens=30) for number in range(120)]
        running = asyncio.ensure_future(chats(images, bodies))
        for number, role in ((10, "media-worker"), (30, "engine"), (50, "media-worker")):
            await asyncio.to_thread(
                wait_until, lambda most=number: prepared() - before > most, 60, "progress"
            )
            images.children(role)[0].kill()
        return await running

    replies = asyncio.run(run())
    assert len(replies) == 120
    wait_until(lambda: images.metric("penstock:engine_up") == 2, 90, "the engine being up again")
    wait_until(lambda: len(images.children("media-worker")) == 2, 90, "the workers being up again")
