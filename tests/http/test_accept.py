"""Which content type a client asks for."""

from __future__ import annotations

import pytest

from penstock.http.accept import asks_for

KIND, JSON = b"application/vnd.safetensors", b"application/json"


@pytest.mark.parametrize(
    "accept",
    [
        "application/vnd.safetensors",
        "Application/VND.Safetensors",
        "application/vnd.safetensors, application/json",
        "application/json;q=0.9, application/vnd.safetensors",
        "application/json ; q=0.5,application/vnd.safetensors ; q=0.8",
        "application/vnd.safetensors;q=0.001",
        "application/vnd.safetensors; frames=u64; q=1.0, */*;q=0.1",
        "application/vnd.safetensors, */*",
        "application/vnd.safetensors;q=0.5, text/*",
        "application/vnd.safetensors;q=0.5, application/*;q=0.9, application/json;q=0.1",
        "application/vnd.safetensors, application/json;q=high",
    ],
)
def test_a_client_that_names_the_type_gets_it(accept: str) -> None:
    assert asks_for([(b"accept", accept.encode())], KIND, JSON)


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "*/*",
        "application/*",
        "application/json",
        "application/vnd.safetensors;q=0",
        "application/vnd.safetensors;q=0.000",
        "application/vnd.safetensors;q=0.5, application/json",
        "application/vnd.safetensors;q=0.5, application/*",
        "application/vnd.safetensors;q=0.5, */*",
        "application/vnd.safetensors;q=2",
        "application/vnd.safetensors;q=nan",
        "application/vnd.safetensors;q=high",
        "application/vnd.safetensors-other",
        "text/application/vnd.safetensors",
    ],
)
def test_others_get_the_usual_type(accept: str) -> None:
    assert not asks_for([(b"accept", accept.encode())], KIND, JSON)


def test_several_headers_are_one_list() -> None:
    headers = [(b"accept", b"*/*;q=0.1"), (b"host", b"a"), (b"accept", KIND)]
    assert asks_for(headers, KIND, JSON)
    assert not asks_for([*headers[:2], (b"x-accept", KIND)], KIND, JSON)


def test_the_usual_type_may_be_another() -> None:
    accept = [(b"accept", b"text/event-stream, application/vnd.safetensors;q=0.9")]
    assert asks_for(accept, KIND, JSON)
    assert not asks_for(accept, KIND, b"text/event-stream")
