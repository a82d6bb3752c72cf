"""Rows of the table of families, and their shared entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from ...architectures import Config, text_config
from ..containers.protocol import Scalar
from ..divided_tensors import RowRun, TensorPiece
from ..stored_forms import Reshaped, RowOrder, Shape

_BUFFERS = r"rotary_emb\.(\w+_)?inv_freq$|\.attention\.(masked_)?bias$"
_DECODER = MappingProxyType({"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"})
Values = Mapping[str, Scalar | Sequence[Scalar]]


class Key(NamedTuple):
    """Keys of config.json for a metadata value, the canonical first."""

    names: tuple[str, ...]
    kind: type = int

    def value(self, text: Config) -> Any:
        """Return the first configured value among its keys, or None."""
        return number_of(text, self.names)


class Change(NamedTuple):
    """Change of a tensor's values in a file; see StoredForm.

    rows, columns: give the order from config.json. shape: gives what the shape becomes.
    """

    rows: Callable[[Config], RowOrder | None] | None = None
    columns: Callable[[Config], RowOrder | None] | None = None
    negated_exp: bool = False
    shape: Callable[[Config], Reshaped] | None = None
    plain: bool = False


class LayerKinds(NamedTuple):
    """Kinds of layers.

    key: of config.json, with one of them for each layer. values: for each kind the items
    of arrays of the metadata, in which a text is a key of config.json with the number; the first kind of
    those with the same items is read back. spelled: other names of a kind.
    """

    key: str
    values: Mapping[str, Mapping[str, Scalar]]
    spelled: Mapping[str, str] = MappingProxyType({})


class Derived(NamedTuple):
    """Metadata derived from several configuration values, and the inverse.

    read is given the values of the architecture without its name before them, and under ``tensors`` the
    names of all tensors; what it says of rope_scaling is added to that.
    """

    write: Callable[[Config], Values] = lambda _: {}
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _: {}


class Division(NamedTuple):
    """A tensor of a layer that files have in pieces.

    names: of the pieces in a layer. pieces: returns the pieces for a shape of the tensor. whole: returns the
    shape from the shapes of the pieces. transposed: whether matrices of the model are (in, out).
    """

    names: tuple[str, ...]
    pieces: Callable[[Shape, Config], Sequence[TensorPiece]]
    whole: Callable[[Sequence[Shape], Config], Shape]
    transposed: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A family of models.

    architecture: ``general.architecture``. model_type, class_name: as in config.json; types has others
    that are the same to llama.cpp. when: which configurations of the type it is. complete: adds what
    config.json implies. defaults: what transformers takes where config.json does not say it.

    prefixes: what names of tensors may begin with, transformers' prefix first. block: what a layer's name
    begins with. modules, layers: of the model and of a layer, to llama.cpp's names; tensors: likewise of a
    layer, for whole names. left_out: what its tensors that llama.cpp has no place for match.

    halves: whether heads of queries and keys are stored interleaved. plus: what is added to weights of norms.
    wide: modules with matrices in float32. changes: by names in the file. divided: tensors of
    a layer that files have in pieces. encoder: whether it has no head for
    tokens. experts: what the experts of a layer lie in, and what the gate, up and down of each are called;
    the first is what is made of files.

    numbers: of the metadata that count experts and their sizes; values: others, which may be missing; both
    with keys of config.json. constants: what is always written. kinds: of layers. rotary: the default part of
    a head that is rotated, where the metadata says it. scalings: types of rotary embeddings that are written.
    always: keys of config.json that must say what llama.cpp computes; unlike: gives sentences about what it
    computes otherwise nevertheless. derived: the rest.
    """

    architecture: str
    model_type: str
    class_name: str
    types: tuple[str, ...] = ()
    when: Callable[[Config], bool] = lambda _: True
    complete: Callable[[Config], Config] = lambda _: {}
    defaults: Config = field(default_factory=dict)
    prefixes: tuple[str, ...] = ("model.", "")
    block: str = "layers"
    modules: Mapping[str, str] = field(default_factory=lambda: _DECODER)
    layers: Mapping[str, str]
    tensors: Mapping[str, str] = field(default_factory=dict)
    left_out: str = _BUFFERS
    halves: bool = False
    plus: float = 0.0
    wide: frozenset[str] = frozenset()
    changes: Mapping[str, Change] = field(default_factory=dict)
    divided: Mapping[str, Division] = field(default_factory=dict)
    encoder: bool = False
    experts: tuple[tuple[str, tuple[str, str, str]], ...] = ()
    numbers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    values: Mapping[str, Key] = field(default_factory=dict)
    constants: Mapping[str, Scalar] = field(default_factory=dict)
    kinds: tuple[LayerKinds, ...] = ()
    rotary: float | None = None
    scalings: frozenset[str] = frozenset(("default", "linear", "yarn"))
    always: Mapping[str, Any] = field(default_factory=dict)
    unlike: Callable[[Config], Sequence[str]] = lambda _: ()
    derived: Derived = field(default_factory=Derived)

    @property
    def reorders(self) -> bool:
        """Whether files have some values in another order or form."""
        return any(change.rows or change.columns or change.negated_exp for change in self.changes.values())

    def described(self, config: Config) -> dict[str, Any]:
        """Return the text configuration with defaults and derived values."""
        text = {**self.defaults, **text_config(config)}
        if text.get("num_key_value_heads") is None and not self.encoder:
            text["num_key_value_heads"] = text.get("num_attention_heads")
        return {**text, **self.complete(text)}


def has(values: Mapping[str, Any], ending: str) -> bool:
    """Return whether a tensor name ends so, by Derived.read's values."""
    return any(name.endswith(ending) for name in values["tensors"])


def number_of(text: Config, keys: Sequence[str]) -> Any:
    """Return the first configured value among keys, or None."""
    return next((text[key] for key in keys if text.get(key) is not None), None)


def head_size(text: Config) -> int:
    """Return the numbers of a head."""
    return int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])


ATTENTION = MappingProxyType(
    {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
    }
)
MLP = MappingProxyType(
    {
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
)
LAYERS = MappingProxyType({**ATTENTION, **MLP})
QUERY_NORMS = MappingProxyType({"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"})
POST_NORM = MappingProxyType({"post_attention_layernorm": "post_attention_norm"})
TEXT = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
OF_IMAGES = _BUFFERS + r"|^(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|embed_vision)\."
DRAFTS = r"|^(model\.)?mtp\."
"""Layers that predict further tokens, by their names."""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
ROUTER = MappingProxyType({"mlp.gate": "ffn_gate_inp"})
FLAT = "ffn_gate_inp_shexp"
WIDE = frozenset(("ffn_gate_inp", FLAT))
EXPERTS = MappingProxyType(
    {
        # transformers 5 writes the second for Qwen3.
        "expert_count": ("num_experts", "num_local_experts"),
        "expert_used_count": ("num_experts_per_tok",),
        "expert_feed_forward_length": ("moe_intermediate_size",),
    }
)
LOCAL_EXPERTS = MappingProxyType(
    {
        "expert_count": ("num_local_experts",),
        "expert_used_count": ("num_experts_per_tok",),
    }
)
ROUTED_EXPERTS = MappingProxyType({**EXPERTS, "expert_count": ("n_routed_experts",)})
EVERYWHERE = MappingProxyType({"decoder_sparse_step": 1, "mlp_only_layers": ()})
"""Experts in each layer."""
SOFTMAX, SIGMOID = 1, 2
"""Numbers of a router's activation, ``expert_gating_func``."""


def no_window(text: Config) -> Sequence[str]:
    """Return a sentence about a sliding window that llama.cpp lacks."""
    window, context = text.get("sliding_window"), text["max_position_embeddings"]
    if not window or window >= context:
        return ()
    return (f"llama.cpp attends to all {context} tokens of a context, and the model to the last {window}",)


def kernel(text: Config) -> Reshaped:
    """Return the reshaping of one-channel convolution kernels, (channels, 1, width)."""
    return Reshaped(
        lambda shape: (shape[0], shape[-1]),
        lambda shape: (shape[0], 1, shape[1]) if len(shape) == 2 else shape,
    )


def column(text: Config) -> Reshaped:
    """Return the reshaping of vectors stored as one column."""
    return Reshaped(lambda shape: (*shape, 1), lambda shape: shape[:1])


def grouped(groups: str) -> Callable[[Config], Reshaped]:
    """Return the reshaping of vectors into rows, counted by key ``groups``."""
    return lambda text: Reshaped(
        lambda shape: (text[groups], shape[0] // text[groups]),
        lambda shape: (shape[0] * shape[1],) if len(shape) == 2 else shape,
    )


def parts_of(
    *names: str, transposed: bool = False, alternating: bool = False, vectors: bool = False
) -> Division:
    """Return the division of outputs into equal parts; one name renames all.

    transposed: whether matrices of the model are (in, out). alternating: whether outputs of the parts take
    turns. vectors: whether they are of vectors, such as biases.
    """
    number, axis = len(names), -1 if vectors else -2

    def swapped(shape: Shape) -> Shape:
        return (*shape[:-2], shape[-1], shape[-2]) if transposed else shape

    def pieces(shape: Shape, text: Config) -> Sequence[TensorPiece]:
        own = [*swapped(shape)]
        count, rows, part = math.prod(own[:axis]), own[axis], own[axis] // number
        own[axis], (first, step) = part, (1, number) if alternating else (part, 1)
        return [
            TensorPiece(name, tuple(own), (RowRun(at * first, (count, part), (rows, step)),), single=vectors)
            for at, name in enumerate(names)
        ]

    def whole(shapes: Sequence[Shape], text: Config) -> Shape:
        own = [*shapes[0]]
        own[axis] *= number
        return swapped(tuple(own))

    return Division(names, pieces, whole, transposed)
