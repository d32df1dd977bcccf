"""Clients of APIs for vectors and scores that need the openai package 2."""

from __future__ import annotations

from typing import Any

import litellm
import numpy as np
import openai
import pytest
from huggingface_hub import InferenceClient
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.jinaai_rerank import JinaRerank
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference as TeiRerank

MODEL = "penstock-demo"
TEXTS = ["A pipe carries water.", 'It "rains".', "Ünïcode 🚰"]
QUERY = "What carries water?"


@pytest.fixture(scope="module")
def expected(vectors: str) -> Any:
    """float32[texts, W]."""
    with openai.OpenAI(base_url=f"{vectors}/v1", api_key="none") as client:
        reply = client.embeddings.create(model=MODEL, input=TEXTS)
    return np.array([each.embedding for each in reply.data], np.float32)


def same(given: Any, expected: Any) -> bool:
    """Whether numbers are the same float32 values."""
    return bool((np.array(given, np.float32) == expected).all())


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellms_vectors(vectors: str, expected: Any, provider: str) -> None:
    for form in ("float", "base64"):
        reply = litellm.embedding(
            f"{provider}/{MODEL}", TEXTS, api_base=f"{vectors}/v1", api_key="none", encoding_format=form
        )
        if form == "float":
            assert same([each["embedding"] for each in reply.data], expected)
        assert reply.usage.prompt_tokens > 0


def test_litellms_cohere(vectors: str, expected: Any) -> None:
    reply = litellm.embedding(f"cohere/{MODEL}", TEXTS, api_base=f"{vectors}/v2/embed", api_key="none")
    assert same([each["embedding"] for each in reply.data], expected)


@pytest.mark.parametrize("provider", ["cohere", "jina_ai", "hosted_vllm", "infinity", "huggingface"])
def test_litellms_rerank(vectors: str, provider: str) -> None:
    base = f"{vectors}/v1/rerank" if provider == "jina_ai" else vectors
    reply = litellm.rerank(
        f"{provider}/{MODEL}",
        QUERY,
        TEXTS,
        top_n=2,
        return_documents=provider != "infinity",  # whose documents are texts
        api_base=base,
        api_key="none",
    )
    scores = [each["relevance_score"] for each in reply.results or []]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)


def test_llama_index(vectors: str, expected: Any) -> None:
    made = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{vectors}/v1", api_key="none")
    assert same(made.get_text_embedding_batch(TEXTS), expected)
    assert same(made.get_query_embedding(TEXTS[0]), expected[0])
    tei = TextEmbeddingsInference(MODEL, base_url=vectors)
    assert same(tei.get_text_embedding_batch(TEXTS), expected)


def test_llama_indexs_rankers(vectors: str) -> None:
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    query = QueryBundle(QUERY)
    jina = JinaRerank(2, MODEL, f"{vectors}/v1", "none").postprocess_nodes(nodes, query)
    tei = TeiRerank(2, vectors).postprocess_nodes(nodes, query)
    assert [each.node.node_id for each in jina] == [each.node.node_id for each in tei]
    assert [each.score for each in jina] == [each.score for each in tei]
    with pytest.raises(RuntimeError, match="top_n"):
        JinaRerank(-1, MODEL, f"{vectors}/v1", "none").postprocess_nodes(nodes, query)


def test_hugging_faces_client(vectors: str, expected: Any) -> None:
    assert same(InferenceClient().feature_extraction(TEXTS[0], model=f"{vectors}/embed"), expected[:1])
