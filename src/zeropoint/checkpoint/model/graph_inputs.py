"""An ONNX model on data: onnxruntime runs it, and the inputs of its layers give the scales of static inputs.

Ranges follow onnxruntime's arithmetic, which is not that of every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...codecs.containers.onnx_graph import Initializer, initializers, parsed
from ...codecs.containers.onnx_session import has_runtime, opened_beside
from ...codecs.onnx_inputs import data_of
from ...codecs.onnx_rewriting import module_name
from ...codecs.safetensors_dtypes import TORCH_DTYPES
from ...errors import CalibrationError, CheckpointError, UnsupportedError, option, printable, size_of
from ...libraries import reading
from ...methods import method_named
from ...params import QuantizationParams
from ...progress import counted
from ...recipes import Activation
from ...stats import MinMax, Observer
from ..plan.new_tensor import NewTensor
from ..plan.placement import Placement
from ..read.safetensors_file import parse_header
from ..read.source import Source
from ..read.storage import shown
from .data_files import TEXT_OF_IDS
from .loading import Files, read_tensor
from .tokens import Windows

Batch = Mapping[str, Any]
"""Arrays by the names of the inputs of a graph."""
_MOST_BYTES = 1 << 30
_SAMPLES = 16
"""Samples that a graph of any batch size runs on together."""


def input_params(
    source: Source, weights: Iterable[Placement], data: Windows, *, progress: bool = False
) -> dict[str, QuantizationParams]:
    """Return the parameters of static inputs by module: the ranges of what layers read on the data.

    Args:
        source: an ONNX model with float weights, on a disk.
        weights: those of the layers, whose methods need no data.
        data: a .safetensors file with a tensor (samples, ...) for each input of the graph, or such a tensor.
        progress: whether to show a bar.

    Raises:
        CalibrationError: for data that are no inputs of the graph.
        UnsupportedError: without onnxruntime, and where it does not run the model; for a method that needs
            statistics, which transformers' models have alone.
    """
    wanted = {
        weight.module: weight.layer.input
        for weight in map(_without_statistics, weights)
        if weight.layer.input is not None
    }
    if not has_runtime():
        raise UnsupportedError("static inputs of an ONNX model need onnxruntime; install zeropoint[onnx]")
    if not isinstance(source.root, Path):
        raise UnsupportedError("onnxruntime reads models on a disk; copy the model there first")
    model = parsed(source.graph)
    found, _ = initializers(model)
    read = {module: set(names) for module, names in _data_names(found, wanted, model.graph)}
    missing = next((module for module in wanted if not read.get(module)), None)
    if missing is not None:
        raise UnsupportedError(
            f"inputs of {printable(missing)} are not seen while the model runs: it is quantized already, or "
            f"in the body of a node; name it in {option('ignore')}"
        )
    given = {each.name: each for each in model.graph.input}
    for each in (each for each in found if each.tensor.data_location == 1):
        _place(each, source)
    outputs = sorted(set[str]().union(*read.values()) - given.keys())
    for name in outputs:
        model.graph.output.add().name = name
    problem = "onnxruntime does not run the model", "quantize it to a scheme without static inputs"
    held = {each.tensor.name for each in found}
    observers = {module: Observer(MinMax(), name=module) for module in wanted}
    with reading(*problem, UnsupportedError):
        session = opened_beside(model.SerializeToString(), source.root)
    batches = list(_batches([given[name] for name in given if name not in held], data))
    for batch in counted(batches, "Running the model", shown=progress):
        with reading(*problem, UnsupportedError):
            results = session.run(outputs, dict(batch))
        seen = {**batch, **dict(zip(outputs, results, strict=True))}
        for module, observer in observers.items():
            for name in read[module]:
                observer.update(torch.from_numpy(np.ascontiguousarray(seen[name])).float())
    return {module: observers[module].params(given.scheme) for module, given in wanted.items()}


def as_weight(new: NewTensor) -> NewTensor:
    """Return a tensor of inputs as a graph reads it: a scale in the dtype of the weight."""
    value = new.value
    return new._replace(value=value.to(TORCH_DTYPES[new.near.dtype]) if value.is_floating_point() else value)


def _without_statistics(weight: Placement) -> Placement:
    """Return a weight whose method needs no statistics; raises UnsupportedError for another."""
    if method_named(weight.method).needs:
        raise UnsupportedError(
            f"{printable(weight.module)}: method {weight.method} needs statistics of inputs, which are taken "
            "of models of transformers, and this is a graph of ONNX; use mse, which needs no data"
        )
    return weight


def _data_names(
    found: Iterable[Initializer], wanted: Mapping[str, Activation], graph: Any
) -> Iterator[tuple[str, list[str]]]:
    """Yield modules, each with the names of what its products read, where the main graph has them."""
    for each in found:
        if module_name(each) in wanted and each.use.kind != "Other":
            names = [read.node.input[index] for read, index in data_of(each) if read.graph is graph]
            yield module_name(each), names


def _place(each: Initializer, source: Source) -> None:
    """Name the file in which the numbers of a tensor lie, which for its own is a mark."""
    entry = next(entry for entry in each.tensor.external_data if entry.key == "location")
    entry.value = source.entries[each.name].file.name


def _batches(inputs: list[Any], data: Windows) -> Iterator[Batch]:
    """Yield what a graph runs on; raises CalibrationError for data that are no inputs of it."""
    if data.length is not None:
        raise CalibrationError(f"{option('length', data.length)} is of tokens; leave it out for ONNX models")
    arrays = _arrays(inputs, data)
    count = min(len(array) for array in arrays.values())
    asked = data.samples or count
    if count < asked:
        raise CalibrationError(f"{option('samples', asked)} asks for more than the {count} that there are")
    fixed = {_axis(each) for each in inputs} - {0}
    size = min(fixed, default=_SAMPLES)
    if asked < min(fixed, default=1):
        raise CalibrationError(f"the model takes {size} samples at once, and there are {asked}; give more")
    for begin in range(0, asked - (size - 1 if fixed else 0), size):
        yield {name: array[begin : min(asked, begin + size)] for name, array in arrays.items()}


def _axis(value: Any) -> int:
    """Return the size of the first axis of an input, or 0 where it may be any."""
    axes = value.type.tensor_type.shape.dim
    return int(axes[0].dim_value) if axes else 0


def _arrays(inputs: list[Any], data: Windows) -> dict[str, Any]:
    """Return the data of each input of a graph, of its type, (samples, ...)."""
    import onnx

    found = _tensors(data)
    names = [each.name for each in inputs]
    if len(found) == len(names) == 1:
        found = dict(zip(names, found.values(), strict=True))
    if found.keys() != set(names):
        raise CalibrationError(
            f"the model reads {', '.join(map(printable, names))}, and the data are "
            f"{', '.join(map(printable, found)) or 'none'}; store a tensor (samples, ...) for each"
        )
    arrays = {}
    for each in inputs:
        kind = onnx.helper.tensor_dtype_to_np_dtype(each.type.tensor_type.elem_type)
        tensor = found[each.name]
        if tensor.ndim == 0 or len(tensor) == 0:
            raise CalibrationError(f"{printable(each.name)} has no samples along its first axis")
        arrays[each.name] = tensor.cpu().numpy().astype(kind)
    return arrays


def _tensors(data: Windows) -> dict[str, torch.Tensor]:
    """Return tensors by name: those of a safetensors file, or one without a name."""
    if isinstance(data.given, torch.Tensor):
        return {"": data.given}
    if not str(data.given).endswith(TEXT_OF_IDS):
        raise CalibrationError(
            f"an ONNX model runs on what its inputs are, not on text: pass {option('calibration')} a "
            ".safetensors file with a tensor (samples, ...) for each input"
        )
    try:
        table = parse_header(Path(data.given)).table
        nbytes = sum(entry.nbytes for entry in table.values())
        if nbytes > _MOST_BYTES:
            raise CalibrationError(
                f"{shown(data.given)} holds {size_of(nbytes)}, above the limit of {size_of(_MOST_BYTES)}; "
                "store fewer samples"
            )
        with Files() as files:
            return {name: read_tensor(entry, files) for name, entry in table.items()}
    except CheckpointError as error:
        raise CalibrationError(f"{shown(data.given)} cannot be read: {error}") from error
