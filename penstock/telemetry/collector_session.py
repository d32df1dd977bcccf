"""The HTTP session of exporters: of a collector's answer, the beginning is read and no more."""

from __future__ import annotations

import os
from typing import Any

import requests
from requests.adapters import HTTPAdapter

MAX_ANSWER_BYTES = 65_536
"""A collector answers with a few numbers, or a sentence about what it refuses."""


def collector_session() -> requests.Session | None:
    """A session for an exporter of the OpenTelemetry library; None: the environment names one of its own
    (``OTEL_PYTHON_EXPORTER_OTLP_HTTP_…_CREDENTIAL_PROVIDER``)."""
    if any(name.startswith("OTEL_") and name.endswith("_CREDENTIAL_PROVIDER") for name in os.environ):
        return None
    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, _BoundedAdapter())
    return session


class _BoundedAdapter(HTTPAdapter):
    """The library reads whole answers, whatever their length."""

    def send(self, *args: Any, **options: Any) -> requests.Response:
        response = super().send(*args, **options)
        beginning: bytes = response.raw.read(MAX_ANSWER_BYTES, decode_content=True)
        response._content = beginning
        if len(beginning) == MAX_ANSWER_BYTES:
            response.close()  # with the rest
        return response
