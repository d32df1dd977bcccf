"""Vectors, scores and labels over real sockets, from the synthetic engine."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import load

from tests.integration.server import Server

WIDTH = 48
OPTIONS = ("--engine", "synthetic", "--synthetic-step-ms", "0", "--runner", "both", "--max-model-len", "512")
OPTIONS += ("--synthetic-dimensions", str(WIDTH), "--served-model-name", "m")
TEXTS = [f"text {number} " * (1 + number % 7) for number in range(300)]


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(*OPTIONS, directory=tmp_path_factory.mktemp("vectors")) as server:
        yield server


@pytest.fixture(scope="module")
def http(vectors: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=vectors.url, timeout=60) as client:
        yield client


def posted(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def matrix_of(reply: dict[str, Any]) -> Any:
    return np.array([item["embedding"] for item in reply["data"]], np.float32)


def test_the_openai_client_in_both_formats(vectors: Server, http: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{vectors.url}/v1", api_key="none") as client:
        own = client.embeddings.create(model="m", input=TEXTS)  # it asks for base64
        numbers = client.embeddings.create(model="m", input=TEXTS, encoding_format="float")
        short = client.embeddings.create(model="m", input=TEXTS[:2], dimensions=8)
    assert [item.index for item in own.data] == list(range(300))
    got = np.array([item.embedding for item in own.data], np.float32)
    assert got.shape == (300, WIDTH)
    assert np.array_equal(got, np.array([item.embedding for item in numbers.data], np.float32))
    assert np.linalg.norm(got, axis=1) == pytest.approx(1, abs=1e-5)
    assert np.linalg.norm([item.embedding for item in short.data], axis=1) == pytest.approx(1, abs=1e-5)
    assert own.usage == numbers.usage
    counts = [len(posted(http, "/tokenize", {"prompt": text})["tokens"]) for text in TEXTS[:7]]
    seven = posted(http, "/v1/embeddings", {"input": TEXTS[:7]})
    assert seven["usage"]["prompt_tokens"] == seven["usage"]["total_tokens"] == sum(counts)
    assert np.array_equal(matrix_of(seven), got[:7])


def test_ids_are_the_texts_that_they_spell(http: httpx.Client) -> None:
    ids = [posted(http, "/tokenize", {"prompt": text})["tokens"] for text in TEXTS[:3]]
    expected = matrix_of(posted(http, "/v1/embeddings", {"input": TEXTS[:3]}))
    assert np.array_equal(matrix_of(posted(http, "/v1/embeddings", {"input": ids})), expected)
    assert np.array_equal(matrix_of(posted(http, "/v1/embeddings", {"input": ids[0]})), expected[:1])


def test_the_matrix_itself(http: httpx.Client) -> None:
    asked = {"input": TEXTS[:100]}
    expected = matrix_of(posted(http, "/v1/embeddings", asked))
    octets = http.post("/v1/embeddings", json=asked, headers={"Accept": "application/octet-stream"})
    assert octets.headers["content-type"] == "application/octet-stream"
    assert np.array_equal(np.frombuffer(octets.content, "<f4").reshape(100, WIDTH), expected)
    assert json.loads(octets.headers["metadata"])["shape"] == [100, WIDTH]
    file = http.post("/v1/embeddings", json=asked, headers={"Accept": "application/vnd.safetensors"})
    assert np.array_equal(load(file.content)["embeddings"], expected)
    bare = http.post("/pooling", json=asked | {"task": "embed", "encoding_format": "bytes_only"})
    assert bare.content == octets.content


def test_every_api_has_the_same_vectors(http: httpx.Client) -> None:
    expected = matrix_of(posted(http, "/v1/embeddings", {"input": TEXTS[:2]}))
    of_ollama = posted(http, "/api/embed", {"model": "m", "input": TEXTS[:2]})
    assert np.array_equal(np.array(of_ollama["embeddings"], np.float32), expected)
    older = posted(http, "/api/embeddings", {"model": "m", "prompt": TEXTS[0]})
    assert np.array_equal(np.array(older["embedding"], np.float32), expected[0])
    contents = [{"content": {"parts": [{"text": text}]}} for text in TEXTS[:2]]
    one = posted(http, "/v1beta/models/m:embedContent", contents[0])
    assert np.array_equal(np.array(one["embedding"]["values"], np.float32), expected[0])
    several = posted(http, "/v1beta/models/m:batchEmbedContents", {"requests": contents})
    assert np.array_equal(np.array([each["values"] for each in several["embeddings"]], np.float32), expected)
    of_cohere = posted(http, "/v2/embed", {"model": "m", "texts": TEXTS[:2], "input_type": "search_query"})
    assert np.array_equal(np.array(of_cohere["embeddings"]["float"], np.float32), expected)
    assert np.array_equal(np.array(posted(http, "/embed", {"inputs": TEXTS[:2]}), np.float32), expected)


def test_models_say_what_they_make(http: httpx.Client) -> None:
    [card] = http.get("/v1/models").json()["data"]
    assert card["tasks"] == ["generate", "embed", "token_embed", "classify", "token_classify"]
    [of_google] = http.get("/v1beta/models").json()["models"]
    assert of_google["supportedGenerationMethods"] == [
        "generateContent",
        "countTokens",
        "embedContent",
        "batchEmbedContents",
    ]
    of_ollama = posted(http, "/api/show", {"model": "m"})["capabilities"]
    assert {"completion", "embedding"} <= set(of_ollama)


def test_a_vector_for_each_token(http: httpx.Client) -> None:
    made = posted(http, "/pooling", {"input": TEXTS[:3], "task": "token_embed", "encoding_format": "base64"})
    rows = [np.frombuffer(base64.b64decode(item["data"]), "<f4").reshape(-1, WIDTH) for item in made["data"]]
    assert sum(map(len, rows)) == made["usage"]["prompt_tokens"]
    numbers = posted(http, "/pooling", {"input": TEXTS[:3], "task": "token_embed"})
    for item, row in zip(numbers["data"], rows, strict=True):
        assert np.array_equal(np.array(item["data"], np.float32), row)


def test_scores_and_labels(http: httpx.Client) -> None:
    made = posted(http, "/score", {"queries": "q", "documents": TEXTS[:5]})
    assert [item["index"] for item in made["data"]] == list(range(5))
    one = posted(http, "/v1/score", {"text_1": "q", "text_2": TEXTS[4]})
    assert one["data"][0]["score"] == made["data"][4]["score"]
    assert 0 < one["data"][0]["score"] < 1
    labelled = posted(http, "/classify", {"input": TEXTS[:5]})
    assert [item["num_classes"] for item in labelled["data"]] == [1] * 5


def test_ranks(http: httpx.Client) -> None:
    """Scores and their order are those of /score, in each API's reply."""
    scores = [item["score"] for item in posted(http, "/score", {"queries": "q", "documents": TEXTS})["data"]]
    order = sorted(range(len(TEXTS)), key=lambda index: -scores[index])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        made = posted(http, path, {"query": "q", "documents": TEXTS, "return_documents": True, "top_n": 200})
        assert [each["index"] for each in made["results"]] == order[:200]
        assert [each["relevance_score"] for each in made["results"]] == [scores[at] for at in order[:200]]
        assert [each["document"]["text"] for each in made["results"]] == [TEXTS[at] for at in order[:200]]
    texts = posted(http, "/rerank", {"query": "q", "texts": TEXTS})
    assert [(each["index"], each["score"]) for each in texts] == [(at, scores[at]) for at in order]


def test_teis_lists(http: httpx.Client) -> None:
    expected = posted(http, "/pooling", {"input": TEXTS[:2], "task": "token_embed", "use_activation": False})
    assert posted(http, "/embed_all", {"inputs": TEXTS[:2]}) == [each["data"] for each in expected["data"]]
    one, pair = posted(http, "/predict", {"inputs": "a"}), posted(http, "/predict", {"inputs": [["a", "b"]]})
    assert [each["label"] for each in (*one, *pair[0])] == ["LABEL_0"] * 2
    compared = {"source_sentence": "a", "sentences": ["a", "b"]}
    assert posted(http, "/similarity", {"inputs": compared})[0] == pytest.approx(1, abs=1e-5)


def test_conversations_and_text_beside_vectors(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hello"}]
    made = posted(http, "/v1/embeddings", {"messages": messages})
    counted = posted(http, "/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert made["usage"]["prompt_tokens"] == counted["count"]
    text = posted(http, "/v1/chat/completions", {"messages": messages, "max_tokens": 3})
    assert text["usage"]["completion_tokens"] == 3


def test_long_inputs_are_refused_or_cut(http: httpx.Client) -> None:
    long = "word " * 2000
    refused = http.post("/v1/embeddings", json={"input": ["short", long]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith("input")
    cut = posted(http, "/v1/embeddings", {"input": long, "truncate_prompt_tokens": -1})
    assert cut["usage"]["prompt_tokens"] == 512
    left = posted(http, "/v1/embeddings", {"input": long, "truncate_prompt_tokens": 9})
    assert left["usage"]["prompt_tokens"] == 9
    assert posted(http, "/api/embed", {"input": long})["prompt_eval_count"] == 512
    assert posted(http, "/v2/embed", {"texts": [long]})["meta"]["tokens"] == {"input_tokens": 512}
    assert len(posted(http, "/embed", {"inputs": long})) == 1
    ranked = posted(http, "/v2/rerank", {"query": "q", "documents": ["short", long]})
    most = {"query": "q", "documents": [long], "max_tokens_per_doc": 20}
    assert ranked["usage"]["prompt_tokens"] < 2 * 512
    assert 20 <= posted(http, "/v1/rerank", most)["usage"]["prompt_tokens"] < 30
    for path, body in (
        ("/v1/rerank", {"query": "q", "documents": [long]}),
        ("/v2/embed", {"texts": [long], "truncate": "NONE"}),
        ("/embed", {"inputs": long, "truncate": False}),
    ):
        assert http.post(path, json=body).status_code == 400, path
    of_ollama = http.post("/api/embed", json={"input": long, "truncate": False})
    assert (of_ollama.status_code, list(of_ollama.json())) == (400, ["error"])


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/embeddings", {"input": "a", "dimensions": WIDTH + 1}, f"must be 1 to {WIDTH}"),
        ("/api/embed", {}, "input must be provided"),
        ("/v1/rerank", {"query": "a", "documents": []}, "at least one"),
        ("/v2/rerank", {"query": "a", "documents": []}, "at least one"),
        ("/v2/embed", {"texts": ["a"], "model": "other"}, "does not exist"),
        ("/embed", {"inputs": "a", "dimensions": WIDTH + 1}, f"must be 1 to {WIDTH}"),
        ("/v1beta/models/m:embedContent", {"content": {}}, "content must have parts"),
        ("/v1beta/models/other:embedContent", {"content": {"parts": [{"text": "a"}]}}, "does not exist"),
    ],
)
def test_errors_have_the_shape_of_the_api(
    http: httpx.Client, path: str, body: dict[str, Any], told: str
) -> None:
    reply = http.post(path, json=body)
    assert reply.status_code in (400, 404)
    if path.startswith("/v2/"):
        assert told in reply.json()["message"]
        return
    error = reply.json()["error"]
    if path.startswith(("/api/", "/embed")):
        assert told in error
        return
    assert told in error["message"]
    assert ("status" if "v1beta" in path else "param") in error


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/score", {"queries": "a", "documents": "b"}),
        ("/api/embed", {"input": "a"}),
        ("/v1beta/models/m:embedContent", {"content": {"parts": [{"text": "a"}]}}),
    ],
)
def test_a_server_of_text_says_what_it_is_for(server: Server, path: str, body: dict[str, Any]) -> None:
    reply = httpx.post(server.url + path, json=body, timeout=60)
    assert reply.status_code == 400
    told = reply.json()["error"]
    assert "one for generate" in (told if isinstance(told, str) else told["message"])
