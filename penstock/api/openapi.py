"""The OpenAPI document and the page that shows it."""

from typing import Any


def openapi_document(version: str, *, api_key: bool = False) -> dict[str, Any]:
    """OpenAPI 3.1 document of every route. ``api_key``: whether the routes ask for a bearer token."""
    raise NotImplementedError


def docs_page() -> bytes:
    """A self-contained HTML page that shows /openapi.json."""
    raise NotImplementedError
