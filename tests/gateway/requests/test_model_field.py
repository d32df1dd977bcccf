"""The model that bodies of embeddings, transcriptions and their like name."""

from __future__ import annotations

import json

import pytest

from penstock.gateway.requests.model_field import named_beside, other_model_field, read_model, replace_model

JSON = [(b"content-type", b"application/json")]
FORM = [(b"content-type", b"multipart/form-data; boundary=x")]
AUDIO = (
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\x00\r\n'
    b'--x\r\nContent-Disposition: form-data; name="model"\r\nContent-Type: text/plain\r\n\r\nwhisper\r\n'
    b'--x\r\nContent-Disposition: form-data; name="language"\r\n\r\nen\r\n--x--\r\n'
)


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"input": ["a"], "model": "embed"}', "embed"),
        (b'\n {"model": "m"}', "m"),
        (b'{"input": "a"}', None),
        (b'{"model": null}', None),
        (b'{"model": 7}', None),
        (b'{"model": "m"', None),
        (b'["model"]', None),
        (b"RIFF", None),
        (b'{"model": "\xff"}', None),
        (b'{"x":' + b"[" * 100_000, None),
    ],
)
def test_json(body: bytes, model: str | None) -> None:
    assert read_model(JSON, body) == model


def test_json_for_another_model() -> None:
    body = b'{"input": ["a", 12345678901234567890], "model": "embed"}'
    assert json.loads(replace_model(JSON, body, "other")) == {**json.loads(body), "model": "other"}


def test_forms() -> None:
    assert read_model(FORM, AUDIO) == "whisper"
    assert read_model(FORM, AUDIO.replace(b"model", b"mode")) is None
    assert replace_model(FORM, AUDIO, "whisper-large") == AUDIO.replace(b"whisper", b"whisper-large")


@pytest.mark.parametrize(
    "kind",
    [
        b'multipart/form-data; boundary="x"',
        b"Multipart/Form-Data;boundary=x; charset=utf-8",
    ],
)
def test_boundaries(kind: bytes) -> None:
    assert read_model([(b"content-type", kind)], AUDIO) == "whisper"


DECOY = b'Content-Disposition: form-data; name="model"\r\n\r\ncheap\r\n--'


@pytest.mark.parametrize(
    "head",
    [
        b'form-data; name="model"',
        b"form-data; name=model",
        b'form-data; name="m\\odel"',
        b'form-data; name="Model"',
        b"form-data; name*=utf-8''mod%65l",
        b'form-data; name*0="mo"; name*1="del"',
        b'form-data; name="model"; filename="a"',
        b'form-data; name="model"\r\nContent-Transfer-Encoding: base64',
    ],
)
def test_a_form_that_may_name_two_models_names_none(head: bytes) -> None:
    """Whichever of them the server takes."""
    other = b"--x\r\nContent-Disposition: %b\r\n\r\ncheap\r\n" % head
    assert read_model(FORM, other + AUDIO) is None
    assert read_model(FORM, AUDIO.replace(b"--x--", other + b"--x--")) is None


def test_the_contents_of_a_file_name_no_model() -> None:
    assert read_model(FORM, AUDIO.replace(b"RIFF", DECOY + b"RIFF")) == "whisper"


@pytest.mark.parametrize(
    "body",
    [
        DECOY + AUDIO,  # a preamble
        AUDIO[:-8],
        AUDIO.replace(b"whisper\r\n--x", b"whisper\r\n--xy"),
        AUDIO.replace(b"whisper", b""),
        AUDIO.replace(b"whisper", b"w" * 2000),
        AUDIO.replace(b"text/plain", b"x" * 10_000),
        AUDIO.replace(
            b"--x--", b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' * 200 + b"--x--"
        ),
        b"",
    ],
)
def test_forms_that_are_malformed(body: bytes) -> None:
    assert read_model(FORM, body) is None


@pytest.mark.parametrize(
    "kind", [b"", b"; boundary=", b"; boundary=x; boundary=y", b"; boundary*=y; boundary=x"]
)
def test_forms_whose_boundary_is_unclear(kind: bytes) -> None:
    assert read_model([(b"content-type", b"multipart/form-data" + kind)], AUDIO) is None


@pytest.mark.parametrize("name", ["lora", "Lora_Path"])
def test_other_fields_that_choose_a_model(name: str) -> None:
    part = b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\na\r\n' % name.encode()
    assert other_model_field(FORM, part + AUDIO) == name
    assert other_model_field(FORM, AUDIO) is None
    assert other_model_field(JSON, json.dumps({"model": "m", name.lower(): "a"}).encode()) == name.lower()


@pytest.mark.parametrize(
    ("target", "header", "named"),
    [
        (b"/v1/embeddings?model=x", b"x-a", "the parameter model"),
        (b"/v1/embeddings?a=1&Model=x", b"x-a", "the parameter Model"),
        (b"/v1/embeddings?m%6fdel=x", b"x-a", "the parameter model"),
        (b"/v1/embeddings?a;lora=x", b"x-a", "the parameter lora"),
        (b"/v1/embeddings?api-version=1&a=model", b"x-a", None),
        (
            b"/v1/embeddings",
            b"x-amzn-sagemaker-target-model",
            "the header x-amzn-sagemaker-target-model",
        ),
    ],
)
def test_models_beside_the_body(target: bytes, header: bytes, named: str | None) -> None:
    assert named_beside(target, [(header, b"x")]) == named
