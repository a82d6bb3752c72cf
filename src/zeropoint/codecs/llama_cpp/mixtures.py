"""Mixtures of llama.cpp, such as Q4_K_M: a type per tensor.

A mixture has a type for most tensors and rules for some; the first that fits decides. Then a type whose
block does not divide a row gives way to one of smaller blocks, and a tensor that none divides stays as it is.
Mixtures that llama.cpp calls like a type have ``mostly_`` before their names, as in its own table
(``LLAMA_FTYPE_MOSTLY_Q6_K``): ``q6_k`` alone is the type for all linear layers. With an importance matrix
some rules are others.

Source: ggml-org/llama.cpp, src/llama-quant.cpp (llama_tensor_get_type).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ...architectures import Config
from ..containers.gguf import TYPES
from ..model_format import WEIGHTED
from ..stored_forms import OMITTED, StoredForm
from .families import expert_count, form_of
from .family import Family
from .model_values import model_values


class _Place(NamedTuple):
    """Position of a tensor: number, total, and queries per key head.

    Those that make values are numbered among themselves, others by the layer, or, in a model without experts,
    among tensors of their name.
    """

    layer: int
    layers: int
    shared: int


def _more_bits(at: _Place) -> bool:
    eighth = at.layers // 8
    return at.layer < eighth or at.layer >= 7 * at.layers // 8 or (at.layer - eighth) % 3 == 2


def _always(at: _Place) -> bool:
    return True


def _shared(at: _Place) -> bool:
    return at.shared >= _MANY


def _among(count: int) -> Callable[[_Place], bool]:
    return lambda at: at.layer < count


def _first_part(of: int) -> Callable[[_Place], bool]:
    return lambda at: at.layer < at.layers // of


_MANY = 4
"""Query heads that share a head of keys from which on it gets more bits."""
MIXTURES: Mapping[str, str] = MappingProxyType({
    "q2_k_s": "q2_k", "q3_k_s": "q3_k", "q3_k_m": "q3_k", "q3_k_l": "q3_k", "q4_k_s": "q4_k",
    "q4_k_m": "q4_k", "q5_k_s": "q5_k", "q5_k_m": "q5_k",
    **{
        f"mostly_{name}": name
        for name in (
            "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q6_k", "iq4_nl", "iq4_xs", "tq1_0", "tq2_0",
        )
    },
})
"""The type of most tensors of each."""
FILE_TYPES: Mapping[str, int] = MappingProxyType({
    "mostly_q4_0": 2, "mostly_q4_1": 3, "mostly_q8_0": 7, "mostly_q5_0": 8, "mostly_q5_1": 9,
    "mostly_q2_k": 10, "q3_k_s": 11, "q3_k_m": 12, "q3_k_l": 13, "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16,
    "q5_k_m": 17, "mostly_q6_k": 18, "q2_k_s": 21, "mostly_iq4_nl": 25, "mostly_iq4_xs": 30,
    "mostly_tq1_0": 36, "mostly_tq2_0": 37,
})
"""The number that llama.cpp has for a file of each (``llama_ftype``)."""
OF_IMPORTANCE = frozenset({"q2_k_s"})
"""Those that llama.cpp does not make without an importance matrix."""
_V, _K, _DOWN, _OUT = "attn_v", "attn_k", "ffn_down", "attn_output"
_VALUES = MappingProxyType({"attn_qkv": _V})
"""Tensors that the rules take for others."""
_EMBEDDINGS = ("token_embd", "per_layer_token_embd")
_FLOATS = ("per_layer_model_proj",)
"""Tensors that stay as they are."""
_EIGHT = 8
"""Experts of Mixtral, whose attention is so small next to them that it gets more bits."""
_OUT_OF_EIGHT = (
    "mostly_q2_k", "q3_k_s", "q3_k_m", "mostly_iq4_nl", "q4_k_s", "q4_k_m", "mostly_iq4_xs",
)
"""Mixtures in which the output of attention next to eight experts is Q5_K."""
_RULES: tuple[tuple[str, str, Callable[[_Place], bool], str], ...] = (
    ("mostly_q2_k q2_k_s", _V, _shared, "q4_k"), ("mostly_q2_k", _V, _always, "q3_k"),
    ("q3_k_m", _V, _among(2), "q5_k"), ("q3_k_m", _V, _always, "q4_k"), ("q3_k_l", _V, _always, "q5_k"),
    ("mostly_iq4_nl mostly_iq4_xs", _V, _shared, "q5_k"), ("q4_k_m q5_k_m", _V, _more_bits, "q6_k"),
    ("q4_k_s", _V, _among(4), "q5_k"),
    ("mostly_q2_k", _DOWN, _always, "q3_k"),
    ("q3_k_m", _DOWN, _first_part(16), "q5_k"), ("q3_k_m", _DOWN, _always, "q4_k"),
    ("q3_k_l", _DOWN, _always, "q5_k"), ("q4_k_m q5_k_m", _DOWN, _more_bits, "q6_k"),
    ("q4_k_s", _DOWN, _first_part(8), "q5_k"), ("q2_k_s", _DOWN, _first_part(8), "q4_k"),
    ("mostly_q2_k", _OUT, _always, "q3_k"), ("q3_k_m", _OUT, _always, "q4_k"),
    ("q3_k_l", _OUT, _always, "q5_k"),
)
"""Mixtures, tensor, where, and its type."""
_PLAIN_RULES = (("mostly_iq4_nl mostly_iq4_xs", _DOWN, _first_part(8), "q5_k"),)
"""Likewise, without an importance matrix."""
_WEIGHTED_RULES = (
    ("mostly_q4_0", _DOWN, _first_part(8), "q4_1"),
    ("mostly_q5_0", _DOWN, _first_part(8), "q5_1"),
)
"""Likewise, with one."""
SMALLER = MappingProxyType({
    "iq4_xs": "iq4_nl", "q2_k": "q4_0", "q3_k": "q4_0", "tq1_0": "q4_0", "tq2_0": "q4_0", "q4_k": "q5_0",
    "q5_k": "q5_1", "q6_k": "q8_0",
})
"""Smaller type in place of one whose block does not fit."""
_LAYERS_70B = 80


def types_of(
    mixture: str, family: Family, shapes: Mapping[str, tuple[int, ...]], config: Config
) -> dict[str, str]:
    """Return the types of a model's quantized tensors, by name.

    mixture: one of MIXTURES, with WEIGHTED at its end where there is an importance matrix. family: of the
    model. shapes: of all its tensors, by their names in the model. config: config.json.
    """
    forms = {name: form_of(family, name, shape, config) for name, shape in shapes.items()}
    tied = all(form.name != "output.weight" for form in forms.values())
    experts, usual = expert_count(family, config), MIXTURES[mixture.removesuffix(WEIGHTED)]
    found, places = {}, _places(family, forms.values(), config)
    for name, form in forms.items():
        *_, last, kind = ["", *form.name.split(".")]
        if form is OMITTED or form.float32 or kind != "weight" or last in _FLOATS:
            continue
        place, columns = places[form.name], shapes[name][-1]
        head = last == "output" or (tied and last in _EMBEDDINGS)
        last = _VALUES.get(last, last.removesuffix("_exps").removesuffix("_shexp"))
        given = _of_head(usual, columns) if head else _of_tensor(mixture, last, place, experts)
        if last == _V and given in ("q3_k", "q4_k") and _is_70b(family, place):
            given = "q5_k"
        if columns % TYPES[given.upper()].block:
            given = SMALLER.get(given, given)
        if columns % TYPES[given.upper()].block == 0:
            found[name] = given
    return found


def _places(family: Family, forms: Iterable[StoredForm], config: Config) -> dict[str, _Place]:
    """Return where the tensors of a file are, by name."""
    names = sorted({form.name for form in forms if form is not OMITTED}, key=_in_file)
    values = model_values(family, config)
    layers, heads, keys = (
        values.get(f"{family.architecture}.{key}")
        for key in ("block_count", "attention.head_count", "attention.head_count_kv")
    )
    assert isinstance(layers, int)
    assert isinstance(heads, int)
    first = keys[0] if isinstance(keys, Sequence) and not isinstance(keys, str) else keys
    shared = heads // first if isinstance(first, int) and first else 0 if first == 0 else 1
    total = sum(_kind_of(name) == _V for name in names)
    counts, places = Counter[str](), dict[str, _Place]()
    for name in names:
        kind = _kind_of(name)
        by_layer = kind != _V and (kind != _DOWN or bool(family.experts))
        at = _in_file(name)[0] if by_layer else counts[kind]
        counts[kind] += name.endswith(".weight")
        places[name] = _Place(max(0, at), total if kind == _V else layers, shared)
    return places


def _in_file(name: str) -> tuple[int, str]:
    """Return a tensor's sort key in llama.cpp files: layer, name."""
    found = re.match(r"blk\.(\d+)\.", name)
    return (-1 if found is None else int(found[1])), name


def _kind_of(name: str) -> str:
    last = name.split(".")[-2] if name.endswith(".weight") else ""
    return _VALUES.get(last, last)


def _of_head(usual: str, columns: int) -> str:
    return "q8_0" if usual == "q8_0" or columns % TYPES[usual.upper()].block else "q6_k"


def _of_tensor(mixture: str, last: str, place: _Place, experts: int) -> str:
    name = mixture.removesuffix(WEIGHTED)
    if experts == _EIGHT and last in (_V, _K):
        return "q8_0"
    if experts == _EIGHT and last == _OUT:
        return "q5_k" if name in _OUT_OF_EIGHT else MIXTURES[name]
    if last in _EMBEDDINGS and MIXTURES[name] in ("tq1_0", "tq2_0"):
        return "q4_k"
    rules = (*_RULES, *(_PLAIN_RULES if name == mixture else _WEIGHTED_RULES))
    fits = (to for names, of, where, to in rules if of == last and name in names.split() and where(place))
    return next(fits, MIXTURES[name])


def _is_70b(family: Family, place: _Place) -> bool:
    """Return whether llama.cpp counts the model, by layers, as a 70B."""
    many = family.architecture == "qwen2" or (family.architecture == "llama" and place.shared > 1)
    return many and place.layers == _LAYERS_70B
