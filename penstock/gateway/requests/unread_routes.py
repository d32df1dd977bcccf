"""Routes that generate although the gateway reads neither the model nor the tokens of their requests.

They are model servers' own APIs, whose fields differ (``model`` may mean nothing, and a stream may repeat all
that was generated before), batches, and whatever is added to the APIs that the gateway knows. A key that has
limits which could not be held there is refused.
"""

from __future__ import annotations

from penstock.gateway.requests.caller import Caller
from penstock.gateway.requests.request_body import GENERATION_PATHS
from penstock.http.errors import ApiError

_OWN = frozenset(
    {
        "/completion",
        "/generate",
        "/generate_stream",
        "/inference/v1/generate",
        "/infill",
        "/invocations",
    }
)
"""Routes of SGLang, TGI, llama.cpp, vLLM and SageMaker."""
_FAMILIES = frozenset({"batches", "chat", "completions", "messages", "realtime", "responses"})
_BATCHES = frozenset({"batch", "batches"})
_HARMLESS = frozenset({"cancel", "count_tokens", "derender", "input_tokens", "render"})
"""What does not generate among the routes below a family."""


def is_unread(method: str, route: str) -> bool:
    """Whether a request generates unread."""
    if method in ("GET", "HEAD", "OPTIONS", "DELETE") or route in GENERATION_PATHS:
        return False
    if route in _OWN:
        return True
    _, root, family, *_ = f"{route}//".split("/", 3)
    return root == "v1" and family in _FAMILIES and route.rpartition("/")[2] not in _HARMLESS


def check_unread(caller: Caller, method: str, route: str) -> None:
    """Raises ApiError for a caller that has limits which the gateway cannot hold on this route."""
    if not (caller.models or caller.is_limited) or not is_unread(method, route):
        return
    is_batch = not _BATCHES.isdisjoint(route.split("/"))
    limits = ["models"] if caller.models else []
    limits += [each.name for each in caller.budgets if is_batch or each.unit != "requests"]
    if is_batch and caller.most_concurrent is not None:
        limits.append("concurrent-requests")
    if limits:
        raise ApiError(
            403,
            f"The key {caller.name!r} has {limits[0]}, which cannot be held on {method} {route[:200]}, as "
            f"the gateway does not read what is generated there. Use {', '.join(sorted(GENERATION_PATHS))}.",
            code="route_not_allowed",
        )
