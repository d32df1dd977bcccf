"""``penstock serve``: runs the supervisor, which starts all other processes."""

from __future__ import annotations

from penstock.cli.command import Command
from penstock.config.origins import Origins
from penstock.config.serve import ServeConfig


def run(config: ServeConfig, origins: Origins) -> int:
    """Serves until SIGINT or SIGTERM; returns the supervisor's exit code."""
    from penstock.supervisor.main import serve

    return serve(config, origins)


COMMAND = Command(
    ("serve",),
    "Serve a model over the OpenAI HTTP API. Put MODEL before options that take several values.",
    ServeConfig,
    run,
    handles_signals=True,
    examples=(
        ("penstock serve", "the bundled demo model, on http://127.0.0.1:8000"),
        ("penstock serve Qwen/Qwen3-0.6B --port 9000", "a model of Hugging Face's hub"),
        ("penstock serve DIR --host 0.0.0.0 --api-key-file keys", "for other machines"),
        ("penstock serve MODEL --engine vllm -- --tensor-parallel-size 2", "vLLM's engine"),
    ),
    replaces_servers=True,
)
