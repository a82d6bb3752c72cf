"""Table of llama.cpp's model families, a row for each.

A row says what llama.cpp calls the architecture and its tensors. The names of a layer's modules are read as
``PREFIX layers.N.MODULE`` and written as ``blk.N.MODULE``. This module finds the row and names tensors by it.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from ...architectures import GATE_UP, MOST_EXPERTS, Config, model_type, text_config
from ...errors import CheckpointError, printable
from ...libraries import reading
from ..divided_tensors import RowRun, TensorPiece, Whole
from ..stored_forms import OMITTED, RowOrder, Shape, StoredForm
from . import decoder_families, divided_families, expert_families, hybrid_families, transposed_families
from .family import Change, Division, Family, head_size, number_of, parts_of

_OF_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
"""The gate, up and down of all experts of a layer."""
FAMILIES: tuple[Family, ...] = (
    *decoder_families.FAMILIES,
    *expert_families.FAMILIES,
    *hybrid_families.FAMILIES,
    *divided_families.FAMILIES,
    *transposed_families.FAMILIES,
)
_NEEDED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
"""Keys of config.json without which nothing can be said."""
_MOST_LAYERS = 1 << 12
"""More than any model has: no config.json makes us count further."""
_AS_USUAL = Change()


@reading("config.json does not describe a model of llama.cpp", "download the checkpoint again")
def family_of(config: Config) -> Family | None:
    """Return the family that a configuration describes in full, or None.

    >>> sizes = dict.fromkeys(("num_hidden_layers", "hidden_size", "intermediate_size"), 8)
    >>> family_of({"model_type": "mistral", "num_attention_heads": 2, **sizes}).architecture
    'llama'
    """
    kind = model_type(config)
    for family in FAMILIES:
        if kind in (family.model_type, *family.types) and _counts(config):
            text = family.described(config)
            found = [text.get(key) for key in _NEEDED]
            found += [number_of(text, keys) for keys in family.numbers.values()]
            if (
                family.when(text)
                and _counts(text)
                and all(type(number) is int and number > 0 for number in found)
            ):
                return family
    return None


def _counts(config: Config) -> bool:
    """Return whether the number of layers is absent or plausible."""
    layers = text_config(config).get("num_hidden_layers", 1)
    return type(layers) is int and 0 < layers <= _MOST_LAYERS


def expert_count(family: Family, config: Config) -> int:
    """Return how many experts a layer has, or 0."""
    return _experts(family, family.described(config)) if family.experts else 0


def _experts(family: Family, text: Config) -> int:
    return number_of(text, family.numbers.get("expert_count", ())) or 0


@functools.lru_cache(maxsize=64)
def _patterns(family: Family) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    prefixes = "|".join(sorted(map(re.escape, family.prefixes), key=len, reverse=True))
    name = rf"(?:{prefixes})(?:{re.escape(family.block)}\.(?P<n>\d+)\.)?(?P<rest>.+)"
    stored = r"(?:blk\.(?P<n>\d+)\.)?(?P<rest>[\w.]+)"
    return re.compile(name), re.compile(stored), re.compile(family.left_out)


def form_of(family: Family, name: str, shape: Shape, config: Config) -> StoredForm:
    """Return the stored form of a model tensor, or OMITTED.

    Raises CheckpointError for a name that is not one of the family, and for heads that are not whole.
    """
    pattern, _, left_out = _patterns(family)
    text, found = family.described(config), pattern.fullmatch(name)
    if left_out.search(name) or (found and int(found["n"] or 0) >= text["num_hidden_layers"]):
        return OMITTED  # layers behind those that the model counts predict further tokens
    stored, part = None, None
    if found is not None and found["n"] is None:
        stored = _renamed(family.modules, {}, found["rest"])
    elif found is not None:
        stored = _renamed(family.layers, family.tensors, found["rest"])
        if stored is None and len(shape) == 3:
            stored = _of_all(family, found["rest"])
        if stored is None:
            stored, part = _of_expert(family, found["rest"], _experts(family, text))
    if found is None or stored is None:
        raise CheckpointError(
            f"tensor {printable(name)} has no name in GGUF files of {family.architecture}, so llama.cpp "
            "would not load the file; remove it from the checkpoint"
        )
    block = "" if found["n"] is None else f"blk.{found['n']}."
    form = _form(family, f"{block}{stored}", shape, text)
    form.require_whole(shape[0] if shape else 1, shape[-1] if shape else 1, printable(name))
    return form._replace(part=part)


def _renamed(modules: Mapping[str, str], tensors: Mapping[str, str], name: str) -> str | None:
    """Return the other name of a tensor: its own, or its module's."""
    module, _, kind = name.rpartition(".")
    if name in tensors:
        return tensors[name]
    return f"{modules[module]}.{kind}" if module in modules and kind in ("weight", "bias") else None


def _of_all(family: Family, name: str) -> str | None:
    """Return the stacked tensor of a fused projection's name."""
    holder, _, kind = name.removesuffix(".weight").rpartition(".")
    names = dict(family.experts).get(holder, ())
    return f"{_OF_EXPERTS[names.index(kind)]}.weight" if kind in names else None


def pieces_of(family: Family, name: str, shape: Shape, config: Config) -> Sequence[TensorPiece]:
    """Return the pieces of a model tensor, none if whole."""
    pattern, _, left_out = _patterns(family)
    found = pattern.fullmatch(name)
    if found is None or found["n"] is None or found["rest"] in family.tensors:
        return ()
    division = _divisions(family).get(found["rest"])
    if division is None or (len(shape) < 3 and _of_all(family, division.names[0])):
        return ()
    text = family.described(config)
    if left_out.search(name) or int(found["n"]) >= text["num_hidden_layers"]:
        return ()
    stem = name.removesuffix(found["rest"])
    return [piece._replace(name=stem + piece.name) for piece in division.pieces(shape, text)]


def wholes_of(family: Family, shapes: Mapping[str, Shape], config: Config) -> Sequence[Whole]:
    """Return the divided tensors, from all tensors' shapes by name."""
    text, stems = family.described(config), list[str]()
    for layer in range(text["num_hidden_layers"] if family.divided else 0):
        stems.append(f"{family.prefixes[0]}{family.block}.{layer}.")
    found = list[Whole]()
    for stem, (name, division) in itertools.product(stems, family.divided.items()):
        mine = [_shape_of(family, stem + each, shapes, config) for each in division.names]
        there = [shape for shape in mine if shape is not None]
        if not there or len(there) < len(mine):
            continue
        shape = division.whole(there, text)
        pieces = [piece._replace(name=stem + piece.name) for piece in division.pieces(shape, text)]
        if [piece.shape for piece in pieces] != mine:
            raise CheckpointError(
                f"{printable(stem + name)} is in pieces of shapes {mine}, which are not those of "
                "config.json; export the file again"
            )
        single = [each for piece in pieces for each in _of_each(piece, shapes)]
        found.append(Whole(stem + name, shape, single, division.transposed))
    return found


def _shape_of(family: Family, name: str, shapes: Mapping[str, Shape], config: Config) -> Shape | None:
    """Return the shape of a piece or its experts', or None."""
    if name in shapes:
        return shapes[name]
    first, count = shapes.get(_of_one(name, 0)), expert_count(family, config)
    if first is None or not 0 < count <= MOST_EXPERTS:
        return None
    return (count, *first) if all(_of_one(name, at) in shapes for at in range(count)) else None


def _of_one(name: str, expert: int) -> str:
    holder, _, last = name.rpartition(".")
    return f"{holder}.{expert}.{last}.weight"


def _of_each(piece: TensorPiece, shapes: Mapping[str, Shape]) -> Iterator[TensorPiece]:
    """Yield a piece, or its experts' pieces where files have these."""
    if piece.name in shapes:
        yield piece
        return
    ((first, (experts, *sizes), (stride, *strides)),) = piece.rows
    for expert in range(experts):
        rows = RowRun(first + expert * stride, tuple(sizes), tuple(strides))
        yield TensorPiece(_of_one(piece.name, expert), piece.shape[1:], (rows,))


@functools.lru_cache(maxsize=64)
def _divisions(family: Family) -> Mapping[str, Division]:
    """Return the divided tensors of a layer, fused gate-up included."""
    usual = {
        f"{holder}.{GATE_UP}": parts_of(f"{holder}.{gate}", f"{holder}.{up}")
        for holder, (gate, up, _) in family.experts
        if gate and f"{holder}.{GATE_UP}" not in family.tensors
    }
    return {**usual, **family.divided}


def _of_expert(family: Family, name: str, count: int) -> tuple[str | None, tuple[int, int] | None]:
    """Return an expert projection's stacked tensor, and its part."""
    *holder, number, projection, kind = ["", "", "", *name.split(".")]
    names = dict(family.experts).get(".".join(filter(None, holder)), ())
    if (
        projection not in names
        or kind not in ("weight", "bias")
        or not number.isdecimal()
        or int(number) >= count
    ):
        return None, None
    return f"{_OF_EXPERTS[names.index(projection)]}.{kind}", (int(number), count)


def _form(family: Family, name: str, shape: Shape, text: Config, *, of_file: bool = False) -> StoredForm:
    """Return the form of a file's tensor, by model or file shape."""
    own = re.sub(r"^blk\.\d+\.", "", name)
    module, _, kind = own.rpartition(".")
    change = family.changes.get(own, _AS_USUAL)
    norm = kind == "weight" and module.endswith("_norm")
    halves = family.halves and module in ("attn_q", "attn_k")
    reshaped = None if change.shape is None else change.shape(text)
    shapes = None
    if reshaped is not None:
        shapes = (reshaped.to_model(shape), shape) if of_file else (shape, reshaped.to_file(shape))
    return StoredForm(
        name=name,
        rows=RowOrder(head_size(text), 2) if halves else change.rows and change.rows(text),
        columns=change.columns and change.columns(text),
        negated_exp=change.negated_exp,
        plus=family.plus if norm and not change.plain else 0.0,
        float32=len(shape) < 2 or norm or module in family.wide or kind != "weight",
        shapes=None if shapes is None or shapes[0] == shapes[1] else shapes,
    )


@functools.lru_cache(maxsize=64)
def _inverse(family: Family) -> tuple[Mapping[str, str], Mapping[str, str], Mapping[str, str]]:
    """Return model names by llama.cpp's: modules, layer modules, tensors."""
    tables = family.modules, family.layers, family.tensors
    whole, layers, tensors = ({new: old for old, new in table.items()} for table in tables)
    return whole, layers, tensors


def model_names(
    family: Family, stored: str, shape: Shape, config: Config
) -> Sequence[tuple[str, StoredForm]] | None:
    """Return the model's names and forms for a file's tensor.

    None says that it is no such tensor. Raises CheckpointError for heads that are not whole, and for another
    number of experts than the configuration says.
    """
    found = _patterns(family)[1].fullmatch(stored)
    if found is None:
        return None
    block = "" if found["n"] is None else f"{family.block}.{found['n']}."
    module, _, kind = found["rest"].rpartition(".")
    whole, layers, tensors = _inverse(family)
    if (
        block
        and family.experts
        and module in _OF_EXPERTS
        and kind in ("weight", "bias")
        and found["rest"] not in tensors
    ):
        return _experts_of(family, f"{family.prefixes[0]}{block}", (stored, module, kind), shape, config)
    name = _renamed(layers if block else whole, tensors if block else {}, found["rest"])
    if name is None:
        return None
    # transformers keeps the head next to the model.
    prefix = "" if name.startswith("lm_head.") else family.prefixes[0]
    form = _form(family, stored, shape, family.described(config), of_file=True)
    mine = form.model_shape(shape)
    form.require_whole(mine[0] if mine else 1, mine[-1] if mine else 1, printable(stored))
    return [(f"{prefix}{block}{name}", form)]


def _experts_of(
    family: Family, stem: str, stored: tuple[str, str, str], shape: Shape, config: Config
) -> Sequence[tuple[str, StoredForm]]:
    """Return all experts' names in a tensor of name, module and kind."""
    (holder, names), (name, module, kind) = family.experts[0], stored
    count, projection = expert_count(family, config), names[_OF_EXPERTS.index(module)]
    if len(shape) < 2 or shape[0] != count or count > MOST_EXPERTS or 0 in shape:
        raise CheckpointError(
            f"{printable(name)} has shape {list(shape)}, but must hold the matrices of {count} experts"
        )
    form = _form(family, name, shape[1:], family.described(config))
    return [
        (f"{stem}{holder}.{number}.{projection}.{kind}", form._replace(part=(number, count)))
        for number in range(count)
    ]
