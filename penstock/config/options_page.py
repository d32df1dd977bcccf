"""The documentation page of all options."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.config.introspect import Option, options_of

PREFACE = """\
# Options

<!-- Written by `penstock docs-options docs/options.md` from penstock/config. Do not edit. -->

Every option can be set in four places. The first one that sets it wins:

1. on the command line: `--max-num-seqs 256` (underscores work as dashes; a switch is `--x` or `--no-x`)
2. in the environment: `PENSTOCK_MAX_NUM_SEQS=256` (lists: `a,b` or a JSON array; switches: `true`, `false`)
3. in a YAML file that `--config FILE` or `PENSTOCK_CONFIG` names: `max-num-seqs: 256` (or `max_num_seqs`)
4. the default

An unknown flag or key, a value out of range, and an option that has no effect beside the others are errors,
with exit code 2; the synthetic engine takes what other engines need (`--dtype`, `--gpu-memory-utilization`
…), so that it can stand in for them. The environment, and a file that `PENSTOCK_CONFIG` names, may hold
options of several commands; a file given with `--config` only those of the command it is given to. An
unknown `PENSTOCK_` variable is a warning; it is an error if it looks like a misspelled `PENSTOCK_API_KEY`,
without which anybody could use the server. Variables that Kubernetes sets for services
(`PENSTOCK_PICKER_PORT=tcp://…`) are ignored.

`penstock serve` knows the flags and variables of `vllm serve`: [what they are here](from-vllm.md).
`VLLM_API_KEY` sets `--api-key` of every command, if nothing above does.

Integers take suffixes: `k`, `m`, `g` count in thousands (`32k` is 32,000); `K`, `M`, `G`, also written `Ki`,
`Mi`, `Gi`, in 1,024s (`32Ki` is 32,768). Flags of lists take several values and may be repeated:
`--served-model-name a b`; a positional argument stands before them, or after `--`.
"""


def options_page(commands: Iterable[tuple[str, type]]) -> str:
    """The Markdown page for pairs of command name and config. Commands without options are omitted."""
    sections = [PREFACE]
    for name, config in commands:
        options = options_of(config)
        if options:
            sections.append(f"## penstock {name}\n")
            for group in dict.fromkeys(option.group for option in options):
                sections.append(_table(group, (option for option in options if option.group == group)))
    return "\n".join(sections)


def _table(group: str, options: Iterable[Option]) -> str:
    lines = [f"### {group}\n", "| option | default | allowed | |", "| --- | --- | --- | --- |"]
    for option in options:
        flag = f"`{option.short}` " * bool(option.short) + f"`{option.flag}`"
        default = f"`{option.default_text}`" if option.default_text else ""
        cells = (flag, default, option.allowed, option.description)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
