"""Tiny models of many architectures with random weights, and what goes into their forward."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tests.peers import transformers as tf

HIDDEN, INNER, VOCABULARY, SIDE = 128, 256, 160, 16
IDS = torch.arange(3, 19).reshape(2, 8)
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_SEEN: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": SIDE, "patch_size": 8,
}  # fmt: skip
_MOE: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "decoder_sparse_step": 1,
}  # fmt: skip
Inputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Animal:
    """A model of an architecture.

    kind: of its inputs. config: of a few layers. model: its class. loader: the class of transformers that
    users load it with. inputs: what a forward takes.
    """

    name: str
    kind: str
    model: str
    config: Callable[[], Any]
    inputs: Callable[[], Inputs]
    loader: str = "AutoModelForCausalLM"
    include: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def build(self, dtype: torch.dtype) -> Any:
        """Return the model in ``dtype``, its weights random and the same each time."""
        torch.manual_seed(0)
        model = getattr(tf, self.model)(self.config()).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.05)
        return model.to(dtype)


def _ids() -> Inputs:
    return {"input_ids": IDS}


def _both() -> Inputs:
    return {"input_ids": IDS, "decoder_input_ids": IDS[:, :4]}


def _pixels(side: int = SIDE) -> torch.Tensor:
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))


def _image() -> Inputs:
    return {"pixel_values": _pixels()}


def _clip() -> Inputs:
    return {"input_ids": IDS, "pixel_values": _pixels()}


def _sound() -> torch.Tensor:
    return torch.randn(2, 16, 40, generator=torch.Generator().manual_seed(1))


def _config(name: str, /, **changes: Any) -> Callable[[], Any]:
    return lambda: getattr(tf, name)(**{**_TEXT, **changes})


def _plain(name: str, /, **keys: Any) -> Callable[[], Any]:
    return lambda: getattr(tf, name)(**keys)


def _parts(name: str, /, *, text: str, vision: str, seen: Mapping[str, Any] | None = None, **keys: Any
           ) -> Callable[[], Any]:  # fmt: skip
    """Return the configuration of a model that joins two others."""

    def made() -> Any:
        joined = {
            "text_config": getattr(tf, text)(**_TEXT),
            "vision_config": getattr(tf, vision)(**{**_SEEN, **(seen or {})}),
            "tie_word_embeddings": False,
            **keys,
        }
        return getattr(tf, name)(**joined)

    return made


def _text(name: str, stem: str, *, head: str = "ForCausalLM", kind: str = "text", **changes: Any) -> Animal:
    return Animal(
        name=name, kind=kind, model=stem + head, config=_config(f"{stem}Config", **changes), inputs=_ids,
        loader="AutoModelForCausalLM" if "LM" in head else "AutoModel",
    )  # fmt: skip


def _seeing(name: str, stem: str, config: Callable[[], Any], inputs: Callable[[], Inputs] = _ids) -> Animal:
    return Animal(
        name=name, kind="vision and text", model=f"{stem}ForConditionalGeneration", config=config,
        inputs=inputs, loader="AutoModelForImageTextToText",
    )  # fmt: skip


def _queries(mask: str) -> Callable[[], Inputs]:
    """Return inputs whose first four places are those of the image, for models that insist on one."""
    ids, places = IDS.clone(), torch.zeros_like(IDS)
    ids[:, :4], places[:, :4] = 150, 1
    return lambda: {"input_ids": ids, "pixel_values": _pixels()} | ({mask: places.bool()} if mask else {})


_QWEN_SEEN: dict[str, Any] = {
    "depth": 2, "embed_dim": HIDDEN, "hidden_size": HIDDEN, "num_heads": 2, "patch_size": 8, "mlp_ratio": 2,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3, "out_hidden_size": HIDDEN,
}  # fmt: skip
_MROPE = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0}
_QWEN_TEXT = {**_TEXT, "rope_parameters": _MROPE, "rope_scaling": _MROPE}
_QFORMER: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": 2,
    "encoder_hidden_size": HIDDEN, "vocab_size": VOCABULARY,
}  # fmt: skip

TEXT = (
    _text("Llama", "Llama"),
    _text("Mistral", "Mistral"),
    _text("Qwen2", "Qwen2"),
    _text("Qwen3", "Qwen3", head_dim=64),
    _text("Gemma 2", "Gemma2", head_dim=64, query_pre_attn_scalar=64),
    Animal(
        name="Gemma 3 (text)", kind="text", model="Gemma3ForCausalLM", inputs=_ids,
        config=_config("Gemma3TextConfig", head_dim=64, query_pre_attn_scalar=64, tie_word_embeddings=True),
    ),
    _text("Phi-3", "Phi3"),
    _text("StableLM", "StableLm"),
    _text("OLMo 2", "Olmo2"),
    _text("OPT", "OPT", ffn_dim=INNER, word_embed_proj_dim=HIDDEN, dropout=0.0),
    _text("BLOOM", "Bloom", n_layer=2, n_head=2, tie_word_embeddings=True),
    _text("GPT-NeoX", "GPTNeoX"),
    _text("Falcon", "Falcon", tie_word_embeddings=True),
    Animal(
        name="GPT-2", kind="text", model="GPT2LMHeadModel", inputs=_ids,
        config=_plain(
            "GPT2Config", vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=2, n_head=2, n_positions=64,
            bos_token_id=1, eos_token_id=2,
        ),
    ),
    Animal(
        name="Mamba", kind="text", model="MambaForCausalLM", inputs=_ids,
        config=_plain(
            "MambaConfig", vocab_size=VOCABULARY, hidden_size=HIDDEN, state_size=16, num_hidden_layers=2,
            time_step_rank=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
        ),
    ),
    Animal(
        name="Mamba-2", kind="text", model="Mamba2ForCausalLM", inputs=_ids,
        config=_plain(
            "Mamba2Config", vocab_size=VOCABULARY, hidden_size=HIDDEN, state_size=16, num_hidden_layers=2,
            num_heads=4, head_dim=64, n_groups=1, chunk_size=8, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, tie_word_embeddings=False,
        ),
    ),
    Animal(
        name="T5", kind="text", model="T5ForConditionalGeneration", inputs=_both,
        loader="AutoModelForSeq2SeqLM",
        config=_plain(
            "T5Config", vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=64, d_ff=INNER, num_layers=2, num_heads=2,
            pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        ),
    ),
    _text("BERT", "Bert", head="Model"),
    Animal(
        name="RoBERTa", kind="text", model="RobertaForSequenceClassification", inputs=_ids,
        config=_config("RobertaConfig"), loader="AutoModelForSequenceClassification",
    ),
    Animal(
        name="DistilBERT", kind="text", model="DistilBertModel", inputs=_ids, loader="AutoModel",
        config=_plain(
            "DistilBertConfig", vocab_size=VOCABULARY, dim=HIDDEN, hidden_dim=INNER, n_layers=2, n_heads=2,
            max_position_embeddings=64,
        ),
    ),
    Animal(
        name="ModernBERT", kind="text", model="ModernBertModel", inputs=_ids, loader="AutoModel",
        config=_config("ModernBertConfig", cls_token_id=1, sep_token_id=2, tie_word_embeddings=True),
    ),
)  # fmt: skip
MOE = (
    _text("Mixtral", "Mixtral", kind="experts", **_MOE),
    _text("Qwen2-MoE", "Qwen2Moe", kind="experts", **_MOE),
    _text("Qwen3-MoE", "Qwen3Moe", kind="experts", head_dim=64, **_MOE),
    _text(
        "DeepSeek-V3", "DeepseekV3", kind="experts", n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=128, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=128,
        kv_lora_rank=128, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=64, n_shared_experts=1,
    ),
    _text("gpt-oss", "GptOss", kind="experts", head_dim=64, **{**_MOE, "sliding_window": 8}),
    Animal(
        name="Llama 4 (text)", kind="experts", model="Llama4ForCausalLM", inputs=_ids,
        config=_config(
            "Llama4TextConfig", intermediate_size_mlp=INNER, head_dim=64, num_local_experts=4,
            num_experts_per_tok=1, interleave_moe_layer_step=1, attention_chunk_size=32,
        ),
    ),
)  # fmt: skip
VISION = (
    Animal(
        name="ViT", kind="vision", model="ViTModel", config=_plain("ViTConfig", **_SEEN), inputs=_image,
        loader="AutoModel",
    ),
    Animal(
        name="DINOv2", kind="vision", model="Dinov2Model", inputs=_image, loader="AutoModel",
        config=_plain("Dinov2Config", **{**_SEEN, "mlp_ratio": 2}),
    ),
    Animal(
        name="CLIP", kind="vision and text", model="CLIPModel", inputs=_clip, loader="AutoModel",
        config=lambda: tf.CLIPConfig(
            text_config={**_TEXT, "projection_dim": HIDDEN},
            vision_config={**_SEEN, "projection_dim": HIDDEN},
            projection_dim=HIDDEN,
        ),
    ),
    Animal(
        name="SigLIP", kind="vision and text", model="SiglipModel", inputs=_clip, loader="AutoModel",
        config=lambda: tf.SiglipConfig(text_config={**_TEXT, "projection_size": HIDDEN}, vision_config=_SEEN),
    ),
)  # fmt: skip
AUDIO = (
    Animal(
        name="Whisper", kind="audio", model="WhisperForConditionalGeneration",
        inputs=lambda: {"input_features": _sound(), "decoder_input_ids": IDS[:, :4]},
        loader="AutoModelForSpeechSeq2Seq",
        config=_plain(
            "WhisperConfig", vocab_size=VOCABULARY, d_model=HIDDEN, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=INNER,
            decoder_ffn_dim=INNER,
            num_mel_bins=16, max_source_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=1,
        ),
    ),
    Animal(
        name="wav2vec 2.0", kind="audio", model="Wav2Vec2Model", loader="AutoModel",
        inputs=lambda: {"input_values": torch.randn(2, 800, generator=torch.Generator().manual_seed(1))},
        config=_plain(
            "Wav2Vec2Config", hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2,
            num_attention_heads=2, conv_dim=(HIDDEN, HIDDEN), conv_stride=(5, 2), conv_kernel=(10, 3),
            num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        ),
    ),
)  # fmt: skip
JOINED = (
    _seeing("LLaVA", "Llava", _parts(
        "LlavaConfig", text="LlamaConfig", vision="CLIPVisionConfig", image_token_index=150)),
    _seeing("LLaVA-NeXT", "LlavaNext", _parts(
        "LlavaNextConfig", text="LlamaConfig", vision="CLIPVisionConfig", image_token_index=150)),
    _seeing("LLaVA-OneVision", "LlavaOnevision", _parts(
        "LlavaOnevisionConfig", text="Qwen2Config", vision="SiglipVisionConfig", image_token_index=150,
        video_token_index=151)),
    _seeing("ViP-LLaVA", "VipLlava", _parts(
        "VipLlavaConfig", text="LlamaConfig", vision="CLIPVisionConfig", image_token_index=150,
        vision_feature_layers=[-1, -2])),
    _seeing("PaliGemma", "PaliGemma", _parts(
        "PaliGemmaConfig", text="GemmaConfig", vision="SiglipVisionConfig", image_token_index=150,
        projection_dim=HIDDEN, tie_word_embeddings=True)),
    _seeing("Gemma 3", "Gemma3", _parts(
        "Gemma3Config", text="Gemma3TextConfig", vision="SiglipVisionConfig", image_token_index=150,
        mm_tokens_per_image=4, tie_word_embeddings=True)),
    _seeing("Mistral 3", "Mistral3", _parts(
        "Mistral3Config", text="MistralConfig", vision="PixtralVisionConfig", image_token_index=150)),
    _seeing("Idefics 3", "Idefics3", _parts(
        "Idefics3Config", text="LlamaConfig", vision="Idefics3VisionConfig", image_token_id=150)),
    _seeing("InternVL", "InternVL", _parts(
        "InternVLConfig", text="Qwen2Config", vision="InternVLVisionConfig", image_token_id=150,
        seen={"image_size": [SIDE, SIDE], "patch_size": [8, 8]})),
    _seeing("Llama 3.2 Vision", "Mllama", lambda: tf.MllamaConfig(
        text_config={**_TEXT, "cross_attention_layers": [1], "num_hidden_layers": 2,
                     "rope_scaling": {"rope_type": "default"}},
        vision_config={**_SEEN, "attention_heads": 2, "num_global_layers": 1, "max_num_tiles": 2,
                       "vision_output_dim": INNER, "intermediate_layers_indices": [0],
                       "supported_aspect_ratios": [[1, 1], [1, 2]]},
        image_token_index=150)),
    _seeing("BLIP-2", "Blip2", lambda: tf.Blip2Config(
        text_config={**_TEXT, "model_type": "opt", "ffn_dim": INNER, "word_embed_proj_dim": HIDDEN,
                     "tie_word_embeddings": True},
        vision_config=_SEEN, qformer_config=_QFORMER, num_query_tokens=4, image_token_index=150),
        _queries("")),
    Animal(
        name="Fuyu", kind="vision and text", model="FuyuForCausalLM", inputs=_ids,
        config=_config(
            "FuyuConfig", image_size=SIDE, patch_size=8, image_token_id=150,
            text_config={**_TEXT, "model_type": "persimmon"},
        ),
    ),
    _seeing("Qwen2-VL", "Qwen2VL", lambda: tf.Qwen2VLConfig(
        text_config=_QWEN_TEXT, vision_config=_QWEN_SEEN, image_token_id=150, video_token_id=151,
        vision_start_token_id=152, vision_end_token_id=153, tie_word_embeddings=True)),
    _seeing("Qwen2.5-VL", "Qwen2_5_VL", lambda: tf.Qwen2_5_VLConfig(
        text_config=_QWEN_TEXT, image_token_id=150, video_token_id=151, vision_start_token_id=152,
        vision_end_token_id=153, tie_word_embeddings=False,
        vision_config={**_QWEN_SEEN, "intermediate_size": INNER, "fullatt_block_indexes": [1]})),
    _seeing("Qwen3-VL", "Qwen3VL", lambda: tf.Qwen3VLConfig(
        text_config={**_QWEN_TEXT, "head_dim": 64}, image_token_id=150, video_token_id=151,
        vision_start_token_id=152, vision_end_token_id=153, tie_word_embeddings=False,
        vision_config={**_QWEN_SEEN, "intermediate_size": INNER, "deepstack_visual_indexes": [0],
                       "num_position_embeddings": 16})),
    _seeing("Kosmos-2", "Kosmos2", lambda: tf.Kosmos2Config(
        text_config={"vocab_size": VOCABULARY, "embed_dim": HIDDEN, "layers": 2, "ffn_dim": INNER,
                     "attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
                     "bos_token_id": 1, "eos_token_id": 2},
        vision_config=_SEEN, latent_query_num=4), _queries("image_embeds_position_mask")),
    Animal(
        name="Qwen2-Audio", kind="audio and text", model="Qwen2AudioForConditionalGeneration", inputs=_ids,
        loader="AutoModelForSeq2SeqLM",
        config=lambda: tf.Qwen2AudioConfig(
            text_config={**_TEXT, "model_type": "qwen2"}, audio_token_index=150,
            audio_config={"model_type": "qwen2_audio_encoder", "d_model": HIDDEN, "encoder_layers": 2,
                          "encoder_attention_heads": 2, "encoder_ffn_dim": INNER, "num_mel_bins": 16,
                          "max_source_positions": 20},
        ),
    ),
)  # fmt: skip
ZOO = (*TEXT, *MOE, *VISION, *AUDIO, *JOINED)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
"""Those of the models in turn."""
