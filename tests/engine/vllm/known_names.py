"""The flags and variables of the installed vLLM, as Penstock's lists of them.

``python -m tests.engine.vllm.known_names`` writes both lists into the package, where vLLM is installed::

    penstock/config/other_servers/vllm_flags.py
    penstock/config/other_servers/vllm_variables.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from penstock.config.other_servers.known_flag import Default

PACKAGE = Path(__file__).parents[3] / "penstock" / "config" / "other_servers"
_PREFACE = '''\
"""{what} of vLLM {version}.

Written by ``python -m tests.engine.vllm.known_names`` where vLLM is installed. Do not edit.
"""

from __future__ import annotations

'''


def flags() -> dict[str, tuple[str, Default, bool, tuple[str, ...]]]:
    """Values, default, whether the engine has it, and other names of each flag of ``vllm serve``."""
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
            found[long] = (_values(action), _default(action.default), long in engine, others)
    return dict(sorted(found.items()))


def variables() -> list[str]:
    """The names of the variables that vLLM reads."""
    from vllm.envs import environment_variables

    return sorted(name for name in environment_variables if name.startswith("VLLM_"))


def flags_module() -> str:
    """The text of the list of flags."""
    lines = [f"    {json.dumps(name)}: {_literal(flag)}," for name, flag in flags().items()]
    head = "from penstock.config.other_servers.known_flag import Default\n\n"
    table = "\n".join(["FLAGS: dict[str, tuple[str, Default, bool, tuple[str, ...]]] = {", *lines, "}\n"])
    doc = (
        '"""Number of values (0, 1, ? or +), default, whether it is the engine\'s, other names; by flag."""\n'
    )
    return _preface("Flags") + head + table + doc


def variables_module() -> str:
    """The text of the list of variables."""
    names = "".join(f'        "{name}",\n' for name in variables())
    return _preface("Environment variables") + f"NAMES = frozenset(\n    {{\n{names}    }}\n)\n"


def _preface(what: str) -> str:
    from importlib.metadata import version

    from penstock.engine.vllm.versions import DISTRIBUTIONS

    for name in DISTRIBUTIONS:
        try:
            return _PREFACE.format(what=what, version=version(name))
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


def _literal(flag: tuple[str, Default, bool, tuple[str, ...]]) -> str:
    values, default, engine, others = flag
    written = json.dumps(default) if isinstance(default, str) else repr(default)
    names = "".join(f"{json.dumps(name)}, " for name in others)
    names = names[:-1] if len(others) == 1 else names.removesuffix(", ")
    return f"({json.dumps(values)}, {written}, {engine}, ({names}))"


if __name__ == "__main__":
    (PACKAGE / "vllm_flags.py").write_text(flags_module())
    (PACKAGE / "vllm_variables.py").write_text(variables_module())
