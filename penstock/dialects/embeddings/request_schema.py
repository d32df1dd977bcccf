"""The request body of ``/v1/embeddings``: its fields, and which of them are unsupported."""

from __future__ import annotations

from penstock.generation.pooling.request_fields import UNSUPPORTED_TEXTS, VectorsRequest


class EmbeddingRequest(VectorsRequest, kw_only=True):
    """Body of POST /v1/embeddings."""


UNSUPPORTED = UNSUPPORTED_TEXTS
