"""instructor's modes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import instructor
import openai
import pytest
from instructor.core import InstructorRetryException

from tests.clients.shapes import MODEL, QUESTION, Answer


@contextlib.contextmanager
def passing_over_objections() -> Iterator[None]:
    """Passes over instructor's objection to a reply, but not over an error of the server."""
    try:
        yield
    except InstructorRetryException as error:
        if error.last_completion is None:
            raise


def create(url: str, mode: instructor.Mode, wanted: object, **fields: object) -> object:
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=mode)
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        response_model=wanted,
        max_tokens=300,
        temperature=0,
        max_retries=0,
        **fields,
    )


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_an_answer(url: str, mode: str) -> None:
    assert isinstance(create(url, instructor.Mode[mode], Answer), Answer)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_a_partial_answer(url: str, mode: str) -> None:
    *_, last = create(url, instructor.Mode[mode], instructor.Partial[Answer], stream=True)  # type: ignore[misc]
    assert Answer.model_validate(last.model_dump())


def test_parallel_tools(url: str) -> None:
    """The model decides whether it calls; instructor objects to text."""
    with passing_over_objections():
        found = create(url, instructor.Mode.PARALLEL_TOOLS, Iterable[Answer])
        assert all(isinstance(each, Answer) for each in found)  # type: ignore[attr-defined]


def test_json_mode(url: str) -> None:
    """The prompt alone says which object, which a tiny model does not heed: instructor objects."""
    with passing_over_objections():
        assert isinstance(create(url, instructor.Mode.JSON, Answer), Answer)
