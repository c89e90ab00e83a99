"""What the names of the fields of a configuration do not tell, by model type."""

from __future__ import annotations

from typing import Any

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}}
HALF_MROPE = {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
FORECAST = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "feature_size": 4}
IMAGE_TOKENS = {"vocabulary_map": {"<image>": 150, "<|extra_200|>": 151}}
WINDOWS = {"image_size": 64, "window_size": 2}  # no stage may be smaller than a window
FOUR_LAYERS = {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]}

SPECIAL: dict[str, Any] = {
    "autoformer": FORECAST,
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "chameleon": IMAGE_TOKENS,
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dpt": FOUR_LAYERS,
    "emu3": IMAGE_TOKENS,
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "intermediate_size": [128, 128],
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
        "activation_sparsity_pattern": [0.95, 0.0],
    },
    "glm4v_text": MROPE,
    "glm4v_moe_text": HALF_MROPE,
    "glm_image_text": MROPE,
    "glm_ocr_text": MROPE,
    "granitemoehybrid": {**MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "hiera": {"image_size": [32, 32], "masked_unit_size": [2, 2]},
    "informer": FORECAST,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mobilebert": {"true_hidden_size": 64, "intra_bottleneck_size": 64, "intermediate_size": 64},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "nystromformer": {"segment_means_seq_len": 12, "num_landmarks": 4},
    "paddleocr_vl_text": MROPE,
    "pvt": {"image_size": 64},
    "qwen2_vl_text": MROPE,
    "qwen2_5_vl_text": MROPE,
    "qwen2_5_omni_text": MROPE,
    "qwen2_5_omni_talker": MROPE,
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 64},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 100,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "is_decoder": True,
        "hidden_size": 64,
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [16, 48],
        "max_position_embeddings": 16,
        "num_attention_heads": 4,
        "attn_layers": ["local", "lsh"],
        "num_buckets": 2,
    },
    "step3p5": {"sliding_window": 8},
    "time_series_transformer": FORECAST,
    "wav2vec2-bert": {"vocab_size": 32},
    "xlnet": {"d_head": 16},
    "xmod": {"default_language": "en_XX"},
    "clap_audio_model": {"patch_embeds_hidden_size": 32},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "donut-swin": WINDOWS,
    "ernie4_5_vl_moe_text": {"rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]}},
    "exaone4_5_vision": {"window_size": 32},
    "glm5_next_text": {"index_topk": 16},
    "granite_speech_encoder": {"context_size": 8, "max_pos_emb": 16},
    "granite_speech_plus_encoder": {"context_size": 8, "max_pos_emb": 16},
    "lilt": {"hidden_size": 96},
    "maskformer-swin": WINDOWS,
    "mistral4": {"head_dim": 32},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "nemotron": {"num_key_value_heads": 4},
    "qwen2_5_vl_vision": {"window_size": 32},
    "swin": WINDOWS,
    "swinv2": WINDOWS,
    "xlstm": {"qk_dim_factor": 1.0},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zamba2": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "hybrid_layer_ids": [1, 3],
    },
}
