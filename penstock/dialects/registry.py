"""The list of APIs that a server offers.

To add one, copy a folder beside this file, give its classes and schemas names of their own, and name it
twice here, and a third time where ``/invocations`` is to find it.
"""

from __future__ import annotations

from penstock.config.serve import ServeConfig
from penstock.dialects.chat import openapi as chat
from penstock.dialects.chat.dialect import ChatCompletions
from penstock.dialects.cohere import openapi as cohere
from penstock.dialects.cohere.dialect import CohereEmbed, CohereEmbedV1
from penstock.dialects.completions import openapi as completions
from penstock.dialects.completions.dialect import Completions
from penstock.dialects.embeddings import openapi as embeddings
from penstock.dialects.embeddings.dialect import Embeddings
from penstock.dialects.gemini import openapi as gemini
from penstock.dialects.gemini.dialect import (
    GEMINI_ROUTES,
    Gemini,
    GeminiModels,
    GeminiStream,
    GeminiTokenCounter,
)
from penstock.dialects.gemini.embed import GeminiEmbed, GeminiEmbedTexts
from penstock.dialects.invocations import Invocations
from penstock.dialects.messages import openapi as messages
from penstock.dialects.messages.dialect import Messages, MessagesTokenCounter
from penstock.dialects.ollama import openapi as ollama
from penstock.dialects.ollama.dialect import OllamaChat, OllamaGenerate
from penstock.dialects.ollama.embed import OllamaEmbed, OllamaEmbeddings
from penstock.dialects.ollama.models import OLLAMA_ROUTES, OllamaModels
from penstock.dialects.openapi_schema import check_names
from penstock.dialects.pooling import openapi as pooling
from penstock.dialects.pooling.dialect import Classify, Pooling, Score, ScoreOfV1
from penstock.dialects.rerank import openapi as rerank
from penstock.dialects.rerank.dialect import Rerank, RerankV1, RerankV2
from penstock.dialects.responses import openapi as responses
from penstock.dialects.responses.dialect import Compact, Responses, ResponsesTokenCounter
from penstock.dialects.sglang import openapi as sglang
from penstock.dialects.sglang.dialect import SglangGenerate
from penstock.dialects.tei import openapi as tei
from penstock.dialects.tei.dialect import TEI_DIALECTS
from penstock.dialects.tokens import openapi as tokens
from penstock.dialects.tokens.derender import DerenderChat, DerenderCompletions
from penstock.dialects.tokens.dialect import TokensInOut
from penstock.dialects.tokens.render import Render
from penstock.generation.compaction.compaction import Compaction
from penstock.generation.dialect import DescribingRoute, Dialect, TokenCounter
from penstock.generation.input_processor import InputProcessor
from penstock.generation.pooling.dialect import PoolingDialect
from penstock.generation.pooling.processor import PoolingProcessor
from penstock.store.response_store import ResponseStore


def make_dialects(
    config: ServeConfig,
    processor: InputProcessor,
    store: ResponseStore | None = None,
    seal_key: bytes = b"",
) -> list[Dialect]:
    """One dialect per API. ``store``: for APIs that keep replies; None: they keep none. ``seal_key``: for
    what other processes open as well; empty: they do not. Raises ConfigError."""
    compaction = Compaction.of_server(config, seal_key)
    completions, chat = Completions(config, processor), ChatCompletions(config, processor)
    responses = Responses(config, processor, store, compaction)
    invocations = Invocations({"messages": chat, "prompt": completions, "input": responses})
    return [
        completions,
        chat,
        Messages(config, processor, compaction),
        responses,
        Compact(config, processor, store, compaction),
        invocations,
        TokensInOut(config, processor),
        Render(chat),
        Render(completions),
        DerenderChat(chat, processor),
        DerenderCompletions(completions, processor),
        SglangGenerate(config, processor),
        OllamaChat(config, processor),
        OllamaGenerate(config, processor),
        Gemini(config, processor),
        GeminiStream(config, processor),
    ]


def make_pooling_dialects(config: ServeConfig, processor: PoolingProcessor) -> list[PoolingDialect]:
    """One dialect per API for vectors, scores or labels."""
    return [
        Embeddings(processor),
        Pooling(processor),
        Classify(processor),
        Score(processor),
        ScoreOfV1(processor),
        Rerank(processor),
        RerankV1(processor),
        RerankV2(processor),
        CohereEmbed(processor),
        CohereEmbedV1(processor),
        *(dialect(processor) for dialect in TEI_DIALECTS),
        OllamaEmbed(processor),
        OllamaEmbeddings(processor),
        GeminiEmbed(processor),
        GeminiEmbedTexts(processor),
    ]


def make_token_counters(
    config: ServeConfig,
    processor: InputProcessor,
    store: ResponseStore | None = None,
    seal_key: bytes = b"",
) -> list[TokenCounter]:
    """One per API that counts tokens. The arguments: as for :func:`make_dialects`."""
    compaction = Compaction.of_server(config, seal_key)
    of_messages = MessagesTokenCounter(processor, compaction)
    of_responses = ResponsesTokenCounter(processor, store, compaction)
    return [of_messages, of_responses, GeminiTokenCounter(processor)]


def make_describing_routes(processor: InputProcessor) -> list[DescribingRoute]:
    """One per route of an API of its own that describes models."""
    gemini = [GeminiModels(path) for path in GEMINI_ROUTES]
    return [*gemini, *(OllamaModels(path, processor) for path in OLLAMA_ROUTES)]


DESCRIPTIONS = check_names(
    (
        completions.DESCRIPTION,
        chat.DESCRIPTION,
        messages.DESCRIPTION,
        responses.DESCRIPTION,
        tokens.DESCRIPTION,
        sglang.DESCRIPTION,
        *ollama.DESCRIPTIONS,
        *gemini.DESCRIPTIONS,
        embeddings.DESCRIPTION,
        *pooling.DESCRIPTIONS,
        rerank.DESCRIPTION,
        cohere.DESCRIPTION,
        tei.DESCRIPTION,
    )
)
"""One entry per API, for the OpenAPI document."""
