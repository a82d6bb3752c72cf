"""The model families that llama.cpp runs and whose checkpoints become GGUF files here, a row for each.

A row says what llama.cpp calls the architecture and its tensors. The names of a layer's modules are read as
``PREFIX layers.N.MODULE`` and written as ``blk.N.MODULE``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ...architectures import DOWN, GATE_UP, MOST_EXPERTS, Config, model_type, text_config
from ...errors import CheckpointError, printable
from ..stored_forms import APART, NO_PLACE, StoredForm

_BUFFERS = r"rotary_emb\.inv_freq$|\.attention\.(masked_)?bias$"
_DECODER = MappingProxyType({"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"})


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A family of models.

    architecture: ``general.architecture``. model_type, class_name: those of config.json; types has others
    that are the same to llama.cpp. prefixes: what names of tensors may begin with, that of transformers
    first. block: what a layer's name begins with. modules, layers: of the model and of a layer, to
    llama.cpp's names. left_out: what its tensors that llama.cpp has no place for match. halves: whether heads
    of queries and keys are stored interleaved. plus: what is added to weights of norms. wide: modules with
    matrices in float32. encoder: whether it has no head for tokens. experts: what the experts of a layer lie
    in, and what the gate, up and down of each are called; the first is what is made of files. numbers: of the
    metadata that count experts and their sizes, with their keys in config.json, that which is written first.
    always: keys of config.json that must say what llama.cpp computes.
    """

    architecture: str
    model_type: str
    class_name: str
    types: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ("model.", "")
    block: str = "layers"
    modules: Mapping[str, str] = field(default_factory=lambda: _DECODER)
    layers: Mapping[str, str]
    left_out: str = _BUFFERS
    halves: bool = False
    plus: float = 0.0
    wide: frozenset[str] = frozenset()
    encoder: bool = False
    experts: tuple[tuple[str, tuple[str, str, str]], ...] = ()
    numbers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)


_LAYERS = MappingProxyType({
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
})  # fmt: skip
_QUERY_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_TEXT = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
_VISION = r"|^(model\.)?(vision_tower|vision_model|multi_modal_projector)\."
_OF_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
"""The gate, up and down of all experts of a layer."""
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_ATTENTION = MappingProxyType({old: new for old, new in _LAYERS.items() if not old.startswith("mlp.")})
_ROUTER = {"mlp.gate": "ffn_gate_inp"}
_FLAT = frozenset(("ffn_gate_inp_shexp",))
"""Modules of one row that is a vector in files."""
_WIDE = frozenset(("ffn_gate_inp", *_FLAT))
_NUMBERS = MappingProxyType({
    # transformers 5 writes the second for Qwen3.
    "expert_count": ("num_experts", "num_local_experts"), "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
})  # fmt: skip
_EVERYWHERE = MappingProxyType({"decoder_sparse_step": 1, "mlp_only_layers": ()})
"""Experts in each layer."""
FAMILIES: tuple[Family, ...] = (
    Family(
        architecture="llama", model_type="llama", class_name="LlamaForCausalLM", types=("mistral",),
        layers=_LAYERS, halves=True,
    ),
    Family(architecture="qwen2", model_type="qwen2", class_name="Qwen2ForCausalLM", layers=_LAYERS),
    Family(
        architecture="qwen3", model_type="qwen3", class_name="Qwen3ForCausalLM",
        layers=MappingProxyType({**_LAYERS, **_QUERY_NORMS}),
    ),
    Family(
        architecture="llama", model_type="mixtral", class_name="MixtralForCausalLM", halves=True, wide=_WIDE,
        # Checkpoints have the first names, models of transformers 5 the others.
        layers=MappingProxyType({**_ATTENTION, **_ROUTER, "block_sparse_moe.gate": "ffn_gate_inp"}),
        experts=(("block_sparse_moe.experts", ("w1", "w3", "w2")), ("mlp.experts", _PROJECTIONS)),
        numbers=MappingProxyType({
            "expert_count": ("num_local_experts",), "expert_used_count": ("num_experts_per_tok",),
        }),
    ),
    Family(
        architecture="qwen2moe", model_type="qwen2_moe", class_name="Qwen2MoeForCausalLM", wide=_WIDE,
        layers=MappingProxyType({
            **_ATTENTION, **_ROUTER, "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
            "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
            "mlp.shared_expert.down_proj": "ffn_down_shexp",
        }),
        experts=(("mlp.experts", _PROJECTIONS),),
        numbers=MappingProxyType({
            **_NUMBERS, "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
        }),
        always=MappingProxyType({**_EVERYWHERE, "norm_topk_prob": False}),
    ),
    Family(
        architecture="qwen3moe", model_type="qwen3_moe", class_name="Qwen3MoeForCausalLM", wide=_WIDE,
        layers=MappingProxyType({**_ATTENTION, **_QUERY_NORMS, **_ROUTER}),
        experts=(("mlp.experts", _PROJECTIONS),), numbers=_NUMBERS,
        always=MappingProxyType({**_EVERYWHERE, "norm_topk_prob": True}),
    ),
    Family(
        architecture="gemma3", model_type="gemma3_text", class_name="Gemma3ForCausalLM", types=("gemma3",),
        prefixes=_TEXT, plus=1.0, left_out=_BUFFERS + _VISION,
        layers=MappingProxyType({
            **_LAYERS, **_QUERY_NORMS, "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
        }),
    ),
    Family(
        architecture="bert", model_type="bert", class_name="BertModel", prefixes=("", "bert."),
        block="encoder.layer", encoder=True, wide=frozenset(("position_embd", "token_types")),
        left_out=r"(^|\.)embeddings\.position_ids$|(^|\.)pooler\.dense\.|^cls\.(predictions|seq_relationship)\b",
        modules=MappingProxyType({
            "embeddings.word_embeddings": "token_embd", "embeddings.position_embeddings": "position_embd",
            "embeddings.token_type_embeddings": "token_types", "embeddings.LayerNorm": "token_embd_norm",
        }),
        layers=MappingProxyType({
            "attention.self.query": "attn_q", "attention.self.key": "attn_k",
            "attention.self.value": "attn_v", "attention.output.dense": "attn_output",
            "attention.output.LayerNorm": "attn_output_norm", "intermediate.dense": "ffn_up",
            "output.dense": "ffn_down", "output.LayerNorm": "layer_output_norm",
        }),
    ),
)  # fmt: skip
_NEEDED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
"""Keys of config.json without which nothing can be said."""


def family_of(config: Config) -> Family | None:
    """Return the family that a configuration describes in full, or None.

    >>> sizes = dict.fromkeys(("num_hidden_layers", "hidden_size", "intermediate_size"), 8)
    >>> family_of({"model_type": "mistral", "num_attention_heads": 2, **sizes}).architecture
    'llama'
    """
    kind, text = model_type(config), text_config(config)
    family = next((family for family in FAMILIES if kind in (family.model_type, *family.types)), None)
    if family is None:
        return None
    found = [text.get(key) for key in _NEEDED] + [number_of(text, keys) for keys in family.numbers.values()]
    return family if all(type(number) is int and number > 0 for number in found) else None


def number_of(text: Config, keys: Sequence[str]) -> Any:
    """Return what a configuration says under the first of some keys that it has, or None."""
    return next((text[key] for key in keys if text.get(key) is not None), None)


def expert_count(family: Family, config: Config) -> int:
    """Return how many experts a layer has, or 0."""
    return number_of(text_config(config), family.numbers.get("expert_count", ())) or 0


def head_size(config: Config) -> int:
    """Return the numbers of a head."""
    text = text_config(config)
    return int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])


@functools.lru_cache(maxsize=64)
def _patterns(family: Family) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    prefixes = "|".join(sorted(map(re.escape, family.prefixes), key=len, reverse=True))
    name = rf"(?:{prefixes})(?:{re.escape(family.block)}\.(?P<n>\d+)\.)?(?P<module>.+)\.(?P<kind>weight|bias)"
    stored = r"(?:blk\.(?P<n>\d+)\.)?(?P<module>[\w.]+)\.(?P<kind>weight|bias)"
    return re.compile(name), re.compile(stored), re.compile(family.left_out)


def form_of(family: Family, name: str, shape: tuple[int, ...], config: Config) -> StoredForm:
    """Return how a tensor of a model lies in its file; NO_PLACE where llama.cpp does without it.

    Raises CheckpointError for a name that is not one of the family, and for heads that are not whole.
    """
    pattern, _, left_out = _patterns(family)
    if left_out.search(name):
        return NO_PLACE
    found = pattern.fullmatch(name)
    fused = _fused(family, name) if len(shape) == 3 else None
    if fused is not None:
        return fused
    table = family.modules if found is None or found["n"] is None else family.layers
    stored, part = None if found is None else table.get(found["module"]), None
    if stored is None and found is not None and found["n"] is not None:
        stored, part = _of_expert(family, found["module"], expert_count(family, config))
    if found is None or stored is None:
        raise CheckpointError(
            f"tensor {printable(name)} has no name in GGUF files of {family.architecture}, so llama.cpp "
            "would not load the file; remove it from the checkpoint"
        )
    block = "" if found["n"] is None else f"blk.{found['n']}."
    form = _form(family, f"{block}{stored}.{found['kind']}", shape, head_size(config))
    form.require_whole(shape[0] if shape else 1, printable(name))
    return form._replace(part=part)


def _fused(family: Family, name: str) -> StoredForm | None:
    """Return the form of all experts of a layer in one tensor of the model, or None for another tensor."""
    found = re.fullmatch(r"(?:.*\.)?layers\.(?P<n>\d+)\.(?P<module>.+)\.(?P<kind>\w+?)(?:\.weight)?", name)
    if found is None or found["module"] not in dict(family.experts) or found["kind"] not in (GATE_UP, DOWN):
        return None
    return APART if found["kind"] == GATE_UP else StoredForm(f"blk.{found['n']}.{_OF_EXPERTS[2]}.weight")


def _of_expert(family: Family, module: str, count: int) -> tuple[str | None, tuple[int, int] | None]:
    """Return the tensor that holds a projection of all experts, and which part of it a module is."""
    *holder, number, projection = module.split(".")
    names = dict(family.experts).get(".".join(holder), ())
    if projection not in names or not number.isdecimal() or int(number) >= count:
        return None, None
    return _OF_EXPERTS[names.index(projection)], (int(number), count)


def _form(family: Family, name: str, shape: tuple[int, ...], head: int) -> StoredForm:
    """Return the form of a tensor of a name in a file."""
    module, _, kind = name.rpartition(".")
    last = module.rpartition(".")[2]
    norm = last.endswith("_norm") and kind == "weight"
    return StoredForm(
        name=name, halves=head if family.halves and last in ("attn_q", "attn_k") else 0,
        plus=family.plus if norm else 0.0, float32=len(shape) < 2 or norm or last in family.wide,
        flat=last in _FLAT,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _modules(family: Family) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return the modules of llama.cpp's names, of a model and of a layer."""
    whole, layers = ({new: old for old, new in table.items()} for table in (family.modules, family.layers))
    return whole, layers


def model_names(
    family: Family, stored: str, shape: tuple[int, ...], config: Config
) -> Sequence[tuple[str, StoredForm]] | None:
    """Return the names in the model of what a tensor of a file holds, and their forms.

    None says that it is no such tensor. Raises CheckpointError for heads that are not whole, and for another
    number of experts than the configuration says.
    """
    found = _patterns(family)[1].fullmatch(stored)
    if found is None:
        return None
    block = "" if found["n"] is None else f"{family.block}.{found['n']}."
    if block and family.experts and found["module"] in _OF_EXPERTS:
        holder, names = family.experts[0]
        stem, projection = f"{family.prefixes[0]}{block}{holder}", names[_OF_EXPERTS.index(found["module"])]
        count = expert_count(family, config)
        if len(shape) != 3 or shape[0] != count or count > MOST_EXPERTS or 0 in shape:
            raise CheckpointError(
                f"{printable(stored)} has shape {list(shape)}, but must hold the matrices of {count} experts"
            )
        form = _form(family, stored, shape[1:], 0)
        return [
            (f"{stem}.{number}.{projection}.{found['kind']}", form._replace(part=(number, count)))
            for number in range(count)
        ]
    whole, layers = _modules(family)
    module = (layers if block else whole).get(found["module"])
    if module is None:
        return None
    # transformers keeps the head next to the model.
    prefix = "" if module == "lm_head" else family.prefixes[0]
    form = _form(family, stored, shape, head_size(config))
    form.require_whole(shape[0] if shape else 1, printable(stored))
    return [(f"{prefix}{block}{module}.{found['kind']}", form)]
