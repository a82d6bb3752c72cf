"""ONNX weights as codes that the standard's DequantizeLinear decodes.

For a weight W of shape (N, K), (outputs, inputs), that MatMul(x, W) or Gemm reads as (K, N):

    M.weight_quantized   codes (K, N): INT4, UINT4, INT8, UINT8, INT16, UINT16, FLOAT8E4M3FN, ...,
                         FLOAT4E2M1; codes of 4 and 2 bits from the first to the last, low bits first
    M.weight_scale       of groups of g inputs (K / g, N), with axis 0 and block_size g; of channels (N,),
                         with axis 1; of the whole tensor one number
    M.weight_zero_point  of the type of the codes, shaped like the scale; absent where it is 0
    M.weight_scale_2     one number under scales that are FLOAT8E4M3FN, which a first DequantizeLinear decodes

Where a node reads W as (N, K), as Gemm with transB, Conv and Gather do, codes are (N, K), scales (N, K / g)
with axis 1, or (N,) with axis 0. Where W has more axes, as for ConvTranspose, LSTM and stacks, one axis has
the inputs, and scales have g times fewer values along it; a channel along several axes is a block of all
its inputs. M is the initializer's name without ``.weight``.

Scales are of the dtype of the model, in which DequantizeLinear then gives its values. Static inputs: see
:mod:`.onnx_inputs`.

Source: onnx 1.22, docs/Operators.md, DequantizeLinear 13 to 25. This module opens no file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from ..errors import CheckpointError, UnsupportedError
from ..formats.torch_dtypes import format_of, storage_dtype
from ..layout import packing
from ..params import QuantizationParams
from ..params.tensors import zero_point_dtype
from ..schemes import PRESETS, Granularity, Preset, Scheme, ZeroPoint
from ..schemes.structure import stored_numbers
from ..tensor import QuantizedTensor
from .block_extents import blocks, no_matrix, partial_group
from .containers.onnx import DATA_NAMES, shape_of
from .containers.onnx_graph import (
    BLOCK_SCALES,
    BLOCK_ZEROS,
    BLOCKS,
    CODES,
    DEQUANTIZE,
    MATMUL,
    OUTER,
    SCALE,
    ZERO,
    GraphLayer,
    Initializer,
    attribute_of,
    initializers,
    parsed,
)
from .containers.protocol import Use
from .containers.safetensors import FILE_DTYPES, TORCH_DTYPES
from .engines import ONNXRUNTIME, Facts, Loads, Problem, always, rules
from .onnx_inputs import INPUTS, input_of, input_refusal, input_type, quantize_inputs
from .onnx_matmulnbits import NO_ONNX, as_written, nbits_record
from .onnx_rewriting import Rewriting, module_name, rewritten
from .onnx_types import ELEMENTS, code_type
from .protocol import Codec, Contents, Documents, LayerScheme
from .records import Entry, Known, Listing, Reader, Record, needed
from .tensor_fields import COLUMNS, ROWS, Tensors, TensorSpec, WeightPart

_FLOATS = ("F32", "F16", "BF16")
_HALVES = _FLOATS[1:]
_SOME = 64
"""Inputs that are worked on together at least, where no block asks for more."""
_DOUBLE = 2
"""Levels of scales where one is under the others."""


class OnnxReader(Reader):
    """The quantized weights of one model; what they are, its graph says."""

    def __init__(self, listing: Listing, codec: Codec) -> None:
        found, self._layers = initializers(parsed(listing.graph))
        self._found = {each.name: each for each in found}

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        """See :class:`Reader`; ``key`` is the name of the layer."""
        layer = self._layers[key]
        missing = sorted(layer.parts.keys() - tensors.keys())
        if missing:
            raise UnsupportedError(
                f"its {' and '.join(missing)} stand in the graph one by one, which is not read here; save "
                "the model with raw data"
            )
        if BLOCKS in tensors:
            return nbits_record(layer, key, tensors)
        record = _record(layer, key, tensors)
        given = input_of(key, self._found)
        return record if given is None else replace(record, layer=replace(record.layer, input=given))


def _record(layer: GraphLayer, key: str, tensors: Mapping[str, Entry]) -> Record:
    """Return the weight that a DequantizeLinear decodes."""
    use, dims = layer.use, layer.parts[CODES].dims
    codes, scale = needed(tensors, CODES, DEQUANTIZE), needed(tensors, SCALE, DEQUANTIZE)
    if codes.dtype not in ELEMENTS:
        raise UnsupportedError(f"its codes are {codes.dtype}, which is not read here")
    if use.reason is not None:
        raise UnsupportedError(f"its values are {use.reason}, which is not read here")
    rows, columns = shape_of(dims, use)
    weight = Scheme.parse(f"{ELEMENTS[codes.dtype]}:{_blocks(layer, columns)}{_levels(tensors)}")
    weight = as_written(layer, weight)
    scheme = LayerScheme(codec=Onnx(use=use), name=str(weight), weight=weight)
    given = DATA_NAMES.get(attribute_of(layer.node, "output_dtype", 0))
    dtype = TORCH_DTYPES[next(n for n in (given, tensors.get(OUTER, scale).dtype, "F32") if n in _FLOATS)]
    for spec in scheme.codec.tensors(scheme, (rows, columns), dtype):
        found = needed(tensors, spec.suffix, DEQUANTIZE)
        if (found.dtype, math.prod(found.shape)) != (spec.dtype, math.prod(spec.shape)):
            raise CheckpointError(
                f"{spec.suffix} is {found.dtype} of shape {list(found.shape)}, but must hold "
                f"{math.prod(spec.shape)} values of {spec.dtype} for a weight of shape {[rows, columns]}"
            )
    problem = scheme.codec.refusal(scheme, (rows, columns))
    if problem is not None:
        raise UnsupportedError(f"{problem}, and is not read here")
    return Record(module=key, layer=scheme, shape=(rows, columns), dtype=dtype, parts=tuple(tensors))


def _blocks(layer: GraphLayer, columns: int) -> str:
    """Return a weight's granularity text; raises UnsupportedError for output blocks."""
    count, size = math.prod(layer.parts[SCALE].dims), attribute_of(layer.node, "block_size", 0)
    use, dims = layer.use, layer.parts[CODES].dims
    axis = attribute_of(layer.node, "axis", 1)
    axis += len(dims) if axis < 0 else 0
    if count == 1 and not size:
        return "tensor"
    if not size and axis == _outputs_axis(dims, use) and not use.spread:
        return "channel"
    if size > 0 and axis == use.axis and use.kernel == 1 and (use.run or columns) % size == 0:
        return "channel" if use.spread and size == columns else f"g{size}"
    raise UnsupportedError(
        f"its scales lie along axis {axis} in blocks of {size}, which is not read here for a weight of "
        f"{' '.join(layer.use.operators)}"
    )


def _levels(tensors: Mapping[str, Entry]) -> str:
    """Return the text of a weight's scales and zero points."""
    dtype = tensors[SCALE].dtype
    if OUTER in tensors:
        inner = {"F8_E4M3": "float8_ue4m3fn", "F8_E5M2": "float8_ue5m2"}.get(dtype)
        if inner is None:
            raise UnsupportedError(f"its scales under others are {dtype}, which is not read here")
        return f":scale={inner}:scale2=float32@tensor"
    if dtype not in _FLOATS:
        raise UnsupportedError(f"its scale is {dtype}, which is not read here")
    return f":scale=input{':asym' if ZERO in tensors else ''}"


def _runtime(facts: Facts) -> Iterator[Problem]:
    """Yield the verdicts of onnxruntime 1.31, run on a CPU, on DequantizeLinear."""
    kinds = {code_type(layer.weight.element) for layer in facts.layers}
    if "F4" in kinds:
        yield Loads.NO, "its DequantizeLinear takes no 4-bit floats on a CPU"


@dataclass(frozen=True)
class Onnx(Codec):
    """See the module and :class:`Codec`. use: how the graph reads the weight."""

    use: Use = MATMUL
    name = "onnx"
    title = "the layout of ONNX"
    container = "onnx"
    presets = MappingProxyType(
        {name: PRESETS[name] for name in ("w4a16", "w4a16_asym", "w8a16")}
        | {
            "w8a8_static": replace(PRESETS["w8a8_static"], without_data="w8a16"),
            "nvfp4a16": Preset(
                weight="float4_e2m1fn:g16:scale=float8_ue4m3fn:scale2=float32@tensor:dialect=modelopt"
            ),
        }
    )
    defaults = MappingProxyType({"scale": "input"})
    input_names = INPUTS
    engines = rules(
        transformers=NO_ONNX,
        vllm=NO_ONNX,
        tensorrt=always(Loads.UNCHECKED, "TensorRT reads ONNX; these files were not tried"),
        llama_cpp=NO_ONNX,
        onnxruntime=_runtime,
    )
    usual = (ONNXRUNTIME,)
    reader = OnnxReader
    methods = ("onnx",)
    parts = MappingProxyType(
        dict.fromkeys((CODES, SCALE, ZERO, OUTER, BLOCKS, BLOCK_SCALES, BLOCK_ZEROS), True)
    )

    def used(self, use: Use | None) -> Onnx:
        return self if use is None else replace(self, use=use)

    def layout(self, layer: LayerScheme) -> str:
        weight = layer.weight
        if code_type(weight.element) is None:
            raise UnsupportedError(
                f"scheme {weight} has elements that ONNX has no type for; use int4 or int8"
            )
        # What kernels call chained follows from the whole weight, which is written a part at a time.
        mixed = weight.chained is not None and len(weight.scales) > 1
        if weight.offsets or weight.center or mixed or len(weight.scales) > _DOUBLE:
            raise UnsupportedError(f"scheme {weight} has parameters that DequantizeLinear does not take")
        if stored_numbers(weight)[-1]:
            raise UnsupportedError(
                f"scheme {weight} stores the reciprocal of its tensor scale, which ONNX does not divide by; "
                "use dialect=modelopt"
            )
        rows, group = blocks(weight)
        if rows > 1 or (rows == 0 and group):
            raise UnsupportedError(f"scheme {weight} has blocks of rows; use g<N>, channel or tensor")
        dtypes = [_scale_dtype(weight, level, torch.float32) for level in range(len(weight.scales))]
        inner, outer = (*dtypes, None)[:_DOUBLE]
        double = outer == "F32" and inner in ("F8_E4M3", "F8_E5M2") and self._is_outer(weight)
        if (outer is None and inner not in _FLOATS) or (outer is not None and not double):
            raise UnsupportedError(f"scheme {weight} has scales that DequantizeLinear does not take")
        if layer.input is not None and input_type(layer.input) is None:
            raise UnsupportedError(
                f"input {layer.input} has no place next to weights; use one scale for the tensor, static, "
                "such as w8a8_static, or leave it out"
            )
        return DEQUANTIZE

    @staticmethod
    def _is_outer(weight: Scheme) -> bool:
        return weight.scales[1].granularity == Granularity.tensor()

    def refusal(self, layer: LayerScheme, shape: tuple[int, ...]) -> str | None:
        problem = no_matrix(shape) or partial_group(layer.weight, shape)
        if problem is not None:
            return problem
        problem = None if layer.input is None else input_refusal(self.use)
        if problem is not None:
            return problem
        per, line, rows = self._per_byte(layer), self._laid_out(shape)[-1], self._folded(layer)
        if line % per:
            return f"a line of {line} codes does not fill whole bytes, of {per} codes"
        if shape[ROWS] % rows:
            return f"zero points of {shape[ROWS]} rows do not fill whole bytes; use int8, or leave out asym"
        group = blocks(layer.weight)[COLUMNS]
        if group and self.use.kernel > 1:
            return f"its kernel has {self.use.kernel} numbers an input, and blocks hold inputs; use channel"
        if group and self.use.run % group:
            return f"its matrices have {self.use.run} inputs each, no multiple of the group of {group}"
        return None

    @staticmethod
    def _per_byte(layer: LayerScheme) -> int:
        """Return how many codes share a byte, or 1."""
        return max(1, 8 // layer.weight.bits)

    def _folded(self, layer: LayerScheme) -> int:
        """Return the fewest rows whose zero points fill whole bytes."""
        single = layer.weight.zero_point is ZeroPoint.NONE or layer.weight.granularity == Granularity.tensor()
        return 1 if single or self.use.transposed else self._per_byte(layer)

    def axis(self, layer: LayerScheme) -> int:
        """See :class:`Codec`: inputs are cut where the graph has them first."""
        return COLUMNS if self.use.transposed else ROWS

    def alignment(self, layer: LayerScheme, shape: tuple[int, ...]) -> int:
        if not self.use.transposed:
            return self._folded(layer)
        if layer.weight.granularity == Granularity.tensor():
            return math.gcd(shape[1], _SOME)
        return blocks(layer.weight)[COLUMNS] or shape[1]

    def tensors(
        self, layer: LayerScheme, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        weight, axis, per = layer.weight, self.axis(layer), self._per_byte(layer)
        kind = code_type(weight.element)
        assert kind is not None
        codes = self._laid_out(shape)
        specs = [TensorSpec(suffix=CODES, dtype=kind, shape=codes, axis=axis, across=(1, per))]
        grid = self._laid_out(weight.granularity.grid(shape))
        group = weight.granularity.block_shape(shape)[axis]
        scale = TensorSpec(
            suffix=SCALE, dtype=_scale_dtype(weight, 0, dtype), shape=grid, axis=axis, per=group
        )
        fold = self._folded(layer)
        folded = (grid[0] // fold, grid[1] * fold)
        zero = TensorSpec(suffix=ZERO, dtype=kind, shape=folded, axis=axis, per=group * fold, across=(1, per))
        for spec in (scale,) if weight.zero_point is ZeroPoint.NONE else (scale, zero):
            whole = weight.granularity == Granularity.tensor()
            specs.append(replace(spec, shape=(), axis=None, per=1) if whole else spec)
        if len(weight.scales) == _DOUBLE:
            specs.append(TensorSpec(suffix=OUTER, dtype=_scale_dtype(weight, 1, dtype), shape=(), axis=None))
        return tuple(specs)

    def _laid_out(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[::-1] if self.use.transposed else shape

    def encode(self, layer: LayerScheme, q: QuantizedTensor) -> dict[str, torch.Tensor]:
        found = {CODES: self._packed(q.codes, layer)}
        if layer.weight.granularity != Granularity.tensor():
            found[SCALE] = self._lines(q.scales[0])
            if q.zero_point is not None:
                rows = q.zero_point.shape[0] // self._folded(layer)
                found[ZERO] = self._packed(q.zero_point.reshape(rows, -1), layer)
        return found

    def constants(
        self, layer: LayerScheme, params: QuantizationParams, shape: tuple[int, ...]
    ) -> dict[str, torch.Tensor]:
        if layer.weight.granularity != Granularity.tensor():
            return {OUTER: params.scales[1].reshape(())} if len(params.scales) == _DOUBLE else {}
        zero = params.zero_point
        found = {SCALE: params.scales[0].reshape(())}
        return found if zero is None else found | {ZERO: self._packed(zero.reshape(1, 1), layer).reshape(())}

    def _lines(self, x: torch.Tensor) -> torch.Tensor:
        return (x.t() if self.use.transposed else x).contiguous()

    def _packed(self, codes: torch.Tensor, layer: LayerScheme) -> torch.Tensor:
        """Return lines of codes in their type, or packed bytes."""
        kind, lines = code_type(layer.weight.element), self._lines(codes)
        dtype = TORCH_DTYPES.get(kind or "")
        if dtype is not None:
            return lines.to(dtype) if layer.weight.element.is_integer else lines.view(dtype)
        return packing.pack(lines, layer.weight.bits)

    def decode(self, layer: LayerScheme, tensors: Tensors, part: WeightPart) -> QuantizedTensor:
        weight = layer.weight
        codes, grid = self._unpacked(tensors[CODES], layer, part.shape), weight.granularity.grid(part.shape)
        zero = []
        if ZERO in tensors:
            stored, fold = tensors[ZERO], self._folded(layer)
            stored = stored if stored.ndim else stored.reshape(1, 1)
            found = self._unpacked(stored, layer, (grid[0] // fold, grid[1] * fold))
            zero = [found.to(zero_point_dtype(weight)).reshape(grid)]
        scale = tensors[SCALE] if tensors[SCALE].ndim == 0 else self._lines(tensors[SCALE])
        outer = (tensors[OUTER].reshape(1, 1) for _ in weight.scales[1:])
        return part.quantized(weight, packing.pack(codes, weight.bits), scale.reshape(grid), *outer, *zero)

    def _unpacked(self, lines: torch.Tensor, layer: LayerScheme, shape: tuple[int, ...]) -> torch.Tensor:
        """Return codes, (rows, columns), of lines in their type or as bytes."""
        element = layer.weight.element
        if code_type(element) in TORCH_DTYPES:
            values = lines if element.is_integer else lines.view(torch.uint8)
            return self._lines(values)
        count = self._laid_out(shape)[-1]
        patterns = packing.unpack(lines.view(torch.uint8), element.bits, count)
        return self._lines(packing.as_values(patterns, element))

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`: the model, with its tensors in another file."""
        layers = [module.layer for module in contents.modules() if module.layer is not None]
        operators = max(map(_operator_set, layers))
        if any(found.row.dtype in _HALVES and found.row.name.endswith(SCALE) for found in contents.tensors()):
            operators = max(operators, 19)
        return rewritten(contents, operators, _insert)


def _scale_dtype(weight: Scheme, level: int, dtype: torch.dtype) -> str:
    """Return the stored dtype of a level's scales, or ""."""
    return FILE_DTYPES.get(storage_dtype(weight.scales[level].format_for(format_of(dtype))), "")


def _operator_set(layer: LayerScheme) -> int:
    """Return the first set of operators whose DequantizeLinear decodes a layer."""
    weight, kind = layer.weight, code_type(layer.weight.element)
    if layer.input is not None and kind in ("I8", "U8") and input_type(layer.input) not in ("I8", "U8"):
        kind = "I16" if layer.input.scheme.element.is_integer else "F8_E4M3"
    if kind in ("I2", "U2"):
        return 25
    if kind == "F4":
        return 23
    use = layer.codec.use if isinstance(layer.codec, Onnx) else MATMUL
    spread = use.spread and weight.granularity != Granularity.tensor()
    if blocks(weight)[COLUMNS] or spread or kind in ("I4", "U4", "I16", "U16"):
        return 21
    return 13 if kind in ("I8", "U8") else 19


def _outputs_axis(dims: tuple[int, ...], use: Use) -> int:
    """Return the axis of a weight's outputs, which are along one."""
    outputs = range(use.axis + 1, len(dims)) if use.transposed else range(use.axis)
    return next((axis for axis in outputs if dims[axis] > 1), outputs[0])


def _insert(edit: Rewriting, each: Initializer, layer: LayerScheme, shape: tuple[int, int]) -> None:
    """Put codes and DequantizeLinear in the place of a weight."""
    if layer.input is not None:
        quantize_inputs(edit, each, layer.input)
    use, weight, module = each.use, layer.weight, module_name(each)
    whole = weight.granularity == Granularity.tensor()
    size = blocks(weight)[COLUMNS] or (each.dims[use.axis] if use.spread and not whole else 0)
    attributes = {} if whole else {"axis": use.axis if size else _outputs_axis(each.dims, use)}
    attributes |= {"block_size": size} if size else {}
    fewer = tuple(side // size if n == use.axis else side for n, side in enumerate(each.dims)) if size else ()
    for spec in layer.codec.tensors(layer, shape, edit.dtype(each)):
        if spec.suffix == CODES:
            dims = each.dims
        elif whole or spec.suffix == OUTER:
            dims = ()
        else:
            dims = fewer or (shape[ROWS],)
        edit.add(each.graph, f"{module}.{spec.suffix}", spec.dtype, dims)
    names = {part: f"{module}.{part}" for part in (CODES, SCALE, ZERO, OUTER)}
    has_zero, double = weight.zero_point is not ZeroPoint.NONE, len(weight.scales) == _DOUBLE
    nodes, scale = [], names[SCALE]
    if double:
        scale = f"{module}.weight_block_scale"
        nodes.append(edit.node(DEQUANTIZE, [names[SCALE], names[OUTER]], scale))
    if TORCH_DTYPES[_scale_dtype(weight, -1, edit.dtype(each))] != edit.dtype(each):
        attributes["output_dtype"] = each.tensor.data_type
    zero = [names[ZERO]] if has_zero else []
    out = f"{module}.weight_dequantized"
    nodes.append(edit.node(DEQUANTIZE, [names[CODES], scale, *zero], out, attributes))
    nodes[-1].doc_string = str(weight)
    edit.swap(each, out, nodes)


CODEC = Onnx()
