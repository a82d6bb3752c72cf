"""Readers and writers of a decoder's residual stream, by family.

Each layer of these models normalizes the stream by the root of its mean square (RMSNorm), reads it with
linear layers, and adds to it what other linear layers give. So an orthogonal matrix on the stream leaves the
model as it was, once the weights of its norms are folded into what reads them (SliceGPT, arXiv:2401.15024).
The values of the heads of an attention have such a place too, between the projection that gives them and the
one that reads them; SpinQuant, arXiv:2405.16406, calls these matrices R1 and R2.

This module knows names, shapes and configurations; it reads no weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...architectures import heads_of, model_type, says_tied
from ...errors import CheckpointError, UnsupportedError, printable
from ..read.tensor_entries import Entries, TensorEntry
from .selection import WEIGHT, WEIGHT_DTYPES, module_of

BIAS = ".bias"
EMBEDDING, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
"""Embedding, last norm and head: the ends of the stream in all these families."""
_LAYER = re.compile(r"(?P<layer>model\.layers\.\d+)\.(?P<inner>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The modules of a decoder's layer, named as regular expressions.

    readers: by norm, what reads the stream behind it. writers: what adds to the stream. values, outputs: the
    projections between which the values of heads lie, where these are matrices of their own. apart: what has
    no part in the stream. one: what a norm adds to its weight.
    """

    readers: Mapping[str, str]
    writers: str
    values: str = r"self_attn\.v_proj"
    outputs: str = r"self_attn\.o_proj"
    apart: str = r"self_attn\.rotary_emb\.inv_freq"
    one: float = 0.0


_LLAMA = Decoder(
    readers={
        "input_layernorm": r"self_attn\.[qkv]_proj",
        "post_attention_layernorm": r"mlp\.(gate|up)_proj",
    },
    writers=r"self_attn\.o_proj|mlp\.down_proj",
)
_EXPERTS = r"mlp\.gate|mlp\.shared_expert_gate|mlp\.(experts\.\d+|shared_expert)\.(gate|up)_proj"
_QWEN_MOE = replace(
    _LLAMA,
    readers={**_LLAMA.readers, "post_attention_layernorm": rf"mlp\.(gate|up)_proj|{_EXPERTS}"},
    writers=rf"{_LLAMA.writers}|mlp\.(experts\.\d+|shared_expert)\.down_proj",
    apart=r"self_attn\.[qk]_norm",
)
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "smollm3", "granite"), _LLAMA),
    "qwen3": replace(_LLAMA, apart=r"self_attn\.[qk]_norm"),
    "gemma": replace(_LLAMA, one=1.0),
    "mixtral": replace(
        _LLAMA,
        readers={
            **_LLAMA.readers,
            "post_attention_layernorm": r"block_sparse_moe\.(gate|experts\.\d+\.w[13])",
        },
        writers=r"self_attn\.o_proj|block_sparse_moe\.experts\.\d+\.w2",
    ),
    "qwen2_moe": _QWEN_MOE,
    "qwen3_moe": _QWEN_MOE,
}
"""By the kind of model; routers of experts read the stream as other layers do."""
_LATE = "its layers normalize what they add to the residual stream, by weights that no layer can take in"
_MEAN = "its norms subtract the mean, which a rotation does not keep"
_REFUSED = {
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text", "glm4", "olmo2", "olmo3", "exaone4"), _LATE),
    **dict.fromkeys(("cohere", "cohere2", "falcon", "gpt2", "gpt_neox", "gptj", "opt", "phi"), _MEAN),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Role of a tensor in the stream.

    reads, writes: whether its inputs, or its outputs, are the stream. of_heads: whether the other side are
    values of heads. norm: the tensor that is folded into its inputs, or None.
    """

    reads: bool = False
    writes: bool = False
    of_heads: bool = False
    norm: str | None = None

    @property
    def is_norm(self) -> bool:
        """Whether it is the weight of a norm."""
        return not (self.reads or self.writes or self.of_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The residual stream of a model.

    width: its numbers. head: numbers of a head's values. one: what a norm adds to its weight. roles: by
    tensor, the head among them; others have no part in it. tied: whether the head is the embedding.
    """

    width: int
    head: int
    one: float
    roles: Mapping[str, Role]
    tied: bool


def stream_of(entries: Entries, config: Mapping[str, Any]) -> Stream:
    """Return the residual stream of the model of these tensors.

    Raises UnsupportedError for a family whose stream is not known or cannot be rotated, and for a tensor that
    the family has not; CheckpointError for one that is missing, or whose shape contradicts the configuration.
    """
    family = _family(config)
    tied = says_tied(config) or f"{HEAD}{WEIGHT}" not in entries
    if HEAD not in heads_of(config) and tied:
        raise UnsupportedError(
            f"the model has no {HEAD} (architectures is {config.get('architectures')!r:.60}): what it gives "
            "is the residual stream, which would be rotated; pass the model with its head"
        )
    found = {name: _role(entry, family, config) for name, entry in entries.items()}
    roles = {name: role for name, role in found.items() if role is not None}
    roles[f"{HEAD}{WEIGHT}"] = Role(reads=True, norm=f"{NORM}{WEIGHT}")
    width, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    head = width // heads if config.get("head_dim") is None else _number(config, "head_dim")
    norms = {
        f"model.layers.{n}.{norm}{WEIGHT}"
        for n in range(_number(config, "num_hidden_layers"))
        for norm in family.readers
    }
    needed = {f"{EMBEDDING}{WEIGHT}", *norms, *(role.norm for role in roles.values() if role.norm)}
    for name in sorted(needed - entries.keys()):
        raise CheckpointError(f"tensor {printable(name)} is missing; pass the whole model")
    for name, role in roles.items():
        if name in entries:
            _check(entries[name], role, width, head)
    return Stream(width=width, head=head, one=family.one, roles=roles, tied=tied)


def _family(config: Mapping[str, Any]) -> Decoder:
    kind = model_type(config)
    if kind in FAMILIES:
        return FAMILIES[kind]
    if not kind:
        raise UnsupportedError(
            "no config.json names the family of the model, so that nothing says which tensors read its "
            "residual stream; pass the directory with it"
        )
    reason = _REFUSED.get(kind, "which of its tensors read and write the residual stream is not known here")
    raise UnsupportedError(
        f"models of the family {printable(kind)} are not rotated: {reason}; those that are: "
        f"{', '.join(sorted(FAMILIES))}"
    )


def _number(config: Mapping[str, Any], key: str) -> int:
    found = config.get(key)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise CheckpointError(f"{key} (={found!r:.40}) of config.json must be a positive integer; correct it")
    return found


def _role(entry: TensorEntry, family: Decoder, config: Mapping[str, Any]) -> Role | None:
    """Return the role of a tensor in the stream, or None."""
    module, is_bias = module_of(entry.name).removesuffix(BIAS), entry.name.endswith(BIAS)
    outside = {EMBEDDING: Role(reads=True), NORM: Role(), HEAD: Role(reads=True)}
    if module in outside:
        return None if is_bias and module == HEAD else outside[module]
    found = _LAYER.fullmatch(module)
    inner = "" if found is None else found["inner"]
    if found is not None and inner in family.readers:
        return Role()
    for norm, readers in family.readers.items():
        if found is not None and re.fullmatch(readers, inner):
            of_heads = re.fullmatch(family.values, inner) is not None
            if is_bias:
                return Role(of_heads=True) if of_heads else None
            return Role(reads=True, of_heads=of_heads, norm=f"{found['layer']}.{norm}{WEIGHT}")
    if re.fullmatch(family.writers, inner):
        return Role(writes=True, of_heads=not is_bias and re.fullmatch(family.outputs, inner) is not None)
    if re.fullmatch(family.apart, inner):
        return None
    raise UnsupportedError(
        f"tensor {printable(entry.name)} is not one that models of the family {model_type(config)} have, so "
        "whether it reads the residual stream is not known; pass a model without it"
    )


def _check(entry: TensorEntry, role: Role, width: int, head: int) -> None:
    """Raise CheckpointError for a dtype or shape against the role."""
    wanted = 2 if role.reads or (role.writes and not entry.name.endswith(BIAS)) else 1
    rows, columns = (*entry.shape, 1)[:2] if entry.shape else (0, 0)
    stream, values = (columns, rows) if role.reads else (rows, columns)
    if role.of_heads and not role.reads and not role.writes:
        stream, values = width, rows
    if (
        entry.dtype not in WEIGHT_DTYPES
        or len(entry.shape) != wanted
        or stream != width
        or (role.of_heads and values % head)
    ):
        raise CheckpointError(
            f"tensor {printable(entry.name)} ({entry.dtype}, shape {list(entry.shape)}) does not fit the "
            f"hidden_size {width} and heads of {head} of config.json; correct it, or pass the original model"
        )
