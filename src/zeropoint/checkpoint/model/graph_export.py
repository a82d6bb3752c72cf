"""Export of a checkpoint's model to ONNX, for quantization as a graph.

Weights have the names that they have in the checkpoint, so that rules and patterns mean the same. They are in
float32, which runtimes multiply on a CPU, and codes of a quantized checkpoint are decoded. Files that go with
the model, such as its tokenizer, lie next to the graph.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...codecs.containers import CONTAINERS
from ...codecs.protocol import Codec
from ...errors import CalibrationError, UnsupportedError, option
from ...export.onnx.exporter import exported
from ...libraries import reading
from ..plan.limits import Limits
from ..read.source import Source, open_source
from ..read.storage import Place, read_small, shown
from .running_model import LIBRARIES, whole_model
from .solved_weights import folder_for

_REMEDY = "export it by hand, with torch.onnx.export or optimum-cli export onnx, and pass the .onnx file"
_OPERATORS = 21
"""The set of operators: the first one with integers of 4 bits and blocks."""
_COPIES = 2.5
"""Times the weights that exporting takes: the model, and transposed matrices. SmolLM2-135M took 1.9."""
_LARGEST = 1 << 30
"""Bytes of a file that is copied, at most."""
_SCOPES = "pkg.torch.onnx.name_scopes"


@contextmanager
def exported_graph(
    source: Source, codec: Codec, out: Place, spool: Path | str | None, limits: Limits, *, learns: bool
) -> Iterator[Source]:
    """Return a context with a source's model as an ONNX graph.

    Args:
        source: a checkpoint without a graph.
        codec: what the result is written in.
        out: the output, next to which the export lies until the end, or a URL, for which it is in ``spool``.
        spool: scratch directory, or None.
        limits: of memory.
        learns: whether a method or a search needs statistics of inputs.

    Raises:
        CalibrationError: for a model that would be exported and learned from, since graphs give ranges alone.
        UnsupportedError: where torch or transformers does not export the model.
        CheckpointError: where the model does not fit in memory.
    """
    if learns:
        raise CalibrationError(
            f"{option('format', codec.name)} takes ranges of static inputs from data, and no statistics for "
            f"methods or a search; use {option('quality', 'fast')} or {option('method', 'mse')}"
        )
    with folder_for(out, spool, restart=False, kind="exported") as waiting:
        folder = waiting / "zeropoint-exported"
        folder.mkdir()
        _export(source, folder / f"model{CONTAINERS[codec.container].suffix}", limits)
        for name in source.companions:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(read_small(source.root / name, limit=_LARGEST)[0])
        (folder / "config.json").write_text(source.config_text or "", encoding="utf-8")
        note = f"exported from {shown(source.given)} by torch {torch.__version__}, in float32"
        made = open_source(folder)
        yield replace(made, notes=(*made.notes, note))


def _export(source: Source, path: Path, limits: Limits) -> None:
    """Write the graph of a model and its weights next to it."""
    ids = torch.ones(2, 8, dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    what = f"torch {torch.__version__} does not export the model of {shown(source.root)}"
    with reading(what, _REMEDY, UnsupportedError):
        nbytes = 4 * sum(math.prod(entry.shape) for entry in source.entries.values())
        limits.require(LIBRARIES + int(_COPIES * nbytes), f"exporting {shown(source.given)}", _REMEDY)
        model: Any = whole_model(source, limits, _REMEDY, torch.float32)
        model.config.use_cache = False
        program = _program(model, batch)
        for node in program.model.graph.all_nodes():
            _rename_weight(node, program.model.graph.initializers)
            node.metadata_props.clear()  # places in the files of this machine
        program.save(path, external_data=True)


def _program(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    with torch.no_grad():
        found = model(**batch)
    names = [name for name, value in found.items() if isinstance(value, torch.Tensor)]
    return exported(
        model,
        (),
        kwargs=batch,
        dynamic_shapes=dict.fromkeys(batch, axes),
        opset_version=_OPERATORS,
        input_names=list(batch),
        output_names=names,
    )


def _rename_weight(node: Any, initializers: Any) -> None:
    """Rename a weight that the export transposed after its layer."""
    if node.op_type not in ("MatMul", "Gemm") or _SCOPES not in node.metadata_props:
        return
    scopes = ast.literal_eval(node.metadata_props[_SCOPES])
    weight = node.inputs[1]
    name = f"{scopes[-2]}.weight" if len(scopes) > 1 else ""
    if weight.name in initializers and weight.name.startswith("val_") and name not in ("", *initializers):
        weight.name = name
