"""What is here for those who ask for a route that is not: the route that they mean, or those of their API."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile

from penstock.http.errors import ApiError

_PAUSE = 'POST /pause {"mode": …}: abort, wait, or keep, which is in_place'
_FROM_FILE = 'POST /update_weights {"path": …, "weight_version": …}'
_FROM_TRAINER = (
    "POST /update_weights, one call for all tensors, of a file, a broadcast by gloo, or vLLM's update_info"
)
_JOIN = "POST /init_weight_transfer, for broadcasts by gloo"
_ABORT = 'POST /abort_requests {"request_ids": […]}, {"prefix": …} or {"all": true}'
_VERSION = "GET /weight_version; POST /update_weights sets it"

OTHER_ROUTES: Mapping[str, str] = {
    "/pause_generation": _PAUSE,
    "/continue_generation": "POST /resume",
    "/update_weights_from_disk": _FROM_FILE,
    "/reload_weights": _FROM_FILE,
    "/update_weights_from_tensor": _FROM_TRAINER,
    "/update_weights_from_distributed": _FROM_TRAINER,
    "/update_weights_from_ipc": _FROM_TRAINER,
    "/start_weight_update": _FROM_TRAINER,
    "/finish_weight_update": _FROM_TRAINER,
    "/update_named_param": _FROM_TRAINER,
    "/init_weights_update_group": _JOIN,
    "/init_communicator": _JOIN,
    "/get_weight_version": _VERSION,
    "/update_weight_version": _VERSION,
    "/weights_checker": "GET /weights_checksum",
    "/abort_request": _ABORT,
    "/release_memory_occupation": "POST /sleep",
    "/resume_memory_occupation": "POST /wake_up",
    "/model_info": "GET /v1/models",
    "/get_model_info": "GET /v1/models",
    "/info": "GET /v1/models",
    "/server_info": "GET /status",
    "/get_server_info": "GET /status",
    "/get_world_size": "GET /status, which has the engines",
    "/get_load": "GET /load",
    "/health_generate": "GET /ready",
}
"""What SGLang, vLLM, TEI and TRL call the routes that control or describe a server, and what does it here.

These are no other names of the routes here: their bodies and replies differ, and so does what they do to
requests. SGLang, for instance, holds new requests while it is paused.
"""

_OPENAI = "OpenAI"
_APIS = {"/v1/messages": "Anthropic", "/v1beta/": "Gemini", "/api/": "Ollama", "/v1/": _OPENAI}
"""Whose the routes are that begin so; the first that fits counts."""
_NAMES = ", ".join(sorted({*_APIS.values(), "Cohere", "TEI"}))
_MAX_PATH = 200
"""Characters of a path that are read and shown."""
_MAX_ROUTES = 6
"""Routes of its API that a client is told of."""
_LIKE = 0.8
"""How similar a path is to a route that it misspells. Those that OpenAI has and are not served here are at
most 0.75 like any."""
_version = re.compile("/(?:v1|v1beta|api)(?=/)").match


def route_meant(path: str) -> str:
    """The route here that does what ``path`` does at another server, as the rest of a message; empty: there
    is none, or it is unknown."""
    here = OTHER_ROUTES.get(path.rstrip("/"))
    return f" Here it is {here}." if here else ""


def without_slash(path: str) -> str:
    """The path without slashes at its end; the root stays."""
    return path.rstrip("/") or "/"


def nearest_routes(path: str, routes: Sequence[str], spelled: Iterable[str] = ()) -> list[str]:
    """The routes that a client means by ``path``, if its base URL lacks the part that all routes of its API
    have, such as /v1, has it twice, has a whole route or the model; or the one below it; or else the one of
    ``spelled`` that is like it."""
    path = without_slash(path[:_MAX_PATH])
    fits = {route: _fit(path, route) for route in routes}
    best = max(fits.values(), default=(False, 0))
    below = [route for route in routes if path.count("/") > 1 and route.startswith(f"{path}/")]
    if below and not best[0]:
        return [min(below, key=len)]
    if best[1]:
        return [route for route, fit in fits.items() if fit == best]
    return difflib.get_close_matches(path, list(spelled), n=1, cutoff=_LIKE)


def _fit(path: str, route: str) -> tuple[bool, int]:
    """Whether the path ends with the whole route, and with how much of it as a client adds to a base URL. One
    word, as messages, says little where the path is of another API."""
    found = _version(route)
    name = route[found.end() if found else 0 :]
    if "{" in name:
        name = name.rpartition("}")[2]
    if len(name) < 2 or not path.endswith(name):
        return False, 0
    whole = path.endswith(route)
    if not whole and name.count("/") < 2 and len({_api_of(path), _api_of(route), ""}) > 2:
        return False, 0
    return whole, len(name)


def unknown_route(
    path: str, routes: Iterable[str], listed: Callable[[str], bool], client: str = ""
) -> ApiError:
    """404 for a path that is no route. ``listed``: whether a client that means none of the ``routes`` is told
    of one. ``client``: a route of the API whose client asks; empty: the path tells."""
    path = path[:_MAX_PATH]
    if hint := route_meant(path):
        return ApiError(404, f"No route {path}.{hint}")
    api = _api_of(client) or _api_of(path) or _OPENAI
    known = sorted(routes, key=lambda route: _api_of(route) != api)
    there = [route for route in known if listed(route)]
    meant = nearest_routes(path, known, [route for route in there if _api_of(route) in (api, "")])
    api = next(filter(None, map(_api_of, meant)), api)
    parts = path.split("/")
    near = sorted(
        (route for route in there if _api_of(route) == api),
        key=lambda route: (-_shared(parts, route.split("/")), route.count("/")),
    )
    hint = f" Did you mean {' or '.join(meant)}?" if meant else ""
    of_api = f"of {api}'s it has {', '.join(near[:_MAX_ROUTES]) or 'none'}"
    return ApiError(
        404,
        f"No route {path}.{hint} This server has the APIs of {_NAMES}; "
        f"{of_api}; GET /openapi.json lists all routes.",
    )


def _api_of(path: str) -> str:
    """Whose API a path is of; empty: none that is known."""
    return next((api for start, api in _APIS.items() if path.startswith(start)), "")


def _shared(parts: Sequence[str], others: Sequence[str]) -> int:
    """How many first parts two paths have in common."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(parts, others, strict=False))))
