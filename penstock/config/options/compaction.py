"""Options of compaction: summaries in the place of conversations."""

from __future__ import annotations

from typing import Annotated

from penstock.config.describe import option, option_group


@option_group
class CompactionOptions:
    """Options of compaction."""

    compaction_prompt_file: Annotated[
        str | None,
        option(
            "File with the text that asks the model for the summary of a conversation. Default: one for the "
            "work of agents: goal, decisions, files and state, results, next steps.",
            "Responses",
            metavar="FILE",
        ),
    ] = None
    seal_key_file: Annotated[
        str | None,
        option(
            "File with a secret of at least 32 bytes, which seals the summaries that clients keep. Servers "
            "of several hosts need the same. Default: a secret that is kept beside the stored responses.",
            "Responses",
            metavar="FILE",
        ),
    ] = None
