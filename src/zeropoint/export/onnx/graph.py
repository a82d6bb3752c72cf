"""zeropoint operators of an exported graph, replaced by ONNX constants and formulas.

A weight is a ``zeropoint.dequantize`` whose codes and parameters are constants; an activation is a
``zeropoint.fake_quantize``, or a ``quantize`` or ``quantize_dynamic`` whose codes are dequantized. This
module knows the operators and nothing of files.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ...errors import UnsupportedError
from ...models.graph.matrices import SHAPING
from ...models.graph.program import args_of, operator_of, put
from ...params.tensors import parameter_names
from ...schemes import Scheme
from ...tensor import QuantizedTensor
from . import activations
from .constants import constant, is_constant, layer_name, maker_of, ops, params_at, picked_rows, quantized_at
from .types import CodeType, StoredWeight, stored

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """Constants of a weight: paths of codes, scale and zero point.

    Or the path of its values where ``attributes`` is None. codes: our packed ones, held so that their address
    stays theirs. shape: of the codes in the file. count: how many nodes that reshape the weight they
    represent.
    """

    codes: torch.Tensor
    paths: list[str | None]
    attributes: dict[str, int] | None = None
    shape: list[int] = field(default_factory=list)
    count: int = 0


@dataclass(slots=True)
class Rewriter:
    """Replaces the operators of one graph.

    module: the graph, changed in place. opset: of the file to be. allow_float: whether weights that ONNX
    cannot hold in codes become floats. packed: after the work, the path of each constant that has several
    codes a byte in the file, with its type.
    """

    module: fx.GraphModule
    opset: int
    allow_float: bool
    packed: dict[str, CodeType] = field(default_factory=dict)
    written: dict[str, _Written] = field(default_factory=dict)

    def run(self) -> None:
        """Replace every operator; raises UnsupportedError, which names layer and scheme."""
        for node in list(self.module.graph.nodes):
            if node.target is ops.linear.default:
                self._open(node)
            elif node.target is ops.linear_values.default:
                self._open_values(node)
        for node in list(self.module.graph.nodes):
            if node.target in (ops.dequantize.default, ops.fake_quantize.default):
                try:
                    self._replace(node)
                except UnsupportedError as error:
                    name = layer_name(node) or "model"
                    raise UnsupportedError(
                        f"layer {name}: {node.args[2]} cannot be written to ONNX: {error}"
                    ) from error

    def _open(self, node: fx.Node) -> None:
        """Write an integer linear layer as the float product of its values."""
        x, params, weight, weight_params, bias, text, weight_text, dtype = args_of(node)
        value = x.meta["val"]
        shape = [constant(self.module, weight).shape[0], value.shape[-1]]
        with self.module.graph.inserting_before(node):
            if not params:
                parts = self._call(ops.quantize_dynamic.default, (x, text))
                count = len(parameter_names(Scheme.parse(text)))
                params = [self._call(operator.getitem, (parts, 1 + index)) for index in range(count)]
            rounded = self._call(ops.fake_quantize.default, (x, params, text))
            written = (weight, weight_params, weight_text, shape, value.dtype, dtype)
            values = self._call(ops.dequantize.default, written)
            product = self._call(aten.linear.default, (rounded, values, bias))
        for made in (rounded, values):
            made.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
        self._swap(node, product)

    def _open_values(self, node: fx.Node) -> None:
        """Write a linear layer on values of its weight as their product."""
        x, weight, params, bias, text, dtype = args_of(node)
        value = x.meta["val"]
        shape = [constant(self.module, weight).shape[0], value.shape[-1]]
        with self.module.graph.inserting_before(node):
            values = self._call(ops.dequantize.default, (weight, params, text, shape, value.dtype, dtype))
            product = self._call(aten.linear.default, (x, values, bias))
        values.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
        self._swap(node, product)

    def _replace(self, node: fx.Node) -> None:
        source, params = args_of(node)[:2]
        if node.target is ops.fake_quantize.default:
            self._activation(node, source, params)
            return
        maker = maker_of(source)
        if maker is not None:
            self._activation(node, args_of(maker)[0], params)
        elif is_constant(source):
            self._weight(node)
        else:
            self._rows(node)

    def _activation(self, node: fx.Node, source: fx.Node, given: Sequence[fx.Node]) -> None:
        scheme = Scheme.parse(str(node.args[2]))
        with self.module.graph.inserting_before(node):
            if given and all(is_constant(each) for each in given):
                result = self._static(node, source, scheme, given)
            else:
                activations.require_dynamic(source.meta["val"], scheme)
                result = self._call(activations.dynamic, (source, str(scheme)))
        self._swap(node, result)

    def _static(self, node: fx.Node, source: fx.Node, scheme: Scheme, given: Sequence[fx.Node]) -> fx.Node:
        kind, axis = activations.static_type(scheme), activations.axis_of(scheme.granularity)
        value = source.meta["val"]
        shape = tuple(side if isinstance(side, int) else 1 for side in value.shape)
        params = params_at(self.module, scheme, given, shape, value.dtype)
        factor = params.effective_scale()
        assert factor is not None
        step = float(scheme.element_step)
        scale = (factor * step).float()
        zeros = torch.zeros_like(scale) if params.zero_point is None else params.zero_point
        ends = activations.ends(scheme, kind, scale, zeros)
        form = () if axis is None else (-1,)
        stem = f"{layer_name(node)}.activation".lstrip(".")
        constants = (scale.reshape(form).clone(), zeros.reshape(form).to(kind.carrier))
        names = ("scale", "zero_point")
        read = [self._constant(f"{stem}_{name}", each) for name, each in zip(names, constants, strict=True)]
        bounds = None if ends is None else [self._constant(f"{stem}_end", end) for end in ends]
        return self._call(activations.static, (source, *read, bounds, axis))

    def _weight(self, node: fx.Node) -> None:
        """Write a weight, with codes in their final shape if possible."""
        chain = [node]
        while len(chain[-1].users) == 1 and next(iter(chain[-1].users)).target in SHAPING:
            chain.append(next(iter(chain[-1].users)))
        with self.module.graph.inserting_before(node):
            result, done = self._values(node, chain[1:])
        self._swap(chain[done], result)

    def _values(self, node: fx.Node, chain: Sequence[fx.Node]) -> tuple[fx.Node, int]:
        """Return the node of a weight's values, and the replaced reshapes."""
        q = quantized_at(self.module, node)
        moves = [(str(each.target), each.args[1:]) for each in chain]
        key = str((q.data.data_ptr(), q.data.shape, str(q.scheme), q.shape, node.args[4], moves))
        if key not in self.written:
            self.written[key] = self._constants(node, q, chain)
        known = self.written[key]
        read = [None if path is None else self.module.graph.get_attr(path) for path in known.paths]
        if known.attributes is None:
            assert read[0] is not None
            return read[0], known.count
        return self._call(
            dequantize_linear, (*read, known.attributes, known.shape, node.args[4])
        ), known.count

    def _constants(self, node: fx.Node, q: QuantizedTensor, chain: Sequence[fx.Node]) -> _Written:
        """Keep what ONNX holds of a weight in the module."""
        name = f"{layer_name(node)}.weight".lstrip(".")
        try:
            weight = stored(q, self.opset)
        except UnsupportedError as error:
            if not self.allow_float:
                raise UnsupportedError(f"{error}; or pass allow_float=True, which writes floats") from error
            values = q.dequantize(args_of(node)[4])
            return _Written(codes=q.data, paths=[put(self.module, name, values)])
        moved = _moved(weight, chain)
        weight, count = (weight, 0) if moved is None else (moved, len(chain))
        parts = (("quantized", weight.codes), ("scale", weight.scale), ("zero_point", weight.zero_point))
        paths = [None if each is None else put(self.module, f"{name}_{part}", each) for part, each in parts]
        if weight.type.is_packed:
            self.packed |= {path: weight.type for path in (paths[0], paths[2]) if path is not None}
        return _Written(
            codes=q.data,
            paths=paths,
            attributes=weight.attributes,
            shape=list(weight.codes.shape),
            count=count,
        )

    def _rows(self, node: fx.Node) -> None:
        """Write a gathered, dequantized table as a whole and a gather."""
        table, index = picked_rows(node.args[0])
        if index is None or not is_constant(table):
            raise UnsupportedError("its codes are computed in the graph")
        _, params, text, sides, *dtypes = args_of(node)
        tables = [picked_rows(each)[0] for each in params]
        shape = [constant(self.module, table).shape[0], *sides[1:]]
        with self.module.graph.inserting_before(node):
            args = (table, tables, text, shape, *dtypes)
            whole = self._call(ops.dequantize.default, args)
            whole.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
            picked = self._call(aten.index_select.default, (whole, 0, index))
        self._swap(node, picked)
        self._weight(whole)

    def _constant(self, path: str, tensor: torch.Tensor) -> fx.Node:
        return self.module.graph.get_attr(put(self.module, path, tensor))

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
        return self.module.graph.call_function(target, args)

    def _swap(self, node: fx.Node, result: fx.Node) -> None:
        """Replace ``node`` by ``result``; nodes that only ``node`` used are removed later."""
        if "val" in node.meta:
            result.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(result)


def dequantize_linear(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    attributes: dict[str, int],
    shape: list[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return DequantizeLinear's result in ``dtype``; a function to trace."""
    inputs = (codes, scale) if zero_point is None else (codes, scale, zero_point)
    values = torch.onnx.ops.symbolic(
        "DequantizeLinear", inputs, dict(attributes), dtype=torch.float32, shape=shape
    )
    return values.to(dtype)


def _moved(weight: StoredWeight, chain: Sequence[fx.Node]) -> StoredWeight | None:
    """Return the weight with moved codes, or None for broken blocks."""
    if not chain or weight.block_size is not None:
        return None

    def through(tensor: torch.Tensor) -> torch.Tensor:
        for node in chain:
            tensor = operator_of(node)(tensor, *node.args[1:])
        return tensor

    codes = through(weight.codes).contiguous()
    if weight.axis is None:
        return replace(weight, codes=codes)
    count = weight.codes.shape[weight.axis]
    numbers = torch.arange(count).reshape(-1, *[1] * (weight.codes.ndim - weight.axis - 1))
    spread = through(numbers.expand(weight.codes.shape))
    for axis, side in enumerate(spread.shape):
        along = torch.arange(count).reshape(-1, *[1] * (spread.ndim - axis - 1)) if side == count else None
        if along is not None and bool((spread == along).all()):
            return replace(weight, codes=codes, axis=axis)
    return None
