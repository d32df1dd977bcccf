"""The media worker process: fetches, decodes and preprocesses pictures for the API servers of its host.

The supervisor starts it, with its configuration over the control channel. It owns a Unix socket in the run
directory, reads requests of API servers there, and writes pages to the host's store and answers to the API
servers. Its loop fetches; one thread decodes and preprocesses, a picture at a time. A picture that takes too
long there is refused and ends the process: the thread cannot be ended alone. It ends on Stop, or when the
supervisor is gone; API servers then send what is left to another worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os

import msgspec
import uvloop

from penstock.config.rules.allowed_hosts import AllowedHosts
from penstock.config.serve import ServeConfig
from penstock.exit_codes import EXIT_FAILED, EXIT_OK
from penstock.logging_setup import RateLimitedLog
from penstock.media.connection import MediaConnections
from penstock.media.fetch import FetchPolicy
from penstock.media.preparation import PicturePreparer
from penstock.media.prepared import PictureProcessor
from penstock.media.store import MediaStore
from penstock.wire.channel import ControlChannel, SupervisorGone
from penstock.wire.control import HEARTBEAT_INTERVAL_S, Launch, Stop
from penstock.wire.media.worker import media_socket

log = logging.getLogger(__name__)

NICENESS = 10
"""A media worker takes all of a core when it can. Where cores are few, text goes first: events of streams
wait for no picture."""


def run(control: ControlChannel) -> int:
    """Run the media worker of ``control.launch``; returns the exit code. Raises SupervisorGone, ConfigError,
    and OSError for a store or socket that cannot be used."""
    control.progress("loading the processor")
    os.nice(NICENESS)
    launch = control.launch
    assert launch.media_dir is not None
    processor = load_processor(launch)
    store = MediaStore(launch.media_dir, launch.media_capacity)
    store.describe(msgspec.msgpack.encode(processor.description))
    preparer = PicturePreparer(processor, store, launch.config, _policy(launch.config))
    code: int = uvloop.run(_serve(control, preparer))
    return code


def load_processor(launch: Launch) -> PictureProcessor:
    """The synthetic engine's, vLLM's, or the model's own. Raises ConfigError."""
    config = launch.config
    if config.engine == "synthetic":
        from penstock.media.synthetic_processor import SyntheticProcessor

        return SyntheticProcessor(launch.tokenizer_dir, config.synthetic_image_tokens)
    if launch.media_arguments:
        from penstock.media.vllm_processor import VllmProcessor

        return VllmProcessor(launch.media_arguments)
    from penstock.media.processor import HfProcessor, go_without_torch

    go_without_torch()
    return HfProcessor(launch.model_dir, config.processor_kwargs)


def _policy(config: ServeConfig) -> FetchPolicy:
    hosts = AllowedHosts(config.allowed_media_domains or ())
    return FetchPolicy(
        hosts, config.allowed_local_media_path or "", config.media_max_bytes, config.media_fetch_timeout
    )


async def _serve(control: ControlChannel, preparer: PicturePreparer) -> int:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def end(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    def on_command() -> None:
        try:
            if any(isinstance(command, Stop) for command in control.receive()):
                end(EXIT_OK)
        except SupervisorGone as error:
            if not ended.done():
                ended.set_exception(error)

    connections = MediaConnections(preparer, RateLimitedLog(log))
    path = media_socket(control.launch.run_dir, control.launch.index)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of a killed predecessor
    server = await asyncio.start_unix_server(connections.serve, path)
    loop.add_reader(control.fileno(), on_command)
    preparer.on_hung = lambda: end(EXIT_FAILED)
    control.ready({"processor": preparer.processor.description.processor})
    try:
        while not ended.done():
            with contextlib.suppress(SupervisorGone):  # on_command sees it, too
                control.heartbeat()
            await asyncio.wait([ended], timeout=HEARTBEAT_INTERVAL_S)
        code = ended.result()
    finally:
        loop.remove_reader(control.fileno())
        server.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    if code == EXIT_FAILED:
        logging.shutdown()
        os._exit(code)  # its thread goes on
    return code
