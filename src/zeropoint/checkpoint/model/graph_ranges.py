"""Ranges of the inputs of a graph, from samples or tokens.

onnxruntime runs the graph. A graph that reads ``input_ids``, with a tokenizer next to it, takes text as a
checkpoint of transformers does: other inputs follow from the ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from ...codecs.containers.protocol import GraphFiles
from ...codecs.containers.safetensors import TORCH_DTYPES
from ...errors import CalibrationError, UnsupportedError, option, printable
from ...methods import method_named
from ...params import QuantizationParams
from ...progress import counted
from ...stats import Observer, statistic_named
from ..plan.limits import Limits
from ..plan.output_tensors import Output
from ..plan.row_reader import NewTensor
from ..read.source import Source
from .running_model import LIBRARIES
from .tokens import OWN, TEXT_OF_IDS, Windows, read_tensors, windows_of

EXTREMES = "minmax"
"""The statistic of static inputs that nobody names."""
_MOST_BYTES = 1 << 30
_COPIES = 1.1
"""Peak memory of a model that runs, in sizes of its weights."""
_TIMES = 10
"""The same in sizes of the inputs of its layers, on top of the weights."""


def input_params(
    source: Source,
    weights: Iterable[Output],
    data: Windows,
    limits: Limits,
    *,
    ranges: str | None = None,
    progress: bool = False,
) -> dict[str, QuantizationParams]:
    """Return static input parameters by module, from ranges on the data.

    Args:
        source: a model with a graph and float weights, on a disk.
        weights: of the layers, whose methods need no data.
        data: a .safetensors file with a tensor (samples, ...) for each input of the graph, or such a tensor;
            text or token ids where the graph reads ``input_ids``.
        limits: what memory there is.
        ranges: the statistic, as for :func:`calibrated`.
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

    def require(inputs: int) -> None:
        libraries = LIBRARIES if source.config else 0  # for its tokenizer, or its export
        limits.require(libraries + int(_COPIES * nbytes + _TIMES * inputs), "running the model", remedy)

    require(0)
    files = {name: entry.file.name for name, entry in source.entries.items()}
    graph = GraphFiles(graph=source.graph, folder=source.root, files=files)
    statistic = statistic_named(ranges or EXTREMES)
    observers = {
        module: Observer(statistic(given.scheme, (1,)), name=f"the input of {printable(module)}")
        for module, given in wanted.items()
    }
    seen = source.container.layer_inputs(graph, observers.keys(), partial(_samples, source, data), require)
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


_IDS = "input_ids"
_FROM_IDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    _IDS: lambda ids: ids,
    "attention_mask": torch.ones_like,
    "token_type_ids": torch.zeros_like,
    "position_ids": lambda ids: torch.arange(ids.shape[1]).expand_as(ids),
}
"""Inputs of language models, from token ids (samples, tokens)."""
_LONGEST = 1 << 30


def _samples(source: Source, data: Windows, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
    """Return samples by the names of inputs, or one unnamed tensor."""
    if _IDS in names and not _is_of_arrays(data, names):
        return _from_tokens(source, data, names)
    if data.length is not None:
        raise CalibrationError(
            f"{option('length', data.length)} counts tokens, and this model reads arrays; leave it out"
        )
    found = _tensors(data)
    asked, count = data.samples, min((len(x) for x in found.values() if x.ndim), default=0)
    if asked is not None and count < asked:
        raise CalibrationError(f"{option('samples', asked)} asks for more than the {count} that there are")
    return {name: x[:asked] if x.ndim else x for name, x in found.items()}


def _is_of_arrays(data: Windows, names: Sequence[str]) -> bool:
    """Return whether data have a tensor for each input of a graph."""
    if not isinstance(data.given, (Path, str)):
        return isinstance(data.given, Mapping) or len(names) == 1
    return str(data.given).endswith(TEXT_OF_IDS) and (len(names) == 1 or len(_tensors(data)) > 1)


def _from_tokens(source: Source, data: Windows, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the inputs of a language model's graph for windows of tokens."""
    unknown = next((name for name in names if name not in _FROM_IDS), None)
    if unknown is not None:
        raise CalibrationError(
            f"the model reads {printable(unknown)}, which does not follow from tokens; pass "
            f"{option('calibration', metavar='FILE.safetensors')} with a tensor (samples, ...) for each input"
        )
    if data.is_own:
        raise CalibrationError(
            f"{option('calibration', OWN)} is for checkpoints that transformers runs; give text or token ids"
        )
    config = source.config or {}
    vocabulary, longest = (
        size if type(size := config.get(key)) is int and size > 0 else _LONGEST
        for key in ("vocab_size", "max_position_embeddings")
    )
    ids = torch.cat(windows_of(data, source, vocabulary=vocabulary, longest=longest))
    return {name: _FROM_IDS[name](ids) for name in names}


def _tensors(data: Windows) -> dict[str, torch.Tensor]:
    """Return a safetensors file's tensors by name, or one unnamed tensor."""
    if isinstance(data.given, torch.Tensor):
        return {"": data.given}
    if isinstance(data.given, Mapping):
        return dict(data.given)
    if not str(data.given).endswith(TEXT_OF_IDS):
        raise CalibrationError(
            f"this model reads arrays, not text; pass {option('calibration', metavar='FILE.safetensors')} "
            "with a tensor (samples, ...) for each input"
        )
    return read_tensors(data.given, what="samples", most=_MOST_BYTES, remedy="write it again")
