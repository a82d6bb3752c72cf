"""Layer inputs of an ONNX model that onnxruntime runs.

Ranges follow onnxruntime's arithmetic, which differs between machines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...errors import CalibrationError, UnsupportedError, option, printable
from ...libraries import reading
from .onnx_graph import Initializer, Read, initializers, parsed, products
from .onnx_session import has_runtime, opened
from .protocol import GraphFiles, Samples

DATA_INPUTS = {"Conv": (0,), "ConvTranspose": (0,), "Gemm": (0,), "MatMul": (1, 0)}
"""Data input of a node: the first, or the one that is not the weight."""
SAMPLES, BATCH_BYTES = 16, 16 << 20
"""Limits of a batch: samples, for graphs with a dynamic batch axis, and bytes of the layers' inputs."""
_PROBLEM = "onnxruntime does not run the model", "quantize it to a scheme without static inputs"


def data_of(each: Initializer) -> Iterator[tuple[Read, int]]:
    """Yield the products of a weight, each with its data input's index."""
    for read in products(each.reads):
        places = DATA_INPUTS[read.node.op_type]
        yield read, places[read.index % len(places)]


def layer_inputs(
    files: GraphFiles, modules: Collection[str], samples: Samples, require: Callable[[int], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield modules with their inputs by batch; see :meth:`.protocol.Container.layer_inputs`."""
    if not has_runtime():
        raise UnsupportedError("static inputs of an ONNX model need onnxruntime; install zeropoint[onnx]")
    model = parsed(files.graph)
    found, _ = initializers(model)
    read = dict(_data_names(found, modules))
    missing = next((module for module in modules if not read.get(module)), None)
    if missing is not None:
        raise UnsupportedError(
            f"inputs of {printable(missing)} are not seen while the model runs: it is quantized already; "
            f"name it in {option('ignore')}"
        )
    held = {each.tensor.name for each in found}
    inputs = [each for each in model.graph.input if each.name not in held]
    for each in found:
        for entry in each.tensor.external_data if each.tensor.data_location == 1 else ():
            entry.value = files.files[each.name] if entry.key == "location" else entry.value
    outputs = sorted(set[str]().union(*read.values()) - {each.name for each in inputs})
    for name in outputs:
        model.graph.output.add().name = name
    arrays = _arrays(inputs, samples([each.name for each in inputs]))
    fixed, end = _batch_of(inputs, arrays)
    with reading(*_PROBLEM, UnsupportedError):
        session = opened(model.SerializeToString(), files.folder)
    begin, size, taken = 0, fixed or 1, 0
    while begin < end:
        batch = {name: array[begin : min(begin + size, end)] for name, array in arrays.items()}
        with reading(*_PROBLEM, UnsupportedError):
            results = session.run(outputs, batch)
        if not begin:
            taken = sum(each.nbytes for each in results)
            require(taken)
        begin, size = begin + size, fixed or max(1, min(SAMPLES, BATCH_BYTES // max(1, taken)))
        seen = batch | dict(zip(outputs, results, strict=True))
        for module, names in read.items():
            for name in names:
                yield module, torch.from_numpy(np.ascontiguousarray(seen[name])).float()


def _data_names(found: Iterable[Initializer], modules: Collection[str]) -> Iterator[tuple[str, set[str]]]:
    """Yield modules with the data names of their products."""
    for each in found:
        module = each.name.removesuffix(".weight")
        if module in modules and each.use.kind == "Linear":
            yield module, {read.node.input[n] for read, n in data_of(each)}


def _batch_of(inputs: Sequence[Any], arrays: Mapping[str, Any]) -> tuple[int, int]:
    """Return a graph's fixed batch size or 0, and usable samples.

    Raises CalibrationError for fewer samples than the batch size.
    """
    count = min(map(len, arrays.values()))
    size = min((size for each in inputs if (size := _batch_size(each))), default=0)
    if count < size:
        raise CalibrationError(f"the model takes {size} samples at once, and there are {count}; give more")
    return size, count - count % size if size else count


def _batch_size(value: Any) -> int:
    """Return an input's fixed batch size, or 0."""
    axes = value.type.tensor_type.shape.dim
    return int(axes[0].dim_value) if axes else 0


def _arrays(inputs: Sequence[Any], samples: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the samples of each input of a graph, in its type."""
    import onnx

    names = [each.name for each in inputs]
    found = dict(zip(names, samples.values(), strict=True)) if len(samples) == len(names) == 1 else samples
    if found.keys() != set(names):
        raise CalibrationError(
            f"the model reads {', '.join(map(printable, names))}, and the data are "
            f"{', '.join(map(printable, found)) or 'none'}; store a tensor (samples, ...) for each"
        )
    arrays: dict[str, Any] = {}
    for each in inputs:
        tensor = found[each.name]
        if tensor.ndim == 0 or len(tensor) == 0:
            raise CalibrationError(f"{printable(each.name)} has no samples along its first axis")
        kind = onnx.helper.tensor_dtype_to_np_dtype(each.type.tensor_type.elem_type)
        arrays[each.name] = tensor.cpu().numpy().astype(kind)
    return arrays
