"""Static inputs in an ONNX graph: QuantizeLinear and DequantizeLinear before products.

    M.input_scale        one number, of the dtype of the model
    M.input_zero_point   one number of the type of the codes; where the scheme has none, a 0 in the graph

This module opens no file.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..formats.torch_dtypes import format_of, storage_dtype
from ..recipes import Activation
from ..schemes import Granularity, ZeroPoint
from .containers.onnx import DATA_NAMES
from .containers.onnx_graph import DEQUANTIZE, INPUT_SCALE, INPUT_ZERO, QUANTIZE, Initializer
from .containers.onnx_running import DATA_INPUTS, data_of
from .containers.protocol import Use
from .containers.safetensors import FILE_DTYPES
from .data_scales import InputNames
from .onnx_rewriting import Rewriting, module_name
from .onnx_types import ELEMENTS, code_type

INPUTS = InputNames(INPUT_SCALE, INPUT_ZERO, INPUT_SCALE, shape=(), signed=False)
_PASSES = frozenset(("Identity", "Cast", "Transpose"))


def input_type(given: Activation) -> str | None:
    """Return the ONNX type of one-scale static input codes, or None."""
    scheme, kind = given.scheme, code_type(given.scheme.element)
    if given.dynamic or len(scheme.scales) != 1 or scheme.offsets or scheme.center:
        return None
    scale = storage_dtype(scheme.scales[0].format_for(format_of(torch.float32)))
    plain = scheme.granularity == Granularity.tensor() and scale is torch.float32
    return kind if plain and kind in ("I8", "U8", "F8_E4M3", "F8_E5M2") else None


def input_refusal(use: Use) -> str | None:
    """Return why inputs of a layer cannot be quantized, or None."""
    if use.inside:
        return "it is read in the body of a node, such as If, whose inputs are not seen while a model runs"
    odd = {name for name in use.operators if name.partition(" ")[0] not in DATA_INPUTS.keys() | _PASSES}
    return f"it is read by {', '.join(sorted(odd))}, whose inputs are not quantized here" if odd else None


def input_of(key: str, found: Mapping[str, Initializer]) -> Activation | None:
    """Return a layer's static input quantization, if its file has a scale.

    found: the initializers of a model by name.
    """
    zero = found.get(f"{key}.{INPUTS.zero_point}")
    element = None if zero is None else ELEMENTS.get(DATA_NAMES.get(zero.tensor.data_type))
    if zero is None or element is None or f"{key}.{INPUTS.scale}" not in found:
        return None
    return Activation.of(f"{element}:tensor{':asym' if zero.data else ''}", dynamic=False)


def quantize_inputs(edit: Rewriting, each: Initializer, given: Activation) -> None:
    """Quantize the data inputs of a weight's products in the graph.

    To be called before the weight is replaced.
    """
    module, kind = module_name(each), input_type(given)
    assert kind is not None
    names = [f"{module}.{part}" for part in (INPUTS.scale, INPUTS.zero_point)]
    edit.add(each.graph, names[0], FILE_DTYPES[edit.dtype(each)], ())
    if given.scheme.zero_point is ZeroPoint.NONE:
        edit.add_zero(each.graph, names[1], kind)
    else:
        edit.add(each.graph, names[1], kind, ())
    pairs: dict[tuple[int, str], str] = {}
    for read, index in data_of(each):
        data = read.node.input[index]
        if (id(read.graph), data) not in pairs:
            codes, values = (f"{module}.input_{what}{len(pairs) or ''}" for what in ("quantized", "values"))
            first = edit.node(QUANTIZE, [data, *names], codes)
            edit.put_before(read, [first, edit.node(DEQUANTIZE, [codes, *names], values)])
            pairs[id(read.graph), data] = values
        read.node.input[index] = pairs[id(read.graph), data]
