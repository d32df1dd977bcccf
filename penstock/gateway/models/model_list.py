"""The gateway's own ``/v1/models``: the models of all endpoints, and the names that stand for them."""

from __future__ import annotations

import msgspec

from penstock.dialects.gemini import model_list as gemini
from penstock.dialects.messages import model_list as anthropic
from penstock.gateway.models.directory import ModelDirectory
from penstock.gateway.requests.model_field import ONE, READING
from penstock.gateway.responses.request_record import RequestRecord
from penstock.http.errors import unknown_model

_encode = msgspec.json.Encoder().encode
_DEFAULTS = {"object": "model", "created": 0, "owned_by": ""}
"""What strict clients of OpenAI's API need of every card."""
LISTS = frozenset({"/v1/models", "/models"})


def models_reply(directory: ModelDirectory, record: RequestRecord, *, google: bool) -> bytes | None:
    """The body of the reply to a request; None: it is not for a listing, or nobody has listed what it is for:
    then an endpoint answers that would get the model's requests. ``google``: in the shape of Gemini's API.
    Raises ApiError."""
    path = record.path
    if record.method not in READING or not (path in LISTS or path.startswith(ONE)):
        return None
    all_cards = directory.models()
    if not all_cards:
        return None
    cards = {name: card for name, card in all_cards.items() if record.caller.may_use(name)}
    if path in LISTS:
        if google:
            return _encode(gemini.model_list(cards.values()))
        entries = [{**_DEFAULTS, **card} for card in cards.values()]
        messages = record.messages_errors
        return _encode(anthropic.model_list(entries) if messages else {"object": "list", "data": entries})
    name = path.removeprefix(ONE)
    if not record.caller.may_use(name):
        raise unknown_model(name, sorted(cards))
    if (card := directory.card(name)) is None:
        return None
    if google:
        return _encode(gemini.model_entry(card))
    return _encode(anthropic.model_entry(card) if record.messages_errors else {**_DEFAULTS, **card})
