"""Models that the torch engine does not run, and why. Imports no torch, for the supervisor to tell."""

from __future__ import annotations

from typing import NamedTuple


class Refusal(NamedTuple):
    """``why`` the model is not run, as the rest of a sentence about it; ``vllm``: vLLM's engine serves its
    text."""

    why: str
    vllm: bool = True


_KINDS: dict[str, Refusal] = {
    "falcon_h1 falcon_mamba bailing_hybrid granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 "
    "nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_text qwen3_next zamba2": Refusal(
        "layers of it keep a recurrent state, which the engine's cache of keys and values does not hold"
    ),
    "aya_vision bamba fuyu hymba minimax minimax_text_01 mllama phi4_multimodal phi4flash plamo2 "
    "recurrent_gemma rwkv rwkv5 rwkv6 rwkv6qwen2 rwkv7 xlstm zamba": Refusal(
        "it has a recurrent state, or images or sound, and vLLM has no definition of it either", vllm=False
    ),
    "deepseek_v32 deepseek_v4 glm_moe_dsa minicpm_sala": Refusal(
        "its sparse attention chooses tokens by an index, which the engine's cache does not hold"
    ),
    "aria blip-2 chameleon cohere2_vision deepseek_ocr deepseek_vl_v2 ernie4_5_moe_vl ernie4_5_vl_moe "
    "gemma3n glm46v glm4v glm4v_moe hunyuan_vl idefics2 internvl internvl_chat kimi_k25 kimi_vl "
    "lfm2_vl llava_onevision minicpmo minicpmv molmo molmo2 ovis2 paddleocr_vl paligemma "
    "phi3_v phi4mm pixtral qwen2_5_omni qwen2_audio qwen3_omni_moe qwen3_vl "
    "qwen3_vl_moe step3_vl ultravox voxtral": Refusal(
        "it takes images or sound besides text; the engine runs language models alone, and Penstock serves "
        "the text of others with vLLM's engine"
    ),
    "clip dinov2 hubert siglip siglip2 vit wav2vec2": Refusal(
        "it is an encoder of images or sound; the engine makes vectors of text alone", vllm=False
    ),
    "deberta deberta-v2 funnel roformer": Refusal(
        "its attention has a part for the distance of two tokens, which the engine does not compute",
        vllm=False,
    ),
    "big_bird longformer": Refusal(
        "its attention leaves out most pairs of tokens, which the engine does not", vllm=False
    ),
    "bart bigbird_pegasus blenderbot encoder-decoder florence2 led m2m_100 marian mbart moonshine mt5 "
    "nllb-moe pegasus prophetnet seamless_m4t seamless_m4t_v2 speech_to_text t5 t5gemma t5gemma2 trocr udop "
    "umt5 vision-encoder-decoder whisper": Refusal(
        "it is an encoder with a decoder; Penstock serves models that are one of them", vllm=False
    ),
}
REFUSED_MODELS = {kind: refusal for kinds, refusal in _KINDS.items() for kind in kinds.split()}
"""By model_type of config.json. One that the engine learns to run leaves this list."""

QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files beside config.json in which some programs describe quantized weights."""
