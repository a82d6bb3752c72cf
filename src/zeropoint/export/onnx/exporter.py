"""ONNX export of quantized models, with codes in QuantizeLinear and DequantizeLinear.

Layout of a weight: see :mod:`zeropoint.export.onnx.types`. A weight whose scheme has more scale levels than
ONNX can say has their product. Inputs and outputs with fixed parameters pass QuantizeLinear and
DequantizeLinear; dynamic ones a formula in float32 that gives the same numbers. torch writes the rest of the
graph.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from ...errors import CheckpointError, UnsupportedError
from ...libraries import reading
from ...models import PreparedLayer, convert
from ...models.graph import convert_graph, to_program
from ...models.graph.prepare import PLAN
from ...models.graph.program import cleaned, evaluate, graph_of
from ...models.recipe_layers import require_model
from ...own_files import FileKind, OwnFile
from .graph import Rewriter
from .types import CodeType, packed_bytes

LEAST_OPSET = 21
"""The first operator set with blocks of scales and types of 4 bits."""
_LIMIT = (1 << 31) - 1


def export_onnx(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...] | Mapping[str, Any] | None,
    path: str | Path,
    *,
    dynamic_shapes: Any = None,
    opset: int = LEAST_OPSET,
    allow_float: bool = False,
) -> Path:
    """Atomically write a quantized model to an ONNX file; return its path.

    model: a result of ``quantize_model``, ``quantize_graph`` or ``convert_graph``, or such a program; of
    ``prepare`` or ``prepare_graph``, it is converted first, as a copy. args:
    example inputs, positional or by name; None for a program, which has its own. dynamic_shapes: which axes
    may vary, as ``torch.export.export`` takes it. opset: 21 or later; from 23 on, 4-bit floats are held as
    such, which onnxruntime cannot read yet, and before in 8 bits, as the same numbers. allow_float: whether
    weights in schemes that ONNX cannot say are written as float32.

    Raises UnsupportedError, which names the layer and its scheme, for what ONNX cannot say, for arguments
    that do not fit, an operator set that torch does not write, and where ``onnx`` or ``onnxscript`` is
    missing; CheckpointError where the file cannot be written; and what conversion raises.

    >>> import tempfile
    >>> from zeropoint.models import quantize_model
    >>> model = quantize_model(nn.Linear(64, 8), "w4a16").model
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_onnx(model, (torch.ones(2, 64),), f"{folder}/model.onnx").name
    'model.onnx'
    """
    if type(opset) is not int or opset < LEAST_OPSET:
        raise UnsupportedError(f"opset (={opset!r}) must be {LEAST_OPSET} or later, where scales have blocks")
    if not Path(path).parent.is_dir():
        raise CheckpointError(f"path (={str(path)!r}) must lie in a folder that exists; create it first")
    program = _exported(model, args, dynamic_shapes)
    module = graph_of(program)
    evaluate(module)
    rewriter = Rewriter(module, opset, allow_float)
    rewriter.run()
    proto = _proto(to_program(cleaned(module), program), opset)
    for initializer in proto.graph.initializer:
        if initializer.name in rewriter.packed:
            _pack(initializer, rewriter.packed[initializer.name])
    described = [info for info in proto.graph.value_info if info.name not in rewriter.packed]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(described)
    return _write(proto, Path(path))


def _exported(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...] | Mapping[str, Any] | torch.Tensor | None,
    dynamic_shapes: Any,
) -> ExportedProgram:
    """Return ``model`` as an exported program; programs as they are."""
    if isinstance(model, ExportedProgram):
        if args is not None or dynamic_shapes is not None:
            raise UnsupportedError("args and dynamic_shapes must be None for a program, which has its own")
        return model
    require_model(model)
    if PLAN in getattr(model, "meta", {}):
        model = convert_graph(cast(fx.GraphModule, model)).model
    elif any(isinstance(m, PreparedLayer) for m in model.modules()):
        model = convert(model).model
    if args is None or isinstance(args, torch.Tensor):
        found = "None" if args is None else "a Tensor"
        raise UnsupportedError(
            f"args ({found}) must be example inputs for a model that is not an exported program: a tuple, or "
            "a mapping by name"
        )
    named = isinstance(args, Mapping)
    positional, keywords = ((), dict(args)) if named else (tuple(args), {})
    with torch.no_grad():
        return torch.export.export(model, positional, keywords, dynamic_shapes=dynamic_shapes)


def exported(model: Any, *args: Any, **options: Any) -> Any:
    """Return torch's ONNX program of a model, without its warnings.

    model: a module or an exported program. *args: as ``torch.onnx.export`` takes them. **options: likewise.
    Raises UnsupportedError where a package that torch needs for it is missing.
    """
    # It says which packages that no model here needs are missing, and uses what torch has deprecated (2.13).
    said = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = said.level
    try:
        said.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.onnx.export(model, *args, dynamo=True, verbose=False, **options)
    except ImportError as error:
        raise UnsupportedError(f"writing ONNX needs {error.name}; install zeropoint[onnx]") from error
    finally:
        said.setLevel(level)


def _proto(program: ExportedProgram, opset: int) -> Any:
    """Return torch's translation, or UnsupportedError for a missing package."""
    made = exported(program, opset_version=opset)
    (written,) = (each.version for each in made.model_proto.opset_import if each.domain in ("", "ai.onnx"))
    if written != opset:
        # torch silently keeps its own operator set where it cannot convert to another (torch 2.13).
        raise UnsupportedError(f"opset (={opset}) is not one that this torch writes; take {LEAST_OPSET}")
    return made.model_proto


def _pack(initializer: Any, kind: CodeType) -> None:
    """Pack an initializer of one code a byte into its type."""
    dtype = torch.int8 if kind.carrier is torch.int8 else torch.uint8
    codes = torch.frombuffer(bytearray(initializer.raw_data), dtype=dtype)
    initializer.data_type = initializer.DataType.Value(kind.name)
    initializer.raw_data = packed_bytes(codes, kind)


def _write(proto: Any, path: Path) -> Path:
    """Check the model, then write it atomically."""
    import onnx

    if proto.ByteSize() > _LIMIT:
        raise UnsupportedError(
            f"the model ({proto.ByteSize()} bytes) must fit in the {_LIMIT} of one ONNX file; use fewer bits"
        )
    with reading("onnx refuses the model", "report it with the scheme", UnsupportedError):
        onnx.checker.check_model(proto, full_check=True)
    OwnFile(path, FileKind("model")).write([proto.SerializeToString()], overwrite=True)
    return path
