"""Thinking of requests and replies: what the chat template is told, and the signatures of blocks."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.dialects.messages.request_schema import CountTokensRequest
from penstock.generation.request.reasoning_effort import reasoning_variables
from penstock.http.errors import refused

if TYPE_CHECKING:
    from penstock.generation.request.thinking_budget import ThinkingPolicy

_ON = ("enabled", "adaptive", "between_tools")
_DIGEST, _TEXT = "penstock-d.", "penstock-t."
"""Beginnings of signatures: with a digest of the block's place, and with its text."""


class Thinking(NamedTuple):
    """What a request wants of reasoning."""

    shown: bool
    """Whether the reply has thinking blocks."""
    omitted: bool
    """Whether their text is empty."""
    variables: dict[str, Any]
    """For the chat template."""
    budget: int | None = None
    """Most tokens of thinking; None: no limit of its own."""
    warning: str | None = None
    """Why a budget is not applied."""


def parse_thinking(request: CountTokensRequest, budgets: ThinkingPolicy | None = None) -> Thinking:
    """Without the field there is no thinking, as in Anthropic's API. ``budgets``: None if another server
    replies. Raises ApiError."""
    given, config = request.thinking, request.output_config
    if given is not None and given.type not in (*_ON, "disabled"):
        raise refused(f"thinking.type must be {', '.join(_ON)} or disabled.", "thinking.type", given.type)
    shown = given is not None and given.type != "disabled"
    # Templates differ in the name of the switch.
    variables = {"enable_thinking": shown, "thinking": shown, **(request.chat_template_kwargs or {})}
    budget = warning = None
    if shown and config is not None:
        field, mapped = "output_config.effort", None
        if budgets is None:
            mapped = reasoning_variables(config.effort, field, variables)
        else:
            mapped, budget = budgets.effort(config.effort, field, variables)
        variables = mapped or {}
    if given is not None and given.type == "enabled" and given.budget_tokens is not None:
        budget = given.budget_tokens
        if budgets is None or budgets.unavailable:  # clients send it to any model
            budget, warning = None, "thinking.budget_tokens is not applied"
    omitted = shown and given is not None and given.display == "omitted"
    return Thinking(shown, omitted, variables, budget, warning)


def signature_of(message_id: str, index: int) -> str:
    """The signature of a thinking block, by its place: nobody checks it, but it must be there and differ."""
    place = f"{message_id}/{index}".encode()
    return _DIGEST + urlsafe_b64encode(blake2b(place, digest_size=24).digest()).decode()


def carrying_signature(text: str) -> str:
    """The signature of a thinking block that is sent without its text."""
    return _TEXT + urlsafe_b64encode(text.encode()).decode()


def thinking_text(text: str, signature: str) -> str:
    """The text of a thinking block that a client sends back. What other servers have signed is taken as it
    is: models read it, and nothing depends on who has written it."""
    if text or not signature.startswith(_TEXT):
        return text
    try:
        return urlsafe_b64decode(signature[len(_TEXT) :]).decode()
    except ValueError:
        return ""
