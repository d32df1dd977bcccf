"""What differs from transformers under the chat templates of real models, and why."""

from __future__ import annotations

SKIPPED = {
    "llama_cpp_python/fireworks-ai-llama-3-firefunction-v2": "needs variables of its own: functions",
    "llama_cpp_python/llama-cpp-deepseek-r1": "writes tools with a filter that only llama.cpp has",
}
"""Templates that transformers cannot render either, with the reason."""

_SYSTEM = "shows one system message, the last: a later one, which would replace it, moves to the user's turn"
_DROPPED = "shows text beside calls until there is an answer: a message of its own keeps it"
_FIRST = "shows text beside the first call of a conversation alone: it is a message of its own"

_CALL_LAST = "leaves out calls that no result follows"

KNOWN: dict[str, dict[str, str]] = {
    "llama_cpp_python/deepseek-ai-DeepSeek-R1-Distill-Llama-8B": {"different": _SYSTEM},
    "llama_cpp_python/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": {"different": _SYSTEM},
    "llama_cpp_python/llama-cpp-rwkv-world": {"different": _SYSTEM},
    "trl/deepseek_r1_distill": {"different": _SYSTEM},
    "trl/deepseek_r1_distill_training": {"different": _SYSTEM},
    "llama_cpp_python/openai-gpt-oss-120b": {"different": _DROPPED},
    "trl/gptoss_training": {"different": _DROPPED},
    "llama_cpp_python/NVIDIA-Nemotron-Nano-v2": {"lost": _CALL_LAST},
    "trl/deepseekv3": {"different": _FIRST},
    "trl/deepseekv3_training": {"different": _FIRST},
}
"""By template, the kinds of differences with their reasons."""

TAKES_ONE_CALL = {
    "axolotl/llama3_2_vision",
    "llama_cpp_python/meta-llama-Llama-3.1-8B-Instruct",
    "llama_cpp_python/meta-llama-Llama-3.2-3B-Instruct",
}
"""Templates that refuse several calls in a message."""
SPELLED_OTHERWISE = {
    "llama_cpp_python/MiniMax-M3": "spells null and empty objects within arguments as empty elements",
}
"""Templates whose calls do not say all of their arguments, with the reason."""
