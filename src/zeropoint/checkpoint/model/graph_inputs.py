"""Static inputs of a model with a graph, from samples."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from ...codecs.containers.protocol import GraphFiles
from ...codecs.safetensors_dtypes import TORCH_DTYPES
from ...errors import CalibrationError, UnsupportedError, option, printable
from ...methods import method_named
from ...params import QuantizationParams
from ...progress import counted
from ...stats import MinMax, Observer
from ..plan.limits import Limits
from ..plan.output_tensors import Output
from ..plan.row_reader import NewTensor
from ..read.source import Source
from .data_files import TEXT_OF_IDS, read_tensors
from .tokens import Windows

_MOST_BYTES = 1 << 30
_COPIES = 1.1
"""Memory of a running model, in its weights: 0.7 beyond the process were measured at 384 MiB."""


def input_params(
    source: Source, weights: Iterable[Output], data: Windows, limits: Limits, *, progress: bool = False
) -> dict[str, QuantizationParams]:
    """Return static input parameters by module, from ranges on the data.

    Args:
        source: a model with a graph and float weights, on a disk.
        weights: of the layers, whose methods need no data.
        data: a .safetensors file with a tensor (samples, ...) for each input of the graph, or such a tensor.
        limits: what memory there is.
        progress: whether to show a bar.

    Raises:
        CalibrationError: for data that are no inputs of the graph.
        CheckpointError: where the model does not fit into the memory limit.
        UnsupportedError: where the model is not run here, and for a method that needs statistics.
    """
    wanted = {}
    for weight in weights:
        _refuse_statistics(weight)
        if weight.layer.input is not None:
            wanted[weight.module] = weight.layer.input
    if not isinstance(source.root, Path):
        raise UnsupportedError("models with a graph run from a disk; copy the model there first")
    nbytes = sum(entry.nbytes for entry in source.entries.values())
    remedy = "quantize it to a scheme without static inputs"
    limits.require(int(_COPIES * nbytes), "running the model", remedy)
    files = {name: entry.file.name for name, entry in source.entries.items()}
    observers = {module: Observer(MinMax(), name=f"the input of {printable(module)}") for module in wanted}
    seen = source.container.layer_inputs(
        GraphFiles(graph=source.graph, folder=source.root, files=files), observers.keys(), _samples(data)
    )
    for module, x in counted(seen, "Running the model", shown=progress):
        observers[module].update(x)
    return {module: observers[module].params(given.scheme) for module, given in wanted.items()}


def as_weight(new: NewTensor) -> NewTensor:
    """Return a tensor of inputs with scales in the weight's dtype."""
    value = new.value
    return new._replace(value=value.to(TORCH_DTYPES[new.near.dtype]) if value.is_floating_point() else value)


def _refuse_statistics(weight: Output) -> None:
    """Raise UnsupportedError for a weight whose method needs statistics."""
    if method_named(weight.method).needs:
        raise UnsupportedError(
            f"{printable(weight.module)}: method {weight.method} needs statistics of inputs, which are taken "
            "of models of transformers, and this one has a graph of its own; use mse, which needs no data"
        )


def _samples(data: Windows) -> dict[str, torch.Tensor]:
    """Return the requested samples by input name."""
    if data.length is not None:
        raise CalibrationError(
            f"{option('length', data.length)} counts tokens, and this model reads arrays; leave it out"
        )
    found = _tensors(data)
    asked, count = data.samples, min((len(x) for x in found.values() if x.ndim), default=0)
    if asked is not None and count < asked:
        raise CalibrationError(f"{option('samples', asked)} asks for more than the {count} that there are")
    return {name: x[:asked] if x.ndim else x for name, x in found.items()}


def _tensors(data: Windows) -> dict[str, torch.Tensor]:
    """Return a safetensors file's tensors by name, or one unnamed tensor."""
    if isinstance(data.given, torch.Tensor):
        return {"": data.given}
    if not str(data.given).endswith(TEXT_OF_IDS):
        raise CalibrationError(
            f"this model reads arrays, not text; pass {option('calibration', metavar='FILE.safetensors')} "
            "with a tensor (samples, ...) for each input"
        )
    return read_tensors(data.given, what="samples", most=_MOST_BYTES, remedy="write it again")
