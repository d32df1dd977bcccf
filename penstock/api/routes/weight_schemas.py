"""The bodies of ``POST /update_weights``, ``/init_weight_transfer`` and ``/init_weight_transfer_engine``."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.wire.weights.desired import MAX_SOURCES, CacheMode, StreamsMode, WeightVersion
from penstock.wire.weights.transfer import STORED_TYPES

MAX_DIMENSIONS = 8


class BroadcastManifest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Tensors that rank 0 of the trainer's group broadcasts one after the other."""

    names: Annotated[
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=512)]], Meta(min_length=1)],
        Meta(description="Their names, as in the checkpoint, in the order of the broadcasts."),
    ]
    dtypes: Annotated[list[str], Meta(description=f"The type of each: {', '.join(STORED_TYPES)}.")]
    shapes: Annotated[
        list[Annotated[list[Annotated[int, Meta(ge=1, le=1 << 40)]], Meta(max_length=MAX_DIMENSIONS)]],
        Meta(description="The shape of each."),
    ]


class InitWeightTransferRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /init_weight_transfer: the group that the server's receiver of broadcasts joins."""

    master_address: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=255,
            pattern="^[A-Za-z0-9.:_-]*$",
            description="Where torch.distributed's rank 0 listens.",
        ),
    ]
    master_port: Annotated[int, Meta(ge=1, le=65535)]
    rank: Annotated[int, Meta(ge=1, le=1 << 16, description="The receiver's rank; rank 0 broadcasts.")] = 1
    world_size: Annotated[int, Meta(ge=2, le=1 << 16, description="Members of the group.")] = 2


class InitWeightTransferEngineRequest(msgspec.Struct, kw_only=True):
    """POST /init_weight_transfer_engine."""

    init_info: Annotated[
        dict[str, Any],
        Meta(description="What the weight transfer engine of vLLM's workers needs to join a trainer."),
    ]


class UpdateWeightsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /update_weights."""

    weight_version: Annotated[
        WeightVersion, Meta(description="Name of the weights, 1 to 64 printable ASCII characters.")
    ]
    path: Annotated[
        str | None,
        Meta(
            description="Absolute path of a directory with safetensors files, or of one such file, the same "
            "on every host; also below /dev/shm."
        ),
    ] = None
    paths: Annotated[
        Annotated[list[str], Meta(min_length=1, max_length=MAX_SOURCES)] | None,
        Meta(description="Several of them, in place of path."),
    ] = None
    broadcast: Annotated[
        BroadcastManifest | None,
        Meta(
            description="In place of path: tensors that rank 0 of a trainer's group broadcasts by gloo; "
            "/init_weight_transfer has joined it."
        ),
    ] = None
    update_info: Annotated[
        dict[str, Any] | list[dict[str, Any]] | None,
        Meta(
            description="In place of path: what vLLM's workers need to receive tensors from a trainer, or a "
            "list with that of each worker; /init_weight_transfer_engine has joined it."
        ),
    ] = None
    digests: Annotated[
        Annotated[list[str], Meta(min_length=1, max_length=MAX_SOURCES)] | None,
        Meta(
            description="Those of path or paths, as the reply to an earlier update has them: other files are "
            "refused."
        ),
    ] = None
    tensors: Annotated[
        Annotated[list[str], Meta(min_length=1)] | None,
        Meta(description="Names of the tensors to take from path; absent: all that are there."),
    ] = None
    whole: Annotated[
        bool | None,
        Meta(
            description="Whether the model is replaced as a whole, otherwise the tensors that there are; by "
            "default it is, unless tensors are named."
        ),
    ] = None
    streams: Annotated[
        StreamsMode,
        Meta(
            description="What becomes of streams that run: keep has them go on with the new weights, wait "
            "finish first, abort ends them with what they have."
        ),
    ] = "keep"
    cache: Annotated[
        CacheMode,
        Meta(
            description="drop: the prefix cache is emptied, and streams that go on compute their KV cache "
            "again; keep: both are used as they are."
        ),
    ] = "drop"
