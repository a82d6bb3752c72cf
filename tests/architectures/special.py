"""Sizes of architectures whose defaults do not shrink by the names of their fields alone."""

from typing import Any

_MAP = {"vocabulary_map": {"<image>": 4, "<|extra_200|>": 5, "IMGIMGBS127Z": 6}}
_SERIES = {"prediction_length": 4, "context_length": 32}
_ROPES = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}}
SPECIAL: dict[str, dict[str, Any]] = {
    "align": {"vision_config": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320}},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    "autoformer": _SERIES,
    "informer": _SERIES,
    "time_series_transformer": _SERIES,
    "chameleon": _MAP,
    "emu3": _MAP,
    "blt": {"encoder_hash_byte_group_vocab": 500},
    "longcat_flash": {"dtype": "bfloat16"},  # its experts take no inputs that are wider than they are
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "clvp": {"decoder_config": {"vocab_size": 256}},
    "cvt": {"depth": [1, 2, 3]},
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "deepseek_ocr2": {
        "text_config": {
            "mlp_layer_types": ["dense", "sparse"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        }
    },
    "cohere_compass_text": _ROPES,
    "cohere_compass": {"text_config": _ROPES},
    "dots3_note": {"text_config": {"head_dim": 64}},
    "dots3_note_text": {"head_dim": 64},
    "ernie4_5_vl_moe": {
        "text_config": {
            "rope_parameters": {"mrope_section": [5, 5, 6], "rope_type": "default", "rope_theta": 500000.0},
            "moe_k": 2,
        }
    },
    "esm": {"vocab_size": 320, "pad_token_id": 1, "mask_token_id": 4},
    "falcon_h1": {"mamba_d_ssm": 256, "mamba_d_head": 64},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2"},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "muse_spark": {"audio_config": {"num_hidden_layers": 4}},
    "qwen3_omni_moe": {
        "talker_config": {"text_config": {"shared_expert_intermediate_size": 128}, "spatial_merge_size": 2}
    },
    "zamba": {
        "mamba_expand": 2,
        "n_mamba_heads": 2,
        "attention_hidden_size": 256,
        "attention_head_dim": 64,
        "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"],
    },
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0], "vit_layers": [1, 0]}},
    "seggpt": {"merge_index": 0},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 32}},
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
}
"""By model type: fields of its configuration, and of the parts inside."""
