"""``penstock complete``: continue a text over HTTP."""

from __future__ import annotations

from penstock.cli import terminal
from penstock.cli.command import Command
from penstock.config.client import CompleteConfig
from penstock.config.errors import ConfigError
from penstock.config.origins import Origins


def run(config: CompleteConfig, origins: Origins) -> int:
    """Streams the continuation to standard output. 1 when the server does not complete it."""
    from penstock.client import Client, ClientError

    if config.prompt is None:
        raise ConfigError('there is no prompt: penstock complete "Once upon a time", or - for standard input')
    prompt = terminal.text_or_stdin(config.prompt)
    try:
        with Client(config.url, config.api_key, config.timeout) as client:
            model = config.model or client.model()
            answer = client.complete(model, prompt, terminal.sampling(config))
            terminal.write(answer, stats=config.stats)
    except ClientError as error:
        return terminal.report(error)
    return 0


COMMAND = Command(
    ("complete",), "Continue a text with a served model and print it as it is generated.", CompleteConfig, run
)
