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
from ..params import QuantizationParams
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
from .engines import LLAMA_CPP, ONNXRUNTIME, SGLANG, TENSORRT, TRANSFORMERS, VLLM, Loads, always, rules
from .onnx_rewriting import Rewriting, module_name, rewritten
from .protocol import COLUMNS, Codec, Contents, Documents, LayerScheme, TensorSpec
from .records import Entry, Known, Listing, Reader, Record, record_of
from .safetensors_dtypes import FILE_DTYPES, TORCH_DTYPES

_BITS = (2, 4, 8)
_LEAST_GROUP = 16
_SCALE_DTYPES = ("F32", "F16", "BF16")
_PASSING = ("Transpose", "Identity")
_PRODUCTS = frozenset(("MatMul", "Gemm", *_PASSING, NBITS))
NO_ONNX = always(Loads.NO, "it reads no ONNX models")


class NBitsReader(Reader):
    """The weights of MatMulNBits in one model."""

    def __init__(self, listing: Listing) -> None:
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
    return record_of(scheme, key, shaped, shape=(rows, columns), dtype=TORCH_DTYPES[scales.dtype])


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
class MatMulNBits(Codec):
    """See the module and :class:`Codec`. use: how the graph reads the weight."""

    use: Use = MATMUL
    name = "onnx-matmulnbits"
    title = "the layout of MatMulNBits"
    container = "onnx"
    presets = MappingProxyType({name: PRESETS[name] for name in ("w4a16", "w4a16_asym", "w8a16")})
    defaults = MappingProxyType({"scale": "input"})
    engines = rules({
        ONNXRUNTIME: always(Loads.YES, ""), TRANSFORMERS: NO_ONNX, VLLM: NO_ONNX, SGLANG: NO_ONNX,
        LLAMA_CPP: NO_ONNX, TENSORRT: NO_ONNX,
    })  # fmt: skip
    usual = (ONNXRUNTIME,)
    methods = ("onnx-matmulnbits",)
    parts = MappingProxyType({BLOCKS: True, BLOCK_SCALES: True, BLOCK_ZEROS: True})

    def used(self, use: Use | None) -> MatMulNBits:
        """See :class:`Codec`."""
        return self if use is None else replace(self, use=use)

    def layout(self, layer: LayerScheme) -> str:
        """See :class:`Codec`."""
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
        """See :class:`Codec`."""
        others = [name for name in self.use.operators if name not in _PRODUCTS]
        if others:
            return f"read by {' and '.join(others)}, and {NBITS} replaces products of matrices alone"
        return super().refusal(layer, shape)

    def tensors(
        self, layer: LayerScheme, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        """See :class:`Codec`."""
        rows, columns = shape
        group, bits = blocks(layer.weight)[COLUMNS], layer.weight.bits
        count = columns // group
        codes = TensorSpec(suffix=BLOCKS, dtype="U8", shape=(rows, count, group * bits // 8))
        scale = TensorSpec(suffix=BLOCK_SCALES, dtype=_scale_dtype(layer.weight, dtype), shape=(rows, count))
        zero = TensorSpec(suffix=BLOCK_ZEROS, dtype="U8", shape=(rows, packing.packed_length(count, bits)))
        return (codes, scale) if layer.weight.zero_point is ZeroPoint.NONE else (codes, scale, zero)

    def encode(self, layer: LayerScheme, q: QuantizedTensor) -> dict[str, torch.Tensor]:
        """See :class:`Codec`."""
        group, bits = blocks(layer.weight)[COLUMNS], layer.weight.bits
        data = q.data ^ _shift(bits) if layer.weight.element.signed else q.data
        found = {BLOCKS: data.view(q.shape[0], -1, group * bits // 8), BLOCK_SCALES: q.scales[0]}
        if q.zero_point is None:
            return found
        return found | {BLOCK_ZEROS: packing.pack(q.zero_point + _least(layer.weight), bits)}

    def decode(
        self, layer: LayerScheme, tensors: Mapping[str, torch.Tensor], *, start: int, shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> QuantizedTensor:  # fmt: skip
        """See :class:`Codec`."""
        weight, bits = layer.weight, layer.weight.bits
        data = tensors[BLOCKS].reshape(shape[0], -1)
        data = data ^ _shift(bits) if weight.element.signed else data
        scales, zero = tensors[BLOCK_SCALES], None
        if BLOCK_ZEROS in tensors:
            fields = packing.unpack(tensors[BLOCK_ZEROS], bits, scales.shape[1])
            zero = fields.to(zero_point_dtype(weight)) - _least(weight)
        params = QuantizationParams(
            scheme=weight, shape=shape, scales=(scales,), zero_point=zero, dtype=dtype
        )
        return QuantizedTensor(data=data, params=params, shape=shape, dtype=dtype)

    def read(self, listing: Listing) -> NBitsReader:
        """See :class:`Codec`."""
        return NBitsReader(listing)

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`: the model, with its tensors in another file."""
        return rewritten(contents, 1, _replace)


def _scale_dtype(weight: Scheme, dtype: torch.dtype) -> str:
    """Return the stored dtype of scales, or ""."""
    return FILE_DTYPES.get(storage_dtype(weight.scales[0].format_for(format_of(dtype))), "")


def _least(weight: Scheme) -> int:
    """Return the shift of codes to a least code of 0."""
    return 1 << (weight.bits - 1) if weight.element.signed else 0


def _shift(bits: int) -> int:
    """Return the byte to XOR for code shifts by half the range."""
    return sum(1 << (at + bits - 1) for at in range(0, 8, bits))


def _replace(edit: Rewriting, each: Initializer, layer: LayerScheme, shape: tuple[int, int]) -> None:
    """Put MatMulNBits in the place of the products with a weight."""
    module, (rows, columns) = module_name(each), shape
    specs = layer.codec.tensors(layer, shape, edit.dtype(each))
    names = [f"{module}.{spec.suffix}" for spec in specs]
    for name, spec in zip(names, specs, strict=True):
        edit.add(each.graph, name, spec.dtype, spec.shape)
    attributes = {
        "K": columns, "N": rows, "bits": layer.weight.bits, "block_size": blocks(layer.weight)[COLUMNS],
    }  # fmt: skip
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
