"""The model that a request names: in its path, or in the body of any inference request, as a field of JSON or
a part of a form.

A key may be for some models alone. So a form of which servers may read another model than the gateway, such
as one with two parts of that name, counts as naming none.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from urllib.parse import unquote_plus

import msgspec

from penstock.gateway.requests.one_meaning import OTHER_MODEL_FIELDS, check_meaning, other_spelling
from penstock.gateway.upstream.exchange import Headers

ONE = "/v1/models/"
"""Before the name of a model that a request reads."""
READING = frozenset({"GET", "HEAD"})
MAX_PARTS, MAX_PART_HEADERS, MAX_FORM_MODEL = 128, 8192, 1024
"""Parts of a form; bytes of the headers of one, and of a model's name."""
FORM = b"multipart/form-data"

_MODEL_HEADERS = frozenset(
    {
        b"x-amzn-sagemaker-target-model",
        b"x-amzn-sagemaker-adapter-identifier",
        b"x-amzn-sagemaker-inference-component",
    }
)
"""Headers of servers that run in SageMaker."""
_EMPTY = frozenset({b"", b"null", b"[]", b'""'})
_OBJECT = re.compile(rb"[ \t\r\n]*\{").match
_boundaries = re.compile(rb'boundary(?:=(?:"([^"\\]+)"|([^\s;"]+)))?', re.IGNORECASE).findall
_names = re.compile(
    rb'(?<![a-z])name(\*[0-9*]*)?[ \t]*=[ \t]*("(?:[^"\\]|\\.)*"|[^;\s]*)', re.IGNORECASE
).findall
"""Parameters of ``Content-Disposition`` with the name of a part, as RFC 7578 writes them, or RFC 2231 (*)."""
_CODED = re.compile(rb"filename|content-transfer-encoding", re.IGNORECASE).search


class _Named(msgspec.Struct):
    """The model, and what may be long in bodies of embeddings and their like."""

    model: msgspec.Raw = msgspec.Raw(b"null")
    input: msgspec.Raw = msgspec.Raw()
    inputs: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    texts: msgspec.Raw = msgspec.Raw()
    text_1: msgspec.Raw = msgspec.Raw()
    text_2: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()


_OtherModels = msgspec.defstruct(
    "_OtherModels", [(name, msgspec.Raw, msgspec.Raw()) for name in OTHER_MODEL_FIELDS]
)
_decode = msgspec.json.Decoder(_Named).decode
_name = msgspec.json.Decoder(str)
_decode_others = msgspec.json.Decoder(_OtherModels).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


def described_model(method: str, path: str) -> str | None:
    """The model whose description is asked for; None: it is another request."""
    return path.removeprefix(ONE) if method in READING and path.startswith(ONE) else None


def read_model(headers: Headers, raw: bytes, *, partial: bool = False) -> str | None:
    """The model that a body names; None: it names none. What is malformed is left to the server. ``partial``:
    more of the body follows. Raises ApiError for JSON that another parser may read as naming another one."""
    if (kind := form_type(headers)) is not None:
        place = _find_model(kind, raw, partial=partial)
        return None if place is None else raw[place].decode(errors="replace")
    if not _OBJECT(raw):
        return None
    try:
        model, *texts = map(bytes, msgspec.structs.astuple(_decode(raw)))
        check_meaning(raw, texts)
        return None if model == b"null" else _name.decode(model)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def other_model_field(headers: Headers, raw: bytes) -> str | None:
    """The field of a JSON body or a form by which some servers take another model than the one it names;
    None: there is none."""
    if (kind := form_type(headers)) is not None:
        return next((name for name in _part_names(kind, raw) if _folded(name) in OTHER_MODEL_FIELDS), None)
    try:
        said = _decode_others(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return next((name for name in said.__struct_fields__ if bytes(getattr(said, name)) not in _EMPTY), None)


def named_beside(target: bytes, headers: Headers) -> str | None:
    """The parameter of the query, or the header, by which some servers take another model than the body's;
    None: there is none."""
    query = target.partition(b"?")[2].decode("latin-1").replace(";", "&")
    names = (unquote_plus(each.partition("=")[0]) for each in query.split("&"))
    for name in names:
        if _folded(name) in ("model", *OTHER_MODEL_FIELDS):
            return f"the parameter {name[:MAX_FORM_MODEL]}"
    return next((f"the header {name.decode()}" for name, _ in headers if name in _MODEL_HEADERS), None)


def replace_model(headers: Headers, raw: bytes, model: str, *, partial: bool = False) -> bytes:
    """Copy the body, which names a model, for another one. ``partial``: more of it follows."""
    if (kind := form_type(headers)) is None:
        return _encode({**_fields(raw), "model": model})
    place = _find_model(kind, raw, partial=partial)
    assert place is not None, "it names a model"
    return b"%b%b%b" % (raw[: place.start], model.encode(), raw[place.stop :])


def is_form(headers: Headers) -> bool:
    """Whether the body is a form, as audio and images are sent."""
    return form_type(headers) is not None


def form_type(headers: Headers) -> bytes | None:
    """The content type of a form; of several all. None: it is no form."""
    kinds = b",".join(value for name, value in headers if name == b"content-type")
    return kinds if FORM in kinds.lower() else None


def form_delimiter(kind: bytes) -> bytes | None:
    """What stands between the parts of a form of this content type; None: it does not say so clearly."""
    boundaries = _boundaries(kind)
    if len(boundaries) != 1 or not any(boundaries[0]):
        return None
    return b"--" + bytes(boundaries[0][0] or boundaries[0][1])


def names_model(head: bytes) -> bool:
    """Whether a part with these headers may be the model."""
    return any(_folded(name) == "model" for _, name in _names(head))


def _find_model(kind: bytes, raw: bytes, *, partial: bool) -> slice | None:
    """Where the form has the name of the model; None: nowhere, or not clearly. ``partial``: in its complete
    parts."""
    delimiter = form_delimiter(kind)
    if delimiter is None:
        return None
    found = None
    try:
        for head, content in _parts(raw, delimiter):
            names = _names(head)
            if any(coded for coded, _ in names):
                return None
            if any(_folded(name) == "model" for _, name in names):
                if found is not None or len(names) > 1 or _CODED(head) or _unquoted(names[0][1]) != b"model":
                    return None
                found = content
    except ValueError:
        if not partial:
            return None
    if found is None or not 0 < found.stop - found.start <= MAX_FORM_MODEL:
        return None
    return None if b"\n" in raw[found] or b"\r" in raw[found] else found


def _part_names(kind: bytes, raw: bytes) -> Iterator[str]:
    """The names of a form's parts, as far as it is well-formed; without its only model it names none."""
    boundary = _boundaries(kind)[0]
    with contextlib.suppress(ValueError):
        for head, _ in _parts(raw, b"--" + (boundary[0] or boundary[1])):
            yield from (_unquoted(name).decode(errors="replace") for _, name in _names(head))


def _folded(name: bytes | str) -> str:
    """A part's name for parsers that do not care for case."""
    text = name if isinstance(name, str) else _unquoted(name).decode(errors="replace")
    return other_spelling(text, (*OTHER_MODEL_FIELDS, "model")) or text


def _parts(raw: bytes, delimiter: bytes) -> Iterator[tuple[bytes, slice]]:
    """The headers of each part, and where its content is. Raises ValueError for a malformed form, and one of
    more parts than are read."""
    if not raw.startswith(delimiter):
        raise ValueError
    at = len(delimiter)
    for _ in range(MAX_PARTS):
        if raw.startswith(b"--", at):
            return
        if not raw.startswith(b"\r\n", at):
            raise ValueError
        head = raw.index(b"\r\n\r\n", at, at + MAX_PART_HEADERS)
        end = raw.index(b"\r\n" + delimiter, head + 2)
        yield raw[at:head], slice(head + 4, end)
        at = end + 2 + len(delimiter)
    raise ValueError


def _unquoted(text: bytes) -> bytes:
    return re.sub(rb"\\(.)", rb"\1", text[1:-1]) if text.startswith(b'"') else text
