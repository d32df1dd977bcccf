"""Clients of APIs for vectors and scores that work beside the openai package 3."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import cohere
import numpy as np
import openai
import pytest
from google import genai
from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.utils import Secret
from haystack_integrations.components.embedders.cohere import CohereDocumentEmbedder, CohereTextEmbedder
from haystack_integrations.components.rankers.cohere import CohereRanker
from haystack_integrations.components.rankers.jina import JinaRanker
from huggingface_hub import InferenceClient
from langchain_google_genai import GoogleGenerativeAIEmbeddings
from langchain_ollama import OllamaEmbeddings
from langchain_openai import OpenAIEmbeddings
from ollama import Client as Ollama

MODEL, WIDTH = "penstock-demo", 64
TEXTS = ["A pipe carries water.", 'It "rains".', "", "Ünïcode 🚰"]
QUERY = "What carries water?"
KEY = Secret.from_token("none")


@pytest.fixture(scope="module")
def client(vectors: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{vectors}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected(client: openai.OpenAI) -> Any:
    """float32[texts, WIDTH]."""
    reply = client.embeddings.create(model=MODEL, input=TEXTS)
    vectors = np.array([each.embedding for each in reply.data], np.float32)
    assert vectors.shape == (len(TEXTS), WIDTH)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1)
    return vectors


def same(given: Any, expected: Any) -> bool:
    """Whether numbers are the same float32 values."""
    return bool((np.array(given, np.float32) == expected).all())


# -- OpenAI's


def test_openais_forms(client: openai.OpenAI, expected: Any) -> None:
    for form in ("float", "base64"):
        reply = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format=form)  # type: ignore[arg-type]
        if form == "float":
            assert same([each.embedding for each in reply.data], expected)
        assert [each.index for each in reply.data] == list(range(len(TEXTS)))
        assert reply.usage.prompt_tokens == reply.usage.total_tokens > 0
    short = client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=8).data[0].embedding
    assert len(short) == 8
    assert np.linalg.norm(short) == pytest.approx(1)
    with pytest.raises(openai.BadRequestError, match="dimensions") as caught:
        client.embeddings.create(model=MODEL, input="a", dimensions=WIDTH + 1)
    assert caught.value.param == "dimensions"


def test_openais_async_client(vectors: str, expected: Any) -> None:
    async def embedded() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{vectors}/v1", api_key="none") as client:
            replies = [client.embeddings.create(model=MODEL, input=text) for text in TEXTS]
            return [(await reply).data[0].embedding for reply in replies]

    assert same(asyncio.run(embedded()), expected)


def test_langchain(vectors: str, expected: Any) -> None:
    made = OpenAIEmbeddings(
        model=MODEL,
        base_url=f"{vectors}/v1",
        api_key="none",  # type: ignore[arg-type]
        check_embedding_ctx_length=False,
    )
    assert same(made.embed_documents(TEXTS), expected)
    assert same(made.embed_query(TEXTS[0]), expected[0])


def test_haystack(vectors: str, expected: Any) -> None:
    options: dict[str, Any] = {"api_key": KEY, "model": MODEL, "api_base_url": f"{vectors}/v1"}
    documents = OpenAIDocumentEmbedder(**options, progress_bar=False).run(
        [Document(content=t) for t in TEXTS]
    )
    assert same([each.embedding for each in documents["documents"]], expected)
    assert same(OpenAITextEmbedder(**options).run(TEXTS[0])["embedding"], expected[0])


# -- Cohere's


def test_cohere(vectors: str, expected: Any) -> None:
    client = cohere.ClientV2("none", base_url=vectors)
    kinds = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    reply = client.embed(model=MODEL, texts=TEXTS, input_type="search_document", embedding_types=kinds)
    assert same(reply.embeddings.float_, expected)
    assert same(
        [np.frombuffer(base64.b64decode(each), "<f4") for each in reply.embeddings.base64 or []], expected
    )
    assert np.array(reply.embeddings.int8).shape == expected.shape
    assert np.array(reply.embeddings.ubinary).shape == (len(TEXTS), WIDTH // 8)
    assert reply.texts == TEXTS
    assert reply.meta
    assert reply.meta.billed_units
    assert reply.meta.billed_units.input_tokens
    short = client.embed(model=MODEL, texts=["a"], input_type="search_query", output_dimension=8)
    assert len((short.embeddings.float_ or [])[0]) == 8

    ranked = client.rerank(model=MODEL, query=QUERY, documents=TEXTS, top_n=2, max_tokens_per_doc=100)
    scores = [each.relevance_score for each in ranked.results]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)
    with pytest.raises(cohere.BadRequestError) as caught:
        client.rerank(model=MODEL, query=QUERY, documents=[])
    assert "documents" in caught.value.body["message"]


def test_coheres_first_version(vectors: str, expected: Any) -> None:
    client = cohere.Client("none", base_url=vectors)
    reply = client.embed(texts=TEXTS, model=MODEL, input_type="search_document")
    assert same(reply.embeddings, expected)
    documents: list[Any] = [{"title": "Pipes", "text": TEXTS[0]}, TEXTS[1]]
    ranked = client.rerank(query=QUERY, documents=documents, model=MODEL, return_documents=True)
    texts = {each.index: each.document.text for each in ranked.results if each.document}
    assert texts == {0: TEXTS[0], 1: TEXTS[1]}


def test_coheres_haystack(vectors: str, expected: Any) -> None:
    options: dict[str, Any] = {"api_key": KEY, "model": MODEL, "api_base_url": vectors}
    assert same(CohereTextEmbedder(**options).run(TEXTS[0])["embedding"], expected[0])
    documents = [Document(content=text) for text in TEXTS]
    made = CohereDocumentEmbedder(**options, progress_bar=False).run(documents)
    assert same([each.embedding for each in made["documents"]], expected)
    ranked = CohereRanker(**options).run(QUERY, documents[:2], top_k=1)["documents"]
    jina = JinaRanker(api_key=KEY, model=MODEL, base_url=f"{vectors}/v1/rerank")
    assert ranked[0].id == jina.run(QUERY, documents[:2], top_k=1)["documents"][0].id


# -- TEI's


def test_hugging_faces_client(vectors: str, expected: Any) -> None:
    client = InferenceClient()
    assert same(client.feature_extraction(TEXTS[0], model=f"{vectors}/embed"), expected[:1])
    cosines = client.sentence_similarity(TEXTS[0], other_sentences=TEXTS[1:], model=f"{vectors}/similarity")
    assert cosines == pytest.approx((expected[1:] @ expected[0]).tolist(), abs=1e-5)


# -- Ollama's, Gemini's


def test_ollama(vectors: str, expected: Any) -> None:
    assert same(Ollama(vectors).embed(MODEL, TEXTS).embeddings, expected)
    assert same(OllamaEmbeddings(model=MODEL, base_url=vectors).embed_documents(TEXTS), expected)


def test_gemini(vectors: str, expected: Any) -> None:
    options: Any = {"base_url": vectors}
    client = genai.Client(api_key="none", vertexai=False, http_options=options)
    made = client.models.embed_content(model=MODEL, contents=TEXTS[:2])  # type: ignore[arg-type]
    assert same([each.values for each in made.embeddings or []], expected[:2])
    settings: Any = {"model": f"models/{MODEL}", "google_api_key": "none", "base_url": vectors}
    embeddings = GoogleGenerativeAIEmbeddings(**settings)
    assert same(embeddings.embed_documents(TEXTS[:2]), expected[:2])
