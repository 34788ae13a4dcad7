"""Configs of tiny random models, one for each row of the table in docs/models.md."""

from collections.abc import Callable, Mapping

from transformers import AutoConfig, PreTrainedConfig

TINY: Mapping[str, object] = {
    "vocab_size": 258,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS: Mapping[str, object] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LLAMA3: Mapping[str, object] = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VISION: Mapping[str, object] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
LONGROPE: Mapping[str, object] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.5] * 12,
    "long_factor": [4.0] * 12,
    "original_max_position_embeddings": 128,
    "partial_rotary_factor": 0.75,
}
MROPE: Mapping[str, object] = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "mrope_section": [4, 6, 6],
}

LATENTS: Mapping[str, object] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}
ROUTED: Mapping[str, object] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
YARN: Mapping[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}


def _of(kind: str, **settings: object) -> Callable[[], PreTrainedConfig]:
    return lambda: AutoConfig.for_model(kind, **{**TINY, **settings})


def _with_text(kind: str, text: str, **settings: object) -> Callable[[], PreTrainedConfig]:
    """A multimodal checkpoint whose text part has these settings."""
    inner = {"model_type": text, **TINY, **settings}
    return lambda: AutoConfig.for_model(
        kind, text_config=inner, vision_config=dict(VISION), tie_word_embeddings=False
    )


FAMILIES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "Llama 2": _of("llama"),
    "Llama 3.x": _of("llama", rope_parameters=dict(LLAMA3), tie_word_embeddings=True),
    "Llama, dynamic RoPE": _of(
        "llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
    "Qwen2": _of("qwen2"),
    "Qwen3": _of("qwen3", head_dim=32),
    "Mistral": _of("mistral", sliding_window=24),
    "Ministral 3": _of("ministral3", head_dim=32),
    "Gemma": _of("gemma", head_dim=32),
    "Gemma 2": _of("gemma2", head_dim=32, sliding_window=24, query_pre_attn_scalar=32),
    "Gemma 3 text": _of("gemma3_text", head_dim=32, sliding_window=24, sliding_window_pattern=2),
    "Gemma 3": _with_text(
        "gemma3", "gemma3_text", head_dim=32, sliding_window=24, sliding_window_pattern=2
    ),
    "LLaVA": lambda: AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", **TINY},
        vision_config={
            "model_type": "clip_vision_model",
            **{**VISION, "num_hidden_layers": 2},
            **{"image_size": 28, "patch_size": 7, "projection_dim": 16},
        },
        image_token_id=257,
        tie_word_embeddings=False,
    ),
    "Idefics3": _with_text("idefics3", "llama"),
    "Mistral 3": _with_text("mistral3", "mistral", head_dim=32),
    "Qwen2.5-VL": _with_text("qwen2_5_vl", "qwen2_5_vl_text", rope_parameters=dict(MROPE)),
    "Qwen3-VL": _with_text("qwen3_vl", "qwen3_vl_text", head_dim=32, rope_parameters=dict(MROPE)),
    "SmolVLM": _with_text("smolvlm", "llama"),
    "Phi-3": _of("phi3"),
    "Phi-4-mini": _of("phi3", rope_parameters=dict(LONGROPE), original_max_position_embeddings=128),
    "Phi-2": _of("phi"),
    "OLMo 2": _of("olmo2"),
    "Granite": _of("granite", attention_multiplier=0.3, residual_multiplier=0.5),
    "StableLM": _of("stablelm"),
    "GLM-4": _of("glm4", head_dim=32),
    "Cohere 2": _of("cohere2", sliding_window=24),
    "SmolLM3": _of("smollm3", no_rope_layer_interval=2),
    "GPT-NeoX": _of("gpt_neox"),
    "GPT-2": lambda: AutoConfig.for_model(
        "gpt2",
        vocab_size=258,
        n_embd=128,
        n_layer=2,
        n_head=4,
        n_positions=256,
        bos_token_id=0,
        eos_token_id=1,
    ),
    "Mixtral": _of("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "Qwen3-MoE": _of("qwen3_moe", head_dim=32, **EXPERTS),
    "Llama 4": _of(
        "llama4_text",
        head_dim=32,
        attention_chunk_size=128,
        intermediate_size_mlp=96,
        num_local_experts=4,
    ),
    "DeepSeek-V2": _of("deepseek_v2", **LATENTS, **ROUTED),
    "DeepSeek-V2-Lite": _of(
        "deepseek_v2", **{**LATENTS, "q_lora_rank": None}, **ROUTED, rope_parameters=dict(YARN)
    ),
    "DeepSeek-V3": _of("deepseek_v3", **LATENTS, **ROUTED, rope_parameters=dict(YARN)),
    "GLM-4.7-Flash": _of("glm4_moe_lite", **LATENTS, **ROUTED),
    "MiniCPM3": _of("minicpm3", **LATENTS),
    "Youtu-LLM": _of("youtu", **LATENTS),
    "DeepSeek-V3.2": _of("deepseek_v32", **LATENTS, **ROUTED),
    "Falcon": lambda: AutoConfig.for_model(
        "falcon", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=258
    ),
    "GPT-OSS": _of("gpt_oss", head_dim=32, num_local_experts=4, sliding_window=24),
    "Gemma 4 text": _of("gemma4_text", head_dim=32),
    "Doge": _of("doge"),
    "DiffLlama": _of("diffllama"),
    "Falcon-H1": _of("falcon_h1"),
    "Qwen3-Next": _of("qwen3_next", head_dim=32, **EXPERTS),
    "LFM2": _of("lfm2", layer_types=["conv", "full_attention"]),
    "Mamba": lambda: AutoConfig.for_model(
        "mamba", vocab_size=258, hidden_size=32, num_hidden_layers=2
    ),
    "BLOOM": lambda: AutoConfig.for_model(
        "bloom", vocab_size=258, hidden_size=32, n_layer=2, n_head=2
    ),
}
