"""``penstock serve``: runs the supervisor, which starts all other processes."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.command import Command
from penstock.config.origins import Origins
from penstock.config.serve import ServeConfig


def run(config: ServeConfig, origins: Origins) -> int:
    """Serve until SIGINT or SIGTERM; return the supervisor's exit code."""
    if config.print_engine_command:
        from penstock.engine.attach.launch.serve_command import attach_commands

        print("\n".join(attach_commands(config, _model(config), sorted(origins))))
        return 0
    from penstock.metrics.gc_policy import frozen

    with frozen():
        from penstock.supervisor.main import serve

    return serve(config, origins)


def _model(config: ServeConfig) -> str:
    """The model as engines elsewhere are to find it."""
    path = Path(str(config.model)).expanduser()
    return str(path.absolute()) if path.is_dir() else str(config.model)


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
        ("penstock serve MODEL --attach 127.0.0.1:29550", "engines of vllm serve --headless"),
    ),
    replaces_servers=True,
)
