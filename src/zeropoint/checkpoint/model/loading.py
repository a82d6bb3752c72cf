"""Load a quantized checkpoint into a model with packed layers.

Codes, scales and zero points become what the file holds, bit for bit; other tensors are copied into it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from ...codecs.data_scales import InputNames
from ...codecs.protocol import Codec
from ...codecs.records import Known
from ...codecs.registry import DEFAULT
from ...codecs.tensor_fields import WeightPart
from ...errors import CheckpointError, UnsupportedError, printable
from ...models import Conversion, Converted, LocalQuantize, PackedWeight, QuantizedLinear
from ...models.recipe_layers import require_model
from ...models.saving_guard import guarded
from ...models.shared_linear import TRANSPOSED
from ...models.unfuse import replace_modules, unfused
from ...params import QuantizationParams
from ...recipes import Activation
from ...schemes import TensorScale
from ...signatures import by_signature
from ...tensor import QuantizedTensor
from ...training import FakeQuantize
from ..read.decoding import read_lines, read_tensor
from ..read.quantized_layers import StoredLayer, StoredLayers, find_layers
from ..read.source import Source, open_source
from ..read.storage import Files, OpenFiles, shown
from .parameter_names import WEIGHT, WeightRows, file_rows, file_tensors
from .parts import layer_scheme_of, whole_scale


@by_signature
def load_checkpoint(model: nn.Module, directory: Path | str, *, inplace: bool = False) -> Conversion:
    """Return ``model`` with a checkpoint's weights, quantized ones in packed layers.

    Args:
        model: of the same architecture, of floats, with any numbers, such as
            ``AutoModel.from_config(config)``.
        directory: what :func:`~zeropoint.checkpoint.model.saving.save_checkpoint`, ``zeropoint quantize`` or
            another tool wrote in the same layouts. Inputs are quantized as its configuration says.
        inplace: whether ``model`` itself is changed; otherwise a copy is.

    Raises:
        CheckpointError: where files are damaged, or where they and the model do not have the same weights.
        UnsupportedError: for layers or layouts that are not read.
    """
    require_model(model)
    source = open_source(directory)
    target = model if inplace else copy.deepcopy(model)
    state = {name: t for name, t in target.state_dict().items() if isinstance(t, torch.Tensor)}
    with OpenFiles() as files, unfused(target) as root:
        linears = {name: m for name, m in root.named_modules() if type(m) is nn.Linear}
        where = file_rows(root, linears)
        stored = _stored(source, where, linears)
        _load_floats((target, state), linears, where, stored, files)
        made = _layers(linears, where, (source, stored), files)
        replace_modules(root, {linears[name]: layer for name, layer in made.items()})
        result = made.get("", root)
        codec = stored.layers[0].codec if stored.layers else DEFAULT
    records = tuple(_record(name, layer, codec) for name, layer in made.items())
    return Conversion(model=guarded(result), layers=records)


def _stored(source: Source, where: Sequence[WeightRows], linears: Mapping[str, nn.Linear]) -> StoredLayers:
    """Return the files' quantized layers, with the model's shapes and dtypes."""
    known = {
        rows.module: Known(
            shape=(len(rows.index), linears[rows.layer].in_features), dtype=linears[rows.layer].weight.dtype
        )
        for rows in where
    }
    stored = find_layers(source, known.get)
    if stored.problems:
        raise CheckpointError(f"{shown(source.root)} cannot be loaded: {stored.problems[0]}")
    strange = next((layer for layer in stored.layers if layer.module not in known), None)
    if strange is not None:
        raise CheckpointError(
            f"{printable(strange.name)} is quantized, but the model has no Linear layer of that name; pass a "
            "model of the same architecture"
        )
    other = next((layer.codec for layer in stored.layers if layer.codec.input_names is None), None)
    if other is not None:
        raise UnsupportedError(
            f"{shown(source.root)} is quantized in {other.title}, which models here are not loaded from; "
            "dequantize it with zeropoint dequantize"
        )
    return stored


def _load_floats(
    model: tuple[nn.Module, Mapping[str, torch.Tensor]],
    linears: Mapping[str, nn.Linear],
    where: Sequence[WeightRows],
    stored: StoredLayers,
    files: Files,
) -> None:
    """Copy unquantized tensors into the model through views with file names.

    model: with its state before it was unfused. linears: its layers, which share memory with that.
    """
    target, state = model
    views = file_tensors(target, state)
    every = [layer.codec.input_names for layer in stored.layers[:1]]
    names = {suffix for own in every if own is not None for suffix in own.suffixes}
    entries = {entry.name: entry for entry in stored.others if entry.name.rpartition(".")[2] not in names}
    # Parts of a tensor, some of which may be quantized; files then have the others one by one, too.
    apart = {rows.module + WEIGHT: rows for rows in where if rows.tensor != rows.module + WEIGHT}
    held = {layer.module + WEIGHT for layer in stored.layers} | (entries.keys() & apart.keys())
    short = {rows.tensor for rows in where if rows.module + WEIGHT not in held}
    missing = views.keys() - entries.keys() - ({rows.tensor for rows in where} - short)
    strange = entries.keys() - views.keys() - apart.keys()
    for lost, of in ((missing, "files"), (strange, "model")):
        if lost:
            raise CheckpointError(
                f"{printable(min(lost))} (of {len(lost)}) is not in the {of}; pass a model of the same "
                "architecture as the checkpoint"
            )

    def read(name: str) -> torch.Tensor:
        return read_tensor(entries[name], files)

    fill(target, state, views, entries.keys() & views.keys(), read)
    for name in entries.keys() & apart.keys():
        weight = linears[apart[name].layer].weight.data
        value, index = read(name), apart[name].index
        _require_shape(name, value, weight[index].shape)
        weight[index] = value.to(weight.dtype)


def fill(
    model: nn.Module,
    state: Mapping[str, torch.Tensor],
    views: Mapping[str, torch.Tensor],
    names: Iterable[str],
    read: Callable[[str], torch.Tensor],
) -> None:
    """Copy tensors of files into ``state``, some of a model's tensors.

    views: these as files have them, in their memory but where files join several. names: of tensors of files.
    read: reads one. Raises CheckpointError for a tensor of another shape, UnsupportedError for a dtype that
    torch lacks.
    """
    memory = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    joined = list[str]()
    for name in names:
        view = views[name]
        if view.untyped_storage().data_ptr() not in memory:
            joined.append(name)
            continue
        value = read(name)
        # Releases of transformers save experts in either order of axes.
        if "experts" in name.split(".") and view.shape != value.shape == view.mT.shape:
            value = value.mT
        _require_shape(name, value, view.shape)
        view.copy_(value)
    if joined:
        viewed = {view.untyped_storage().data_ptr() for view in views.values()}
        parts = {n: t for n, t in state.items() if t.untyped_storage().data_ptr() not in viewed}
        _fill_parts(model, parts, {name: views[name].shape for name in joined}, read)


def _require_shape(name: str, value: torch.Tensor, shape: torch.Size) -> None:
    if value.shape != shape:
        raise CheckpointError(
            f"{printable(name)} of shape {list(value.shape)} does not fit the model, which has "
            f"{list(shape)} there; pass a model of the same architecture"
        )


def _fill_parts(
    model: nn.Module,
    parts: Mapping[str, torch.Tensor],
    shapes: Mapping[str, torch.Size],
    read: Callable[[str], torch.Tensor],
) -> None:
    """Copy tensors that files join into their parts.

    shapes: of the tensors, by name. Where rows go is asked of transformers, and where elements go of tensors
    that are joined otherwise.
    """
    for by_rows in (True, False):
        left, filled = dict[str, torch.Size](), set[str]()
        numbers, lines, begins = _numbered(parts, by_rows=by_rows)
        places = file_tensors(model, numbers)
        for name, shape in shapes.items():
            at = places[name]
            if by_rows and at.ndim > 1 and at.shape[-1] == 2 and torch.equal(at[..., 0], at[..., 1]):
                at = at[..., 0]
            if at.shape not in (shape, shape[:-1]):
                left[name] = shape
                continue
            value = read(name)
            _require_shape(name, value, shape)
            rows, at = value.reshape(at.numel(), -1), at.flatten()
            for part, own in lines.items():
                inside = (at >= begins[part]) & (at < begins[part] + len(own))
                if bool(inside.any()):
                    own[at[inside] - begins[part]] = rows[inside].to(own.dtype)
                    filled.add(part)
        shapes, parts = left, {name: part for name, part in parts.items() if name not in filled}
        if not shapes:
            return
    raise UnsupportedError(f"{printable(next(iter(shapes)))} is stored with what the model does not have")


def _numbered(
    parts: Mapping[str, torch.Tensor], *, by_rows: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, int]]:
    """Return numbers of rows or elements, these rows, and first numbers.

    by_rows: in two columns; vectors are numbered by their elements all the same.
    """
    numbers, lines, begins, end = dict[str, torch.Tensor](), dict[str, torch.Tensor](), dict[str, int](), 0
    for name, part in parts.items():
        whole = by_rows and part.ndim > 1
        lines[name] = part.view(-1, part.shape[-1] if whole else 1)
        begins[name], end = end, end + len(lines[name])
        own = torch.arange(begins[name], end)
        numbers[name] = (
            torch.stack([own, own], -1).view(*part.shape[:-1], 2) if whole else own.view(part.shape)
        )
    return numbers, lines, begins


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows of a layer in codes, and its stored input quantization."""

    index: torch.Tensor
    codes: QuantizedTensor
    input: FakeQuantize | LocalQuantize | Activation | None


def _layers(
    linears: Mapping[str, nn.Linear],
    where: Sequence[WeightRows],
    found: tuple[Source, StoredLayers],
    files: Files,
) -> dict[str, QuantizedLinear]:
    """Return the packed layers by name."""
    source, stored = found
    records = {layer.module: layer for layer in stored.layers}
    pieces: dict[str, list[_Piece]] = {}
    for rows in where:
        layer = records.get(rows.module)
        if layer is not None:
            given = input_quantizer(layer, stored.reader.input_of(layer.module), source, files)
            lines = read_lines(layer, files, 0, layer.shape[0])
            codes = layer.codec.decode(layer.layer, lines, WeightPart(0, layer.shape, layer.dtype))
            codes.params.validate(negative_scales=layer.negative_scales)
            pieces.setdefault(rows.layer, []).append(_Piece(rows.index, codes, given))
    made = {}
    for name, own in pieces.items():
        linear = linears[name]
        if sum(len(piece.index) for piece in own) != linear.out_features:
            raise CheckpointError(f"layer {name} is quantized in part, which no layer of ours can be")
        weight, transposed = PackedWeight(_joined(own)), TRANSPOSED in vars(linear)
        made[name] = QuantizedLinear(weight, linear.bias, own[0].input, transposed=transposed)
        made[name].train(linear.training)
    return made


def _joined(pieces: Sequence[_Piece]) -> QuantizedTensor:
    """Return the rows of all pieces, in the order of the layer."""
    first = pieces[0].codes
    order = torch.cat([piece.index for piece in pieces])
    if len(pieces) == 1 and torch.equal(order, torch.arange(len(order))):
        return first
    if len({piece.codes.scheme for piece in pieces}) > 1 or not PackedWeight(first).rows_are_apart:
        raise UnsupportedError(f"parts of a layer under {first.scheme} cannot be joined; use channel or g<N>")
    back = order.argsort()
    whole, every = (len(order), first.shape[1]), [piece.codes for piece in pieces]

    def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if all(len(part) == q.shape[0] for part, q in zip(parts, every, strict=True)):
            return torch.cat(list(parts))[back]
        if any(not torch.equal(part, parts[0]) for part in parts):  # of the whole matrix
            raise UnsupportedError(f"parts of a layer under {first.scheme} have several scales for it")
        return parts[0]

    stored = [joined(parts) for parts in zip(*(q.params.stored for q in every), strict=True)]
    params = QuantizationParams.of(first.scheme, whole, first.params.dtype, stored)
    data = joined([q.data for q in every])
    return QuantizedTensor(data=data, params=params, shape=whole, dtype=first.dtype)


def input_quantizer(
    layer: StoredLayer, given: Activation | None, source: Source, files: Files
) -> FakeQuantize | LocalQuantize | Activation | None:
    """Return the input quantization of a layer, with the parameters in files.

    given: what the configuration says. source: which holds these parameters; its codec has names for them
    unless they come from each tensor. files: of ``source``, open. Raises CheckpointError for missing ones.
    """
    names = layer.codec.input_names
    if given is None or given.dynamic:
        return given
    assert names is not None
    if given.local:
        return _local(layer.module, given, names, source, files)
    entries, module = source.entries, layer.module
    found = (entries.get(f"{module}.{end}") for end in (names.scale, *names.also))
    scale, zero = next(filter(None, found), None), entries.get(f"{module}.{names.zero_point}")
    if scale is None or math.prod(scale.shape) != 1 or (zero is not None and math.prod(zero.shape) != 1):
        raise CheckpointError(f"{layer.module}.{names.scale} is missing, or not one number")
    number = read_tensor(scale, files).reshape(()).float()
    point = 0 if zero is None else int(read_tensor(zero, files).reshape(()))
    params = QuantizationParams.new(float(number), point, given.scheme)
    return FakeQuantize(replace(params, dtype=layer.dtype))


def _local(module: str, given: Activation, names: InputNames, source: Source, files: Files) -> LocalQuantize:
    """Return the local quantizer that reproduces the scale in the file."""
    entry = source.entries.get(f"{module}.{names.global_scale}")
    scale = (
        None if entry is None or math.prod(entry.shape) != 1 else read_tensor(entry, files).reshape(1).float()
    )
    if scale is None or not bool(torch.isfinite(scale) & (scale > 0)):
        raise CheckpointError(f"{module}.{names.global_scale} is missing, or not one positive number")
    unit = whole_scale(LocalQuantize(given, 1.0))
    inverse = given.scheme.dialect.tensor_scale is TensorScale.RECIPROCAL
    near = unit / scale if inverse else scale / unit
    for limit in (near, near.nextafter(near * 2), near.nextafter(near / 2)):
        quantizer = LocalQuantize(given, float(limit))
        if torch.equal(whole_scale(quantizer), scale):
            return quantizer
    return LocalQuantize(given, float(near))


def _record(name: str, layer: QuantizedLinear, codec: Codec) -> Converted:
    codes = layer.weight.quantized()
    return Converted(
        name=name,
        type="Linear",
        shape=codes.shape,
        gives=layer_scheme_of(layer, codec).assignment,
        reason="",
        nbytes=(math.prod(codes.shape) * codes.dtype.itemsize, codes.nbytes),
        error=math.nan,
    )
