"""ONNX weights for onnxruntime's MatMulNBits, with codes in groups.

For a weight W of shape (N, K), (outputs, inputs), codes of b bits in groups of g inputs, a power of two:

    M.weight_nbits              UINT8 [N, K / g, g * b / 8]: the fields ``code + 2 ** (b - 1)`` of a group,
                                low bits first, or ``code`` where the format has no sign
    M.weight_nbits_scales       [N, K / g] in the dtype of the model
    M.weight_nbits_zero_points  UINT8 [N, ceil(K / g * b / 8)]: as codes, a row at a time; without it, all are
                                ``2 ** (b - 1)``

M is the initializer's name without ``.weight``. The node, of domain com.microsoft, has the attributes K, N,
bits and block_size; what Gemm adds is a node Add.

Source: onnxruntime 1.31, docs/ContribOperators.md, com.microsoft.MatMulNBits. This module opens no file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from ..errors import CheckpointError, UnsupportedError, ZeropointError
from ..formats.torch_dtypes import format_of, storage_dtype
from ..layout import packing
from ..params.tensors import zero_point_dtype
from ..schemes import PRESETS, Scheme, ZeroPoint
from ..schemes.structure import stored_numbers
from ..tensor import QuantizedTensor
from .block_extents import blocks
from .containers.onnx_graph import (
    BLOCK_SCALES,
    BLOCK_ZEROS,
    BLOCKS,
    MATMUL,
    NBITS,
    GraphLayer,
    Initializer,
    Read,
    attribute_of,
    initializers,
    parsed,
)
from .containers.protocol import Use
from .containers.safetensors import FILE_DTYPES, TORCH_DTYPES
from .engines import ONNXRUNTIME, Loads, always, rules
from .onnx_rewriting import Rewriting, module_name, rewritten
from .protocol import Codec, Contents, Documents, LayerScheme
from .records import Entry, Known, Listing, Reader, Record, record_of
from .tensor_fields import COLUMNS, ZERO_POINT, CodeField, Field, LevelField, TensorSpec, WeightPart

_BITS = (2, 4, 8)
_LEAST_GROUP = 16
_SCALE_DTYPES = ("F32", "F16", "BF16")
_PASSING = ("Transpose", "Identity")
_PRODUCTS = frozenset(("MatMul", "Gemm", *_PASSING, NBITS))
NO_ONNX = always(Loads.NO, "it reads no ONNX models")


class NBitsReader(Reader):
    """The weights of MatMulNBits in one model."""

    def __init__(self, listing: Listing, codec: Codec) -> None:
        _, self._layers = initializers(parsed(listing.graph))

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        """See :class:`Reader`; ``key`` is the name of the layer."""
        return nbits_record(self._layers[key], key, tensors)


def nbits_record(layer: GraphLayer, key: str, tensors: Mapping[str, Entry]) -> Record:
    """Return the weight of a MatMulNBits.

    Raises CheckpointError where node and tensors contradict each other, UnsupportedError for what is not
    read.
    """
    rows, columns, bits, group = (attribute_of(layer.node, n, d) for n, d in _ATTRIBUTES.items())
    scales = tensors.get(BLOCK_SCALES)
    if any(layer.node.input[4:5]) or scales is None or scales.dtype not in _SCALE_DTYPES:
        raise UnsupportedError(
            "its inputs are in groups out of order, or its scales no floats; neither is read"
        )
    if BLOCK_ZEROS in tensors and tensors[BLOCK_ZEROS].dtype != "U8":
        raise UnsupportedError(f"its zero points are {tensors[BLOCK_ZEROS].dtype}, which is not read here")
    if bits not in _BITS or min(rows, columns) < 1 or group < _LEAST_GROUP or group & (group - 1):
        raise CheckpointError(f"its node says N={rows}, K={columns}, bits={bits}, block_size={group}")
    text = f"uint{bits}:g{group}:asym" if BLOCK_ZEROS in tensors else f"int{bits}:g{group}"
    weight = as_written(layer, Scheme.parse(f"{text}:scale=input"))
    scheme = LayerScheme(codec=CODEC, name=str(weight), weight=weight)
    shaped = {part: _Shaped(e.name, e.dtype, _three(e.shape, part, rows)) for part, e in tensors.items()}
    return record_of(scheme, key, shaped, Known((rows, columns), TORCH_DTYPES[scales.dtype]))


def as_written(layer: GraphLayer, found: Scheme) -> Scheme:
    """Return a node's scheme, with the rules that chose its scales.

    The node says them, where we wrote it. Where another tool did, scales of symmetric codes of 4 bits are
    signed, as onnxruntime has them.
    """
    try:
        said = Scheme.parse(layer.node.doc_string)
    except ZeropointError:
        said = Scheme.parse(_SIGNED.sub(r"\1:scale=signed/input", str(found)))
    return said if stored_numbers(said) == stored_numbers(found) else found


_SIGNED = re.compile(r"(int4:g\d+):scale=input$")
_ATTRIBUTES = {"N": 0, "K": 0, "bits": 4, "block_size": 0}


@dataclass(frozen=True, slots=True)
class _Shaped:
    """A tensor in the shape that it has here."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def _three(shape: tuple[int, ...], part: str, rows: int) -> tuple[int, ...]:
    """Return a shape with a line per row, for older files."""
    flat = part != BLOCKS and len(shape) == 1 and shape[0] % rows == 0
    return (rows, shape[0] // rows) if flat else shape


@dataclass(frozen=True)
class ByteZeros(Field):
    """Zero points in bytes, row by row, without a sign."""

    suffix: str
    level = ZERO_POINT

    def spec(self, weight: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
        rows, count = weight.granularity.grid(shape)
        size = (rows, packing.packed_length(count, weight.bits))
        return TensorSpec(suffix=self.suffix, dtype="U8", shape=size)

    def lines(self, q: QuantizedTensor) -> torch.Tensor | None:
        assert q.zero_point is not None
        return packing.pack(q.zero_point + _least(q.scheme), q.scheme.bits)

    def numbers(self, lines: torch.Tensor, weight: Scheme, part: WeightPart) -> torch.Tensor:
        fields = packing.unpack(lines, weight.bits, weight.granularity.grid(part.shape)[1])
        return fields.to(zero_point_dtype(weight)) - _least(weight)


@dataclass(frozen=True)
class MatMulNBits(Codec):
    """See the module and :class:`Codec`. use: how the graph reads the weight."""

    use: Use = MATMUL
    name = "onnx-matmulnbits"
    title = "the layout of MatMulNBits"
    container = "onnx"
    presets = MappingProxyType({name: PRESETS[name] for name in ("w4a16", "w4a16_asym", "w8a16")})
    defaults = MappingProxyType({"scale": "input"})
    engines = rules(
        transformers=NO_ONNX,
        vllm=NO_ONNX,
        tensorrt=NO_ONNX,
        llama_cpp=NO_ONNX,
        onnxruntime=always(Loads.YES, ""),
    )
    usual = (ONNXRUNTIME,)
    reader = NBitsReader
    methods = ("onnx-matmulnbits",)
    parts = MappingProxyType({BLOCKS: True, BLOCK_SCALES: True, BLOCK_ZEROS: True})

    def used(self, use: Use | None) -> MatMulNBits:
        return self if use is None else replace(self, use=use)

    def layout(self, layer: LayerScheme) -> str:
        weight, element = layer.weight, layer.weight.element
        rows, group = blocks(weight)
        if not element.is_whole or weight.bits not in _BITS or rows != 1 or len(weight.scales) != 1:
            raise UnsupportedError(
                f"scheme {weight} has no place in {self.title}; use int4:g<N> or int8:g<N>"
            )
        if group < _LEAST_GROUP or group & (group - 1):
            raise UnsupportedError(f"scheme {weight} has groups of {group}; use g16, g32, g64, g128 or g256")
        symmetric = weight.zero_point is ZeroPoint.NONE
        odd = weight.zero_point is ZeroPoint.REAL or (symmetric and not element.signed)
        if odd or weight.offsets or weight.center:
            raise UnsupportedError(
                f"scheme {weight} has parameters that {self.title} does not hold; use int4, or add asym"
            )
        if _scale_dtype(weight, torch.float32) not in _SCALE_DTYPES or layer.input is not None:
            raise UnsupportedError(f"{self.title} has scales of float dtypes and no inputs; use scale=input")
        return NBITS

    def refusal(self, layer: LayerScheme, shape: tuple[int, ...]) -> str | None:
        others = [name for name in self.use.operators if name not in _PRODUCTS]
        if others:
            return f"read by {' and '.join(others)}, and {NBITS} replaces products of matrices alone"
        return super().refusal(layer, shape)

    def fields(self, layer: LayerScheme) -> tuple[Field, ...]:
        signed = layer.weight.element.signed
        found = (CodeField(BLOCKS, "U8", shifted=signed, blocked=True), LevelField(BLOCK_SCALES))
        return found if layer.weight.zero_point is ZeroPoint.NONE else (*found, ByteZeros(BLOCK_ZEROS))

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`: the model, with its tensors in another file."""
        return rewritten(contents, 1, _replace)


def _scale_dtype(weight: Scheme, dtype: torch.dtype) -> str:
    """Return the stored dtype of scales, or ""."""
    return FILE_DTYPES.get(storage_dtype(weight.scales[0].format_for(format_of(dtype))), "")


def _least(weight: Scheme) -> int:
    """Return the shift of codes to a least code of 0."""
    return 1 << (weight.bits - 1) if weight.element.signed else 0


def _replace(edit: Rewriting, each: Initializer, layer: LayerScheme, shape: tuple[int, int]) -> None:
    """Put MatMulNBits in the place of the products with a weight."""
    module, (rows, columns) = module_name(each), shape
    specs = layer.codec.tensors(layer, shape, edit.dtype(each))
    names = [f"{module}.{spec.suffix}" for spec in specs]
    for name, spec in zip(names, specs, strict=True):
        edit.add(each.graph, name, spec.dtype, spec.shape)
    group = blocks(layer.weight)[COLUMNS]
    attributes = {"K": columns, "N": rows, "bits": layer.weight.bits, "block_size": group}
    pending = list(each.reads)
    while pending:
        read = pending.pop()
        if read.node.op_type in _PASSING:
            pending += read.reads[read.node.output[0]]
            read.graph.node.remove(read.node)
        else:
            _replace_product(edit, read, names, (attributes, str(layer.weight)))
    edit.drop(each)


def _replace_product(
    edit: Rewriting, read: Read, names: list[str], said: tuple[Mapping[str, int], str]
) -> None:
    """Replace a MatMul or Gemm by MatMulNBits, and an Add."""
    node, (result,), (attributes, text) = read.node, read.node.output, said
    added = node.input[2] if node.op_type == "Gemm" and len(node.input) > 2 and node.input[2] else None
    out = result if added is None else f"{result}_product"
    nodes = [edit.node(NBITS, [node.input[0], *names], out, attributes, name=node.name)]
    nodes[0].doc_string = text
    if added is not None:
        nodes.append(edit.node("Add", [out, added], result))
    edit.put(read.graph, node, nodes)


CODEC = MatMulNBits()
