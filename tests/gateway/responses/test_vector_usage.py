"""The token counts of replies with vectors are found wherever servers write them, and nowhere else."""

from __future__ import annotations

import random

import msgspec
import pytest

from penstock.gateway.requests.apis import VECTOR_APIS
from penstock.gateway.responses.expected_reply import expected_reply, make_observer
from penstock.gateway.responses.held_bytes import HeldBytes
from penstock.gateway.responses.outcome import Outcome, TransportResult, classify_outcome
from penstock.gateway.responses.response_observer import MAX_ERROR_BYTES, Observation, ReplyObserver
from penstock.gateway.responses.token_usage import ReportedUsage
from penstock.gateway.responses.vector_usage import END_BYTES
from penstock.gateway.upstream.exchange import Headers
from penstock.generation.replies.safetensors_writer import safetensors_file, tensor_of

JSON = [(b"content-type", b"application/json")]
FLOATS = b"[" + b"-0.0123456789," * 3000 + b"0.5]"
USAGE = b'"usage":{"prompt_tokens":5,"total_tokens":5}'
ECHO = b'{"document":{"usage":{"prompt_tokens":1}, "text":"\\"usage\\":{\\"prompt_tokens\\":2}"},"s":"usage"}'
"""What a client may have repeated to it."""
REPLIES = {
    "openai": b'{"object":"list","data":[{"embedding":%b}],"model":"m",%b}' % (FLOATS, USAGE),
    "vllm": b'{"id":"e","data":[{"embedding":%b}],"usage":{"prompt_tokens":5,"total_tokens":5,'
    b'"completion_tokens":0,"prompt_tokens_details":null}}' % FLOATS,
    "spaces": b'{"data": [%b],\n  "usage" : {"prompt_tokens": 5, "total_tokens": 5}\n}\n' % FLOATS,
    "base64": b'{"data":[{"embedding":"%b"}],%b}' % (b"AAAA" * 9999, USAGE),
    "vllm-rerank": b'{"id":"r","model":"m",%b,"results":[%b]}' % (USAGE, b",".join([ECHO] * 999)),
    "llama.cpp": b'{"model":"m","object":"list", "usage": {"prompt_tokens":5,"x":{"y":[1]}}, "data":[%b]}'
    % FLOATS,
    "jina": b'{"results":[%b],"usage":{"total_tokens":5}}' % b",".join([ECHO] * 999),
    "cohere-embed": b'{"id":"c","embeddings":{"float":[%b]},"texts":["\\"usage\\":"],"meta":'
    b'{"api_version":{"version":"2"},"billed_units":{"input_tokens":5}},"response_type":"x"}' % FLOATS,
    "cohere-rerank": b'{"id":"c","results":[%b],"meta":{"billed_units":{"search_units":1},'
    b'"tokens":{"input_tokens":5,"output_tokens":0}}}' % FLOATS,
    "ollama": b'{"model":"m","embeddings":[%b],"total_duration":9,"prompt_eval_count":5}' % FLOATS,
    "gemini": b'{"embedding":{"values":%b},"usageMetadata":{"promptTokenCount":5}}' % FLOATS,
    "short": b'{"data":[{"embedding":[0.5]}],%b}' % USAGE,
}
UNCOUNTED = {
    "tei": FLOATS,
    "nested": b'{"results":[%b]}' % b",".join([ECHO] * 999),
    "short nested": b'{"results":[%b]}' % ECHO,
    "search units": b'{"results":[],"meta":{"billed_units":{"search_units":1}}}',
    "null": b'{"data":[%b],"usage":null}' % FLOATS,
    "too many": b'{"data":[%b],"usage":{"prompt_tokens":99999999999}}' % FLOATS,
    "text": b'{"usage":"none","prompt_eval_count":"5"}',
    "deep": b'{"usage":' + b"[" * 9000 + b"]" * 9000 + b"}",
    "bytes": bytes(range(256)) * 99 + USAGE + b"}",
}


def seen_of(path: str, headers: Headers, chunks: list[bytes], status: int = 200) -> Observation:
    observer = make_observer(
        status,
        headers,
        expected_reply(None, path),
        on_response=lambda id: None,
        strip_usage=False,
        held=HeldBytes(0),
    )
    for chunk in chunks:
        assert observer.feed(chunk, 1.0) is chunk, "relayed as it is"
        assert isinstance(observer, ReplyObserver)
        assert len(observer._body) <= MAX_ERROR_BYTES + 1
        assert len(observer._end) <= END_BYTES
    assert observer.finish(1.0) == b""
    return observer.seen


def pieces(raw: bytes, seed: int) -> list[bytes]:
    cuts = sorted(random.Random(seed).choices(range(len(raw) + 1), k=seed))
    return [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]


@pytest.mark.parametrize("raw", REPLIES.values(), ids=REPLIES.keys())
def test_the_counts_are_found_however_the_reply_is_cut(raw: bytes) -> None:
    assert msgspec.json.decode(raw)
    for cuts in (0, 1, 2, 30, 500):
        seen = seen_of("/v1/embeddings", JSON, pieces(raw, cuts))
        assert seen.usage == ReportedUsage(5, 0)
        assert seen.tokens == (5, None, 0, None)
        assert classify_outcome(TransportResult.COMPLETE, 200, seen, "/v1/embeddings") is Outcome.OK
        cut = classify_outcome(TransportResult.BROKEN, 200, seen, "/v1/embeddings")
        assert cut is Outcome.NETWORK_ERROR


@pytest.mark.parametrize("raw", UNCOUNTED.values(), ids=UNCOUNTED.keys())
def test_what_is_deeper_or_no_count_is_none(raw: bytes) -> None:
    seen = seen_of("/v1/rerank", JSON, pieces(raw, 9))
    assert (seen.usage, seen.error, seen.content_problem, seen.unread) == (None, None, None, "")
    found = classify_outcome(TransportResult.COMPLETE, 200, seen, "/v1/rerank")
    assert found is Outcome.OK_WITHOUT_USAGE


@pytest.mark.parametrize(
    "headers",
    [
        [(b"content-type", b"application/json"), (b"x-compute-tokens", b"5")],
        [
            (b"content-type", b"application/octet-stream"),
            (b"metadata", b'{"id":"p","data":[{"index":0,"shape":[4]}],%b}' % USAGE),
        ],
        [(b"content-encoding", b"gzip"), (b"x-compute-tokens", b"5")],
    ],
    ids=["tei", "vllm", "coded"],
)
def test_counts_in_headers(headers: Headers) -> None:
    for body in (bytes(4 * 1024), b"\x1f\x8b" + bytes(1 << 20), b"[[0.5]]"):
        assert seen_of("/pooling", headers, pieces(body, 3)).usage == ReportedUsage(5, 0)
    assert seen_of("/pooling", [*headers, (b"x", b"y")], [b"{}"], status=400).usage is None


def test_counts_in_the_metadata_of_safetensors() -> None:
    import numpy as np

    told = {"model": "m", "usage": '{"prompt_tokens":5,"total_tokens":5}'}
    tensor = tensor_of("embeddings", [np.zeros((64, 1024), np.float32)])
    kind = [(b"content-type", b"application/vnd.safetensors")]
    whole = b"".join(safetensors_file([tensor], told).pieces())
    seen = seen_of("/v1/embeddings", kind, pieces(whole, 20))
    assert (seen.usage, seen.unread) == (ReportedUsage(5, 0), "")
    without = b"".join(safetensors_file([tensor], {}).pieces())
    assert seen_of("/v1/embeddings", kind, pieces(without, 20)).usage is None


@pytest.mark.parametrize(
    ("status", "headers", "raw", "outcome"),
    [
        (200, JSON, b'{"error":{"message":"x"}}', Outcome.MODEL_SERVER_ERROR),
        (200, [(b"content-type", b"text/html; charset=utf-8")], b"<html>", Outcome.CONTENT_ERROR),
        (200, [(b"content-type", b"application/json; charset=latin-1")], b"{}", Outcome.CONTENT_ERROR),
        (302, [(b"location", b"/login")], b"", Outcome.CONTENT_ERROR),
        (422, JSON, b'{"error":"x","error_type":"Validation"}', Outcome.CLIENT_ERROR),
        (500, JSON, b'{"error":"x","error_type":"Backend"}', Outcome.MODEL_SERVER_ERROR),
    ],
)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed", "/api/embed"])
def test_what_is_no_result(path: str, status: int, headers: Headers, raw: bytes, outcome: Outcome) -> None:
    seen = seen_of(path, headers, [raw])
    if status != 200:
        seen = seen_of(path, headers, [raw], status)
    assert classify_outcome(TransportResult.COMPLETE, status, seen, path) is outcome


def test_all_routes_of_vectors_are_read_so() -> None:
    assert {expected_reply(None, path) for path in VECTOR_APIS} == {"vectors"}
    assert expected_reply(None, "/v1/audio/speech") == "result"
