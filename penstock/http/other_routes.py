"""What SGLang, vLLM and TRL call the routes with which a server is controlled, and what does it here.

These are no other names of the routes here: their bodies and replies differ, and so does what they do to
requests. SGLang, for instance, holds new requests while it is paused.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    "/server_info": "GET /status",
    "/get_server_info": "GET /status",
    "/get_world_size": "GET /status, which has the engines",
    "/get_load": "GET /load",
    "/health_generate": "GET /ready",
}


def route_meant(path: str) -> str:
    """The route here that does what ``path`` does at another server, as the rest of a message; empty: there
    is none, or it is unknown."""
    here = OTHER_ROUTES.get(path.rstrip("/"))
    return f" Here it is {here}." if here else ""
