"""Operator sets of ONNX models: required versions, and compared translations.

``onnx`` translates graphs from one set to another, and gives some nodes another meaning. What is known is set
right, and where onnxruntime is installed, the model before and after is run on random weights and inputs,
which must give the same outputs.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..errors import UnsupportedError, ZeropointError, option, printable
from ..libraries import reading
from .containers.onnx_graph import STANDARD, all_graphs, constants
from .containers.onnx_session import has_runtime, opened

_INTERNAL_VERSIONS = ((19, 9), (21, 10), (23, 11), (24, 12), (25, 13))
"""Sets of operators, and the first version of the format with the types that they need."""
_LEAST_OPERATORS = 7
"""Operator set of ONNX 1.2 (2017): from older ones, onnx 1.22 crashes the process on damaged models."""
_RESIZE_COORDINATES = 11
"""The set in which Resize has a mode of coordinates, half_pixel by default and asymmetric before."""
_MOST_BYTES = 1 << 29
"""Weights and inputs of a model that is run."""
_SIZES = (2, 1, 8, 32, 64, 224)
"""Sizes that are tried for axes without one."""
_APART = 1e-3
"""Norm of the difference of outputs over their norm: operators that were not translated give equal ones."""


def raised(model: Any, least: int) -> tuple[Any, str | None]:
    """Return a model with a newer operator set, if needed.

    A note says where nothing compared the two. least: number of the set. The model is changed in place.
    Raises UnsupportedError where ``onnx`` cannot translate it, or changes its outputs.
    """
    for operators, version in _INTERNAL_VERSIONS:
        if least >= operators:
            model.ir_version = max(model.ir_version, version)
    now = max((each.version for each in model.opset_import if each.domain in STANDARD), default=least)
    if now >= least:
        return model, None
    step = f"from operator set {now} to {least}, which these types need"
    remedy = f"use a type that needs none ({option('format', 'onnx-matmulnbits')}), or export the model anew"
    if now < _LEAST_OPERATORS:
        raise UnsupportedError(
            f"the model has operator set {now}, and {_LEAST_OPERATORS} or newer are translated to {least}, "
            "which these types need; export the model anew"
        )
    if model.functions:  # which onnx drops
        names = ", ".join(sorted({f"{each.domain}.{each.name}" for each in model.functions}))
        raise UnsupportedError(
            f"onnx does not translate local functions ({printable(names[:200])}) of another operator "
            f"set than the model {step}; {remedy}"
        )
    before = type(model)()
    before.CopyFrom(model)
    found = _set_right(_translated(model, least, f"onnx cannot translate the model {step}", remedy), now)
    try:
        apart = _compared(before, found)
    except _IncomparableError as error:
        return found, f"onnx translated the model {step}; its outputs were not compared: {error}"
    if apart is not None:
        changed = ", ".join(sorted(_changed_operators(before, now, least)))
        raise UnsupportedError(
            f"onnx translates the model {step}, so that its outputs change ({apart}); one of {changed} gets "
            f"another meaning; {remedy}"
        )
    return found, None


def _translated(model: Any, least: int, problem: str, remedy: str) -> Any:
    """Return the model in another set, without its tensors on the way."""
    import onnx.checker
    import onnx.version_converter

    held = [each for each in model.graph.initializer if each.data_location == 1]
    known = {each.name for each in model.graph.input}
    for each in held:
        model.graph.initializer.remove(each)
        if each.name not in known:
            info = model.graph.input.add()
            info.CopyFrom(onnx.helper.make_tensor_value_info(each.name, each.data_type, list(each.dims)))
    with reading(problem, remedy, UnsupportedError):
        with _without_numbers(model):  # a damaged one would end the process (onnx 1.22)
            onnx.checker.check_model(model)
        found = onnx.version_converter.convert_version(model, least)
    names = {each.name for each in held} - known
    inputs = [each for each in found.graph.input if each.name not in names]
    del found.graph.input[:]
    found.graph.input.extend(inputs)
    found.graph.initializer.extend(held)
    found.ir_version = model.ir_version
    return found


@contextmanager
def _without_numbers(model: Any) -> Iterator[None]:
    """Hide external tensor data, misplaced for onnx, within the block."""
    elsewhere = [(each, list(each.dims)) for each in _tensors(model) if each.data_location == 1]
    try:
        for each, _ in elsewhere:
            each.dims[:], each.data_location = [0], 0
        yield
    finally:
        for each, dims in elsewhere:
            each.dims[:], each.data_location = dims, 1


def _tensors(model: Any) -> Iterator[Any]:
    """Yield the tensors of all graphs."""
    yield from (each for graph in all_graphs(model) for each in graph.initializer)
    yield from (tensor for _, tensor in constants(model))


def _set_right(model: Any, before: int) -> Any:
    """Restore the meaning of nodes that onnx 1.22 changes.

    Resize has asymmetric coordinates in set 10, which the adapter to 11 does not say (onnx issue 8480).
    """
    import onnx

    for node in (node for graph in all_graphs(model) for node in graph.node):
        silent = all(each.name != "coordinate_transformation_mode" for each in node.attribute)
        if node.op_type == "Resize" and before < _RESIZE_COORDINATES and silent:
            values = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
            node.attribute.extend(onnx.helper.make_attribute(*each) for each in values.items())
    return model


def _changed_operators(model: Any, before: int, after: int) -> set[str]:
    """Return the model's operators that the set ``after`` redefines."""
    import onnx.defs

    operators = {
        node.op_type for graph in all_graphs(model) for node in graph.node if node.domain in STANDARD
    }
    return {
        name
        for name in operators
        if onnx.defs.has(name)
        and onnx.defs.get_schema(name, before).since_version
        != onnx.defs.get_schema(name, after).since_version
    }


class _IncomparableError(ZeropointError):
    """Two models cannot be run here."""


_NOT_RUN = "onnxruntime does not run it", "compare it by hand"


def _compared(before: Any, after: Any) -> str | None:
    """Return the difference of two models' outputs, or None; may raise."""
    first, names = _session(before)
    inputs, expected = _first_run(before, first)
    second, _ = _session(after)
    with reading(*_NOT_RUN, _IncomparableError):
        found = second.run(names, inputs)
    for name, a, b in zip(names, expected, found, strict=True):
        apart = _distance(a, b)
        if apart > _APART:
            return f"{printable(name)} by {apart:.0%}"
    return None


def _distance(a: Any, b: Any) -> float:
    """Return a difference's relative norm; Inf for other shapes or NaN."""
    if a.shape != b.shape:
        return math.inf
    if a.dtype.kind != "f":
        return float(not np.array_equal(a, b))
    a, b = a.astype(np.float64), b.astype(np.float64)
    odd = ~np.isfinite(a)
    if not np.array_equal(a[odd], b[odd], equal_nan=True) or not np.isfinite(b[~odd]).all():
        return math.inf
    norm = float(np.linalg.norm(a[~odd]))
    return float(np.linalg.norm(a[~odd] - b[~odd])) / max(norm, 1e-30)


def _session(model: Any) -> tuple[Any, list[str]]:
    """Return a runnable session, random numbers in place of external data."""
    if not has_runtime():
        raise _IncomparableError("onnxruntime is not installed")
    filled = type(model)()
    filled.CopyFrom(model)
    held = [each for each in _tensors(filled) if each.data_location == 1]
    sizes = [math.prod(each.dims) for each in held]
    if 4 * sum(sizes) > _MOST_BYTES:
        raise _IncomparableError(f"its weights ({sum(sizes):,} values) are many")
    for each in held:
        values = _random(each.name, each.data_type, tuple(each.dims))
        del each.external_data[:]
        each.data_location, each.raw_data = 0, values.tobytes()
    with reading(*_NOT_RUN, _IncomparableError):
        session = opened(filled.SerializeToString())
    return session, [each.name for each in filled.graph.output]


def _first_run(model: Any, session: Any) -> tuple[Mapping[str, Any], list[Any]]:
    """Return inputs of the smallest working sizes, and the outputs."""
    given = {each.name for each in model.graph.initializer}
    inputs = [each for each in model.graph.input if each.name not in given]
    problem = _IncomparableError("its inputs are large")
    for size in _SIZES:
        shapes = {each.name: _shape(each.type.tensor_type, size) for each in inputs}
        if 4 * sum(map(math.prod, shapes.values())) > _MOST_BYTES:
            continue
        values = {
            each.name: _random(each.name, each.type.tensor_type.elem_type, shapes[each.name])
            for each in inputs
        }
        try:
            with reading(*_NOT_RUN, _IncomparableError):
                return values, session.run([each.name for each in model.graph.output], values)
        except _IncomparableError as error:
            problem = error
    raise problem


def _shape(kind: Any, size: int) -> tuple[int, ...]:
    return tuple(axis.dim_value or size for axis in kind.shape.dim)


def _random(name: str, data_type: int, shape: tuple[int, ...]) -> Any:
    """Return random normals, scaled for stable products; integers are bits."""
    import onnx

    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(data_type)
    except KeyError as error:
        raise _IncomparableError(f"{printable(name)} has the type {data_type}") from error
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    if dtype.kind in "biu":
        return generator.integers(0, 2, shape).astype(dtype)
    if dtype.kind == "O":
        return np.full(shape, "a", dtype)
    spread = math.sqrt(2 / max(1, math.isqrt(math.prod(shape))))
    return (generator.standard_normal(shape) * spread).astype(dtype)
