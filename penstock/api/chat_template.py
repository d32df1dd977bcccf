"""Conversations to prompt text, by the model's Jinja chat template."""

import os
from typing import Any


class ChatTemplate:
    """A compiled chat template and the special tokens it may name."""

    @classmethod
    def load(
        cls, directory: str | os.PathLike[str], override_file: str | None = None
    ) -> "ChatTemplate | None":
        """The template of the model in ``directory``, or of ``override_file``; None when there is none.

        Raises ValueError when the template cannot be read or compiled.
        """
        raise NotImplementedError

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        template: str | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt. Raises ApiError (400) with the template's message."""
        raise NotImplementedError
