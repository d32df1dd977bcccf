"""The formats that docs/models.md names are those that the families' own templates get."""

from __future__ import annotations

import pytest

from tests.templates.archives import PACKAGES, real_templates

if not PACKAGES.exists():
    pytest.skip('the packages are missing: run "make test-templates"', allow_module_level=True)

from penstock.generation.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from penstock.generation.parsers.registry import HARMONY_REASONING, HARMONY_TOOLS, OutputFormat, output_format
from tests.model_table import read_models

FAMILIES = {
    "apertus": "Apertus-8B-Instruct",
    "bailing_hybrid": "inclusionai-ling-3.0-flash",
    "cohere": "CohereForAI-c4ai-command-r-plus-tool_use",
    "cohere2": "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "cohere2_moe": "Cohere2MoE",
    "deepseek_v3": "llama-cpp-deepseek-r1 deepseek-ai-DeepSeek-V3.1",
    "deepseek_v32": "deepseek-ai-DeepSeek-V3.2",
    "deepseek_v4": "deepseek-ai-DeepSeek-V4",
    "gemma2": "google-gemma-2-2b-it",
    "gemma4": "google-gemma-4-31B-it",
    "glm4_moe": "GLM-4.6",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "gpt_oss": "openai-gpt-oss-120b",
    "granite": "ibm-granite-granite-3.3-2B-Instruct",
    "granitemoehybrid": "ibm-granite-granite-4.0",
    "hy_v3": "tencent-Hy3",
    "kimi_k2": "Kimi-K2-Instruct Kimi-K2-Thinking",
    "kimi_k3": "Kimi-K3",
    "laguna": "poolside-Laguna-XS.2",
    "lfm2": "LFM2.5-Instruct",
    "lfm2_moe": "LFM2-8B-A1B LFM2.5-8B-A1B",
    "llama": "meta-llama-Llama-3.1-8B-Instruct",
    "minimax_m2": "MiniMax-M2",
    "minimax_m3_vl": "MiniMax-M3",
    "mistral3": "Mistral-Small-3.2-24B-Instruct-2506 mistralai-Ministral-3-14B-Reasoning-2512",
    "muse_glimmer": "muse-glimmer",
    "nemotron_h": "NVIDIA-Nemotron-Nano-v2 NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "qwen2": "Qwen-QwQ-32B",
    "qwen3": "Qwen-Qwen3-0.6B",
    "qwen3_5": "Qwen3.5-4B",
    "qwen3_moe": "Qwen-Qwen3-0.6B Qwen3-Coder",
    "smollm3": "HuggingFaceTB-SmolLM3-3B",
    "solar_open": "upstage-Solar-Open-100B",
    "step3p5": "StepFun3.5-Flash",
}
"""Templates of llama.cpp by model_type."""
MODELS, TEMPLATES = read_models(), real_templates()


@pytest.mark.parametrize("kind", FAMILIES)
def test_formats_of_a_family(kind: str) -> None:
    given = [TEMPLATES[f"llama_cpp_python/{name}"] for name in FAMILIES[kind].split()]
    found = [output_format("auto", "auto", template, kind) for template in given]
    tools, reasoning = MODELS[kind].formats()
    if tools == {HARMONY_TOOLS}:
        assert reasoning == {HARMONY_REASONING}
        assert found == [OutputFormat(harmony=True)]
        return
    assert {each.tools for each in found} - {None} == {TOOL_FORMATS[name] for name in tools}
    assert {each.reasoning for each in found} - {None} == {REASONING_FORMATS[name] for name in reasoning}
