"""Structured output inside vLLM with Penstock's grammars.

API servers send llguidance's own texts, validated. vLLM's backend for llguidance would take them for Lark or
GBNF and wrap them once more, so this one compiles them as they are.
"""

import os
from typing import Any

import llguidance
from vllm.v1.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar


class LlguidanceBackend(GuidanceBackend):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """vLLM's backend for llguidance, for grammars that need no translation."""

    def compile_grammar(
        self, request_type: Any, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> Any:
        """Raises ValueError for a grammar that llguidance refuses; vLLM ends its request with an error."""
        level = int(os.environ.get("LLGUIDANCE_LOG_LEVEL", "0"))
        matcher = llguidance.LLMatcher(self.ll_tokenizer, grammar_spec, log_level=level)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return GuidanceGrammar(ll_matcher=matcher, ll_tokenizer=self.ll_tokenizer, vocab_size=self.vocab_size)


def make_backend(config: Any, tokenizer: Any) -> LlguidanceBackend:
    return LlguidanceBackend(config, tokenizer=tokenizer, vocab_size=config.model_config.get_vocab_size())
