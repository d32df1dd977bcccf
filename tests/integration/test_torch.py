"""The bundled demo model through the torch engine, as a user first meets it."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
from base64 import b64decode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from penstock.engine.torch.experts import RouteRecorder
from penstock.gateway.kv_events.block_index import BlockIndex, Source
from penstock.gateway.kv_events.subscriber import EventAddresses, KVEventSubscriber
from penstock.gateway.routing.endpoint import Endpoint
from penstock.supervisor.startup.model_resolution import DEMO_DIR
from scripts.logprob_differences import write_experts
from tests.integration.server import Server, wait_until

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

OPTIONS = ("--dtype", "float32", "--threads", "1", "--max-num-batched-tokens", "256")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("demo")
    addresses = {name: f"ipc://{directory}/{name}" for name in ("endpoint", "replay_endpoint")}
    events = json.dumps({"enable_kv_cache_events": True} | addresses)
    with Server(*OPTIONS, "--kv-events-config", events, directory=directory) as running:
        yield running


def expected(prompt: str, tokens: int) -> str:
    """transformers' own greedy continuation."""
    tokenizer = Tokenizer.from_file(str(DEMO_DIR / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_DIR, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, use_cache=True
        )
    text: str = tokenizer.decode(output[0, ids.shape[1] :].tolist())
    return text


def test_a_completion_is_what_transformers_generates(demo: Server) -> None:
    for prompt in ("The with statement", "Return the", "def main():\n"):
        text = demo.complete(prompt, max_tokens=40, temperature=0)["choices"][0]["text"]
        assert text == expected(prompt, 40)


def test_a_chat_answers_in_words(demo: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0, "max_tokens": 80}
    choice = demo.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert len(re.findall(r"[A-Za-z]{2,}", choice["message"]["content"])) >= 5


def test_events_say_what_is_cached(demo: Server) -> None:
    """A router that follows them, and has a prompt tokenized, knows what the engine will find."""

    async def run() -> None:
        index, endpoint = BlockIndex(), Endpoint(demo.url)
        subscriber = KVEventSubscriber(index)
        events, replay = (f"ipc://{demo.log_path.parent}/{name}" for name in ("endpoint", "replay_endpoint"))
        subscriber.update([EventAddresses(Source(endpoint), events, replay)])
        messages = [{"role": "user", "content": "What do events say of a cache? " * 20}]
        for content in ("And now?", "And then?"):
            before = index.size
            await asyncio.to_thread(
                demo.post, "/v1/chat/completions", {"messages": messages, "max_tokens": 8}
            )
            async with asyncio.timeout(20):
                while index.size == before:  # noqa: ASYNC110 - the index is no asyncio object
                    await asyncio.sleep(0.01)
            messages = [*messages, {"role": "user", "content": content}]
            body = {"messages": messages, "max_tokens": 1}
            tokens = (await asyncio.to_thread(demo.post, "/tokenize", body)).json()["tokens"]
            known = index.cached(np.array(tokens, np.int32).tobytes(), [endpoint], 0.0)[endpoint]
            reply = (await asyncio.to_thread(demo.post, "/v1/chat/completions", body)).json()
            assert known == reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
        subscriber.close()

    asyncio.run(run())


def test_the_turns_of_a_session_cost_what_is_new(demo: Server) -> None:
    """Prompts of more than 4,096 characters are tokenized by message, and found in the prefix cache."""
    tokenizer = Tokenizer.from_file(str(DEMO_DIR / "tokenizer.json"))
    messages = [{"role": "system", "content": "The function returns the value of its argument. " * 100}]
    known: list[int] = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"Turn {turn}: ‘naïve’ <|im_start|> 👍🏽?"})
        body = {"messages": messages, "max_tokens": 4, "return_token_ids": True, "prompt_cache_key": "key"}
        reply = demo.post("/v1/chat/completions", body).json()
        prompt = reply["prompt_token_ids"]
        text = tokenizer.decode(prompt, skip_special_tokens=False)
        assert len(text) > 4096
        assert prompt == tokenizer.encode(text, add_special_tokens=False).ids
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        common = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, known, strict=False))
        assert cached == len(list(common)) // 16 * 16
        known = prompt + reply["choices"][0]["token_ids"][:-1]
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
    assert cached > 500


WEATHER: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "A city."}},
                "required": ["city"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]
ASKED = "What is the weather in Paris?"


def test_an_agent_calls_a_tool_and_answers_from_its_result(demo: Server) -> None:
    """As the openai client's users write it: nothing of the request says how the model writes calls."""
    messages: list[Any] = [
        {"role": "system", "content": [{"type": "text", "text": "You are a helpful assistant."}]},
        {"role": "user", "content": ASKED},
    ]
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id

        def ask() -> Any:
            return client.chat.completions.create(
                model=model, messages=messages, tools=WEATHER, temperature=0
            ).choices[0]

        choice = ask()
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        [call] = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
        result = {
            "role": "tool",
            "tool_call_id": call.id,
            "name": "get_weather",
            "content": "sunny, 21 degrees",
        }
        messages += [choice.message.model_dump(), result]
        answer = ask()
        assert answer.finish_reason == "stop"
        assert "sunny, 21 degrees" in answer.message.content
        with client.chat.completions.stream(
            model=model, messages=messages[:2], tools=WEATHER, parallel_tool_calls=False, temperature=0
        ) as stream:
            [streamed] = stream.get_final_completion().choices[0].message.tool_calls or []
        assert streamed.function.arguments == call.function.arguments


@pytest.mark.parametrize(
    "fields", [{"tools": []}, {"tools": WEATHER, "tool_choice": "none"}, {"tools": WEATHER}]
)
def test_a_question_that_needs_no_tool_is_answered(demo: Server, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "What is Python?"}], "temperature": 0, "max_tokens": 60}
    reply = demo.post("/v1/chat/completions", body | fields)
    message = reply.raise_for_status().json()["choices"][0]["message"]
    assert "programming language" in message["content"]
    assert not message.get("tool_calls")
    assert "warning" not in reply.headers


def test_streamed_equals_whole_for_mixed_requests_at_once(demo: Server) -> None:
    def both(seed: int) -> tuple[str, str]:
        options = {"max_tokens": 10 + seed, "seed": seed, "temperature": seed % 3 / 2, "top_p": 0.9}
        prompt = "The list " * (1 + seed * 7)
        whole = demo.complete(prompt, **options)["choices"][0]["text"]
        events = demo.stream(prompt, **options)
        return whole, "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])

    with ThreadPoolExecutor(16) as pool:
        for whole, streamed in pool.map(both, range(16)):
            assert whole == streamed
    assert demo.metric("vllm:kv_cache_usage_perc") <= 1
    assert demo.metric("vllm:cache_config_info", block_size="16") == 1
    wait_until(
        lambda: (
            0 < demo.metric("vllm:prefix_cache_hits_total") < demo.metric("vllm:prefix_cache_queries_total")
        ),
        30,
        "hearing of what was found in the cache",
    )


def test_a_request_that_cannot_fit_is_refused_with_figures(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    arguments = (*OPTIONS, "--kv-cache-memory", "2Mi")
    with Server(*arguments, directory=tmp_path_factory.mktemp("small")) as server:
        reply = server.post("/v1/completions", {"prompt": "x", "max_tokens": 2000})
        assert reply.status_code == 400
        assert "KV cache" in reply.json()["error"]["message"]
        with ThreadPoolExecutor(12) as pool:
            texts = list(
                pool.map(
                    lambda _: server.complete("The", max_tokens=60, temperature=0, ignore_eos=True)[
                        "choices"
                    ][0]["text"],
                    range(12),
                )
            )
        assert len(set(texts)) == 1  # streams that were preempted end as the others do


def test_usage_says_how_much_of_a_prompt_was_cached(demo: Server) -> None:
    prompt = "The with statement is used to wrap the execution of a block. " * 4

    def cached(**options: object) -> int:
        usage = demo.complete(prompt, max_tokens=4, **options)["usage"]
        count: int = usage["prompt_tokens_details"]["cached_tokens"]
        assert count <= usage["prompt_tokens"]
        return count

    assert cached(cache_salt="one", n=3) == 0
    assert cached(cache_salt="one", n=3) >= 16
    assert cached(cache_salt="two") == 0


def test_turns_of_an_agent_find_their_prefix_in_the_cache(demo: Server) -> None:
    """Each turn appends system text, and the head changes where clients are known to change it."""
    block, stable = 16, "You are an agent that edits files and runs commands. " * 8
    messages: list[dict[str, Any]] = []
    before = 0
    for turn in range(4):
        messages += [
            {"role": "user", "content": f"Question {turn}: what does os.path.join do with its arguments?"},
            {"role": "system", "content": f"{turn} files were changed since the last question."},
        ]
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cch={turn};"},
            {"type": "text", "text": stable, "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": f"It is {turn} o'clock."},
        ]
        body = {"messages": messages, "system": system, "max_tokens": 4, "metadata": {"user_id": "prefix"}}
        counted = demo.post("/v1/messages/count_tokens", {"messages": messages, "system": system}).json()
        usage = demo.post("/v1/messages", body).json()["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]
        # All of the turn before but the system text after the mark, the start of the answer, and a block.
        assert usage["cache_read_input_tokens"] >= before - 24 - block
        assert turn == 0 or usage["cache_read_input_tokens"] > 0
        before = counted["input_tokens"]
        messages.append({"role": "assistant", "content": f"Answer {turn}."})


def test_a_model_with_experts_says_which_ones(tmp_path: Path) -> None:
    """Over two API servers; the second request would find its prompt in the cache."""
    model_dir = tmp_path / "model"
    write_experts(str(model_dir), bos_token_id=0, eos_token_id=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_DIR / name, model_dir / name)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    prompt = np.random.default_rng(0).integers(5, 4096, 60).tolist()
    body = {"prompt": prompt, "max_tokens": 6, "return_token_ids": True, "return_routed_experts": True}
    options = (str(model_dir), *OPTIONS, "--api-server-count", "2")
    with (
        Server(*options, directory=tmp_path) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        for _ in range(2):
            [choice] = client.post("/v1/completions", json=body).json()["choices"]
            tokens = prompt + choice["token_ids"][:-1]
            with RouteRecorder(model).recording() as recorded, torch.inference_mode():
                model(torch.tensor([tokens]))
            found = np.load(BytesIO(b64decode(choice["routed_experts"])))
            assert found.shape == (65, 4, 4)
            expected = torch.stack(recorded, 1).numpy()
            assert (np.sort(found) != np.sort(expected)).any(axis=(1, 2)).sum() <= 1  # a near tie
        chat = {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 2,
            "return_routed_experts": True,
        }
        reply = client.post("/v1/chat/completions", json=chat | {"n": 2, "temperature": 1}).json()
        assert all(np.load(BytesIO(b64decode(each["routed_experts"]))).ndim == 3 for each in reply["choices"])
        [plain] = client.post("/v1/completions", json=body | {"return_routed_experts": None}).json()[
            "choices"
        ]
        assert plain["routed_experts"] is None
        for change in ({"stream": True}, {"stop": ["x"]}):
            refused = client.post("/v1/completions", json=body | change)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_routed_experts")


def test_a_model_without_experts_has_none(demo: Server) -> None:
    body = {"prompt": "x", "max_tokens": 2, "return_routed_experts": True}
    refused = httpx.post(f"{demo.url}/v1/completions", json=body, timeout=60)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_routed_experts")
