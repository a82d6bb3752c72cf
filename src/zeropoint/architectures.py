"""What is known about model families, in one place.

What kind of layer a module is, which layers engines fuse or split, experts, ties, heads, names on loading,
and weights stored transposed. The rows are about transformers 5.23, and tests compare them with the version
that is installed. This module knows configurations and names; it opens no file and imports no model.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Config = Mapping[str, Any]
"""A config.json."""
_HEADS = tuple(
    (re.compile(pattern), heads)
    for pattern, heads in (
        ("(Whisper|Moonshine|Canary|CohereAsr)", ("proj_out",)),
        ("(Electra|ConvBert)", ("generator_lm_head",)),
        ("DistilBert", ("vocab_projector",)),
        ("Albert", ("predictions.decoder",)),
        ("(XLM|Flaubert)WithLMHead", ("pred_layer.proj",)),
        ("XLNetLMHead", ("lm_loss",)),
        ("(BridgeTower|Vilt)ForMaskedLM", ("mlm_score.decoder",)),
        ("ModernBert(Decoder)?For(Masked|Causal)LM", ("decoder",)),
        ("(BioGpt|TrOCR)ForCausalLM", ("output_projection",)),
        ("Kosmos2For", ("text_model.lm_head",)),
        ("(Blip2|InstructBlip(Video)?)For", ("language_model.lm_head",)),
        ("GitForCausalLM", ("output",)),
        ("RwkvForCausalLM", ("head",)),
        ("GPTNeoXJapaneseForCausalLM", ("embed_out",)),
        ("NeoMMEForMaskedLM", ("lm_head", "unembedding_projection")),
        ("Ultrabert", ("head.decoder",)),
        ("T5Gemma", ("lm_head.out_proj",)),
        ("SpeechT5ForSpeechToText", ("text_decoder_postnet.lm_head",)),
        ("BlipFor", ("text_decoder.cls.predictions.decoder",)),
        ("FSMT", ("model.decoder.output_projection",)),
        ("GraniteSpeech5ForCTC", ("ctc_head",)),
        ("Luke", ("lm_head.decoder", "entity_predictions.decoder")),
        ("(EuroBert|Funnel|ModernVBert|NeoMME|UltraVBert)", ("lm_head",)),
        ("(BertGeneration|Camembert|Esm|Data2VecText|XLMRoberta|Xmod|Roberta)", ("lm_head.decoder",)),
        (
            "(Bert|BigBirdFor|BlipText|ErnieFor|MegatronBert|RoCBert|RoFormer|VisualBert)",
            ("cls.predictions.decoder",),
        ),
        (".*For(MaskedLM|PreTraining)$", ("cls.predictions.decoder", "lm_head.decoder")),
        (".*(For(CausalLM|ConditionalGeneration)|LMHeadModel)$", ("lm_head",)),
    )
)
"""Heads by how an architecture's name begins, the first that fits: _tied_weights_keys of transformers."""
_SCORES = re.compile(
    r".*(LM|LMHeadModel|PreTraining|Generation|Text|CTC|Decoder|Alignment)$|BlipForQuestionAnswering$"
)
"""Names of architectures that have such a head; others, as BertModel, have none or one of classes."""


def says_tied(config: Config) -> bool:
    """Return whether a configuration says that the head is the embedding."""
    return config.get("tie_word_embeddings") is True


def heads_of(config: Config) -> tuple[str, ...]:
    """Return the modules that are heads in the architectures of a configuration.

    >>> heads_of({"architectures": ["WhisperForConditionalGeneration"]})
    ('proj_out',)
    """
    return _heads_of(classes_of(config), tied=says_tied(config))


def classes_of(config: Config) -> tuple[str, ...]:
    """Return the names of the classes that a configuration calls its architectures.

    >>> classes_of({"architectures": ["BertModel"]}), classes_of({"architectures": 5})
    (('BertModel',), ())
    """
    named = config.get("architectures")
    return tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()


@functools.lru_cache(maxsize=64)
def _heads_of(architectures: tuple[str, ...], *, tied: bool) -> tuple[str, ...]:
    usual = ("lm_head",) if tied else ()
    found = (
        next((heads for name, heads in _HEADS if name.match(a) and _SCORES.match(a)), usual)
        for a in architectures
    )
    return tuple(dict.fromkeys(head for heads in found for head in heads))


def text_config(config: Config) -> Config:
    """Return the part of a configuration that is about text."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, Mapping) else config


def model_type(config: Config) -> str:
    """Return the kind of a whole model, or an empty string."""
    found = config.get("model_type")
    return found if isinstance(found, str) else ""


def model_types(config: Config) -> Iterator[str]:
    """Yield the model types of a model and its parts.

    >>> list(model_types({"model_type": "llava", "text_config": {"model_type": "llama"}}))
    ['llava', 'llama']
    """
    if model_type(config):
        yield model_type(config)
    for name, part in config.items():
        if name.endswith("_config") and isinstance(part, dict) and model_type(part):
            yield model_type(part)


# transformers' Conv1D stores (in, out).
_CONV1D_MODELS = frozenset(("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"))
_CONV1D = re.compile(r"(^|\.)(c_attn|c_proj|c_fc|q_attn)$")


def is_transposed(module: str, config: Config) -> bool:
    """Return whether a module stores its weight as (in, out).

    >>> is_transposed("h.0.attn.c_attn", {"model_type": "gpt2"})
    True
    """
    return _CONV1D.search(module) is not None and not _CONV1D_MODELS.isdisjoint(model_types(config))


SPLIT_EXPERTS = frozenset(("llama4", "llama4_text"))
"""Families whose experts transformers splits into Linear layers where a checkpoint is quantized."""


def splits_experts(config: Config) -> bool:
    """Return whether kept fused experts do not load: loaders want single ones."""
    return not SPLIT_EXPERTS.isdisjoint(model_types(config))


PIPELINE_INDEX = "model_index.json"
"""The file of a pipeline of diffusers that says which parts it has."""

HEAD = "Head"
"""The type of layers that make logits, classes or scores of the hidden state."""
# Each is searched in the last part of a module's name, and where said in the part before it.
_EMBEDDING = re.compile(
    r"embed|_emb$|position|token_type|codebook|^(wte|wpe|shared|relative_attention_bias)$", re.IGNORECASE
)
_NORM = re.compile(r"norm$|^ln(_\w*)?$|^layer_?norm", re.IGNORECASE)
_ROUTER = re.compile(r"router|^(gate|gating|wg)$|expert_gate$", re.IGNORECASE)
_HEAD = re.compile(r"(^|_)(lm_head|classifier|score|qa_outputs|head)$", re.IGNORECASE)
_HEAD_PARENT = re.compile(r"(^|_)(lm_head|classifier|score)$", re.IGNORECASE)
# Mistral's own checkpoints call the head `output`; BERT's heads live under `cls`.
_TOP_HEAD = re.compile(r"^(output$|cls\.)")
# Layers that predict further tokens (MTP), and heads that do so (Medusa, EAGLE).
_DRAFT = re.compile(r"(^|\.)(mtp|nextn|medusa|eagle|draft)(_\w+)?\.")
_LAYER = re.compile(r"^(?:(?:model|language_model|transformer)\.)*layers\.(\d+)\.")
# vLLM 0.32 builds these without a quantization (models/deepseek_v2.py and folders of later DeepSeek models).
_INDEXER = re.compile(r"(^|\.)(indexer\.(wk|weights_proj|wk_weights_proj)|compressor\.(wkv|wgate))$")
# Blocks of a part of a pipeline of diffusers have numbers; layers of its norms scale and shift channels.
_BLOCK, _MODULATION = re.compile(r"\.\d+\."), re.compile(r"norm|modulation|adaln", re.IGNORECASE)
# What PEFT calls the parts of adapters: tuners of LoRA, LoHa and LoKr; and the weight that they add to.
_ADAPTER = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|hada_w\d_[ab]|lokr_w\d)(\.|$)")
ADAPTED = ".base_layer"


def is_adapter(name: str) -> bool:
    """Return whether a name is part of an adapter, like LoRA's."""
    return _ADAPTER.search(name) is not None


def adapted_module(name: str) -> str:
    """Return the module that a part of an adapter adds to.

    >>> adapted_module("model.layers.0.mlp.up_proj.lora_A.weight")
    'model.layers.0.mlp.up_proj'
    """
    found = _ADAPTER.search(name)
    return name if found is None else name[: found.start()]


def _is_draft(module: str, config: Config) -> bool:
    """Return whether a module drafts tokens, by name or layer number."""
    if _DRAFT.search(module):
        return True
    found = _LAYER.match(module)
    text = config.get("text_config")
    counts = text if isinstance(text, dict) else config
    more, own = counts.get("num_nextn_predict_layers"), counts.get("num_hidden_layers")
    if found is None or not isinstance(more, int) or not isinstance(own, int):
        return False
    return own <= int(found[1]) < own + more


def layer_type(module: str, config: Config) -> str:
    """Return a matrix module's layer type, from its name.

    Returns: ``Embedding``, ``Norm``, ``Router``, ``Head``, ``Adapter``, ``Draft`` for what drafts tokens,
    ``Indexer`` for what engines run in floats, or ``Linear``. In parts of pipelines of diffusers also
    ``Modulation`` for layers of norms (AdaLN), and ``Outer`` for layers outside of blocks, such as the first
    and the last one.

    >>> [layer_type(name, {}) for name in ("model.embed_tokens", "lm_head", "model.layers.0.mlp.up_proj")]
    ['Embedding', 'Head', 'Linear']
    >>> layer_type("mtp.layers.0.mlp.up_proj", {}), layer_type("model.layers.0.self_attn.indexer.wk", {})
    ('Draft', 'Indexer')
    >>> part = {"_class_name": "FluxTransformer2DModel"}
    >>> [layer_type(name, part) for name in ("x_embedder", "blocks.0.norm1.linear", "blocks.0.ff.net.2")]
    ['Outer', 'Modulation', 'Linear']
    """
    if is_adapter(module):
        return "Adapter"
    if _is_draft(module, config):
        return "Draft"
    if _INDEXER.search(module):
        return "Indexer"
    module = module.removesuffix(ADAPTED)
    *before, last = module.split(".")
    parent = before[-1] if before else ""
    if isinstance(config.get("_class_name"), str):
        if _BLOCK.search(f".{module}.") is None:
            return "Outer"
        if any(map(_MODULATION.search, before)):
            return "Modulation"
    if _EMBEDDING.search(last) or (_EMBEDDING.search(parent) and not last.endswith("proj")):
        return "Embedding"
    if _NORM.search(last):
        return "Norm"
    if _ROUTER.search(last) or parent == "router":
        return "Router"
    if _HEAD.search(last) or _HEAD_PARENT.search(parent) or _TOP_HEAD.match(module):
        return HEAD
    if module in heads_of(config):
        return HEAD
    return "Linear"


# The input embeddings that a tied head takes its weight from.
_TIED_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|tok_embeddings|word_embeddings|wte|shared)$")


def is_input_embedding(module: str) -> bool:
    """Return whether a module is the embedding of a tied head."""
    return _TIED_EMBEDDING.search(module) is not None


GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""Last parts of the names of fused experts: (experts, 2 * inner, hidden) and (experts, hidden, inner), unless
:func:`expert_layout` says otherwise."""
MOST_EXPERTS = 1 << 14
"""More than any model has in a layer: no file makes us count further."""


def expert_parts(module: str) -> tuple[str, ...]:
    """Return the projections of fused experts, in row order.

    >>> expert_parts("m.experts.gate_up_proj"), expert_parts("m.experts.down_proj")
    (('gate_proj', 'up_proj'), ('down_proj',))
    """
    last = module.rpartition(".")[2]
    return ("gate_proj", "up_proj") if last == GATE_UP else (last,)


class ExpertLayout(NamedTuple):
    """Storage of fused experts in checkpoints of floats.

    transposed: whether a matrix is (in, out). interleaved: whether the outputs of gate and up alternate, the
    first of them the gate's; otherwise those of gate come first. biased: whether they have biases.
    """

    transposed: bool = False
    interleaved: bool = False
    biased: bool = False


_EXPERT_LAYOUTS = {"gpt_oss": ExpertLayout(transposed=True, interleaved=True, biased=True)}


def expert_layout(config: Config) -> ExpertLayout:
    """Return the storage of a model's fused experts.

    >>> expert_layout({"model_type": "gpt_oss"}).transposed, expert_layout({}).transposed
    (True, False)
    """
    known = (_EXPERT_LAYOUTS[kind] for kind in model_types(config) if kind in _EXPERT_LAYOUTS)
    return next(known, ExpertLayout())


_EXPERT = re.compile(r"(^|\.)experts\.\d+\.")


def is_expert(module: str) -> bool:
    """Return whether a module is one projection of one expert.

    >>> [is_expert(f"model.layers.0.mlp.{name}") for name in ("experts.3.up_proj", "shared_experts.up_proj")]
    [True, False]
    """
    return _EXPERT.search(module) is not None


_PROJECTION = re.compile(r"(gate|up|down)_proj|w[123]|linear(_v|_1)?")


def is_usual_expert(module: str) -> bool:
    """Return whether an expert's projection has a widely known name.

    >>> [is_usual_expert(f"mlp.experts.0.{name}") for name in ("up_proj", "w2", "input_linear")]
    [True, True, False]
    """
    return _PROJECTION.fullmatch(module.rpartition(".")[2]) is not None


class _FusedLayers(NamedTuple):
    """Layers of one module that engines fuse, under one scheme.

    part: the last part of the name of each. merged: the name of the whole in vLLM and SGLang. shares: the end
    of the name of the module around them where their weights take one tensor scale, or None.
    """

    part: re.Pattern[str]
    merged: str
    shares: str | None


# vLLM 0.32: packed_modules_mapping and stacked parameters of its models; llm-compressor 0.14 has those of one
# scale (entrypoints/model_free/microscale.py), where gate and up of experts and of others have one each.
_FUSED = tuple(
    _FusedLayers(re.compile(part), merged, shares)
    for part, merged, shares in (
        (r"(w|to_|linear_|)(q|k|v|query|key|value)(_proj|_lin|_linear|_net|)", "qkv_proj", ""),
        (r"(gate|up)_proj", "gate_up_proj", "mlp"),
        (r"w[13]", "w13", ""),
        (r"c_fc_[01]", "gate_up_proj", None),
        (r"(q_a_proj|kv_a_proj_with_mqa)", "fused_qkv_a_proj", None),
        (r"(wq_a|wkv_a_with_mqa)", "fused_qkv_a_proj", ""),
        (r"in_proj_(qkv|z)", "in_proj_qkvz", None),
        (r"in_proj_[ab]", "in_proj_ba", None),
    )
)
_EXPERTS = re.compile(r"(?P<set>.*\.experts)(\..*)?$")


def _fused(module: str) -> tuple[_FusedLayers, str] | None:
    """Return a module's row of the table, and its parent's name."""
    parent, _, last = module.removesuffix(ADAPTED).rpartition(".")
    row = next((row for row in _FUSED if row.part.fullmatch(last)), None)
    return None if row is None else (row, parent)


def shared_scale_set(module: str) -> str | None:
    """Return the fused layers of a module's tensor scale, or None.

    >>> [shared_scale_set(f"a.mlp.{name}_proj") for name in ("gate", "up", "down")]
    ['a.mlp.gate_up_proj', 'a.mlp.gate_up_proj', None]
    """
    match _fused(module):
        case row, parent if row.shares is not None and parent.endswith(row.shares):
            return f"{parent}.{row.merged}"
    return None


def fused_set(module: str) -> str | None:
    """Return the name of a module's one-scheme fused layers, or None.

    >>> {fused_set(f"layer.0.attention.self.{name}") for name in ("query", "key", "value")}
    {'layer.0.attention.self.qkv_proj'}
    >>> fused_set("layers.0.mlp.experts.3.up_proj"), fused_set("layers.0.attention.experts.router.layer")
    ('layers.0.mlp.experts', None)
    """
    experts = _EXPERTS.fullmatch(module)
    if experts is not None and layer_type(module, {}) != "Router":
        return experts["set"]
    return next(iter(merged(module)), None)


def merged(module: str) -> tuple[str, ...]:
    """Return a layer's fused name in vLLM and SGLang, if any.

    >>> merged("layers.0.self_attn.q_proj"), merged("layers.0.mlp.down_proj")
    (('layers.0.self_attn.qkv_proj',), ())
    """
    match None if is_expert(module) else _fused(module):
        case row, parent:
            return (f"{parent}.{row.merged}" if parent else row.merged,)
    return ()


# The last parts of names of layers that tensor parallelism splits by columns: attention's output and the end
# of an MLP (transformers' base_model_tp_plan says "rowwise" of these).
_BY_COLUMNS = re.compile(
    r"(^|\.)(o_proj|out_proj|down_proj|c_proj|fc2|w2|wo|dense_4h_to_h|attention\.dense|output\.dense|out_lin|lin2)$"
)


def split_by_columns(module: str) -> bool:
    """Return whether tensor parallelism splits a weight's columns, not rows.

    >>> split_by_columns("model.layers.0.mlp.down_proj"), split_by_columns("model.layers.0.mlp.up_proj")
    (True, False)
    """
    return _BY_COLUMNS.search(module) is not None
