"""Rewriting of ONNX graphs: codes in place of weights.

What a weight becomes is its codec's business; this module knows where tensors and nodes go. Nodes, names and
metadata of the model stay as they are, unless a newer set of operators is needed (onnx_operators.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import CheckpointError, UnsupportedError, option
from .containers.onnx import DATA_NAMES, DATA_TYPES, shape_of
from .containers.onnx_graph import (
    BLOCK_SCALES,
    CODES,
    DEQUANTIZE,
    INPUT_SCALE,
    OUTER,
    QUANTIZE,
    RUNTIME,
    SCALE,
    GraphLayer,
    Initializer,
    Read,
    all_graphs,
    attribute_of,
    initializers,
    parsed,
)
from .containers.protocol import Found
from .containers.safetensors import TORCH_DTYPES
from .onnx_operators import raised
from .protocol import Contents, Documents, LayerScheme

WEIGHT = ".weight"
_LIMIT = (1 << 31) - 1


class Rewriting:
    """A model changed in place, and the result's tensor ``places`` by name."""

    def __init__(self, model: Any, places: Mapping[str, Found]) -> None:
        self.model = model
        self._places = places

    @staticmethod
    def dtype(each: Initializer) -> torch.dtype:
        """Return the dtype of a weight."""
        return TORCH_DTYPES[DATA_NAMES[each.tensor.data_type]]

    def add(self, graph: Any, name: str, dtype: str, dims: Sequence[int]) -> None:
        """Add a tensor of the result to a graph."""
        tensor = graph.initializer.add()
        tensor.name, tensor.data_type = name, DATA_TYPES[dtype].number
        tensor.dims.extend(dims)
        self.place(tensor, name)

    @staticmethod
    def add_zero(graph: Any, name: str, dtype: str) -> None:
        """Add a one-byte zero to a graph, in the codes' type."""
        tensor = graph.initializer.add()
        tensor.name, tensor.data_type, tensor.raw_data = name, DATA_TYPES[dtype].number, b"\0"

    def place(self, tensor: Any, name: str) -> None:
        """Point a tensor at the result's data of ``name``.

        Scales that calibration gives have no place before it.
        """
        found = self._places.get(name)
        if found is None:
            return
        del tensor.external_data[:]
        tensor.data_location = 1
        values = {"location": found.file, "offset": str(found.begin), "length": str(found.row.nbytes)}
        for key, value in values.items():
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value

    def node(
        self, operator: str, inputs: Sequence[str], output: str, attributes: Mapping[str, int] | None = None,
        *, name: str = "",
    ) -> Any:  # fmt: skip
        """Return a new node, of onnxruntime's domain where needed."""
        import onnx

        domain = RUNTIME if operator not in _STANDARD_NODES else ""
        if domain and all(each.domain != domain for each in self.model.opset_import):
            self.model.opset_import.add(domain=domain, version=1)
        own: dict[str, Any] = dict(attributes or {})
        title = name or f"{output}/{operator}"
        return onnx.helper.make_node(operator, list(inputs), [output], name=title, domain=domain, **own)

    def put(self, graph: Any, old: Any, nodes: Sequence[Any]) -> None:
        """Put nodes in the place of one."""
        at = next(n for n, node in enumerate(graph.node) if node is old)
        _insert(graph, at, nodes)
        graph.node.remove(old)

    @staticmethod
    def put_before(read: Read, nodes: Sequence[Any]) -> None:
        """Put nodes before one that reads what they make."""
        at = next(n for n, node in enumerate(read.graph.node) if node is read.node)
        _insert(read.graph, at, nodes)

    def swap(self, each: Initializer, name: str, nodes: Sequence[Any]) -> None:
        """Insert nodes before a graph; replace an initializer by ``name``."""
        for read in each.reads:
            read.node.input[read.index] = name
        _insert(each.graph, 0, nodes)
        self.drop(each)

    def drop(self, each: Initializer) -> None:
        """Remove an initializer, and its graph input in old models."""
        for group in (each.graph.input, each.graph.value_info):
            for info in [info for info in group if info.name == each.tensor.name]:
                group.remove(info)
        each.graph.initializer.remove(each.tensor)


_STANDARD_NODES = ("Add", DEQUANTIZE, "MatMul", QUANTIZE)


def _insert(graph: Any, at: int, nodes: Sequence[Any]) -> None:
    for node in reversed(nodes):
        graph.node.insert(at, node)


def module_name(each: Initializer) -> str:
    """Return the name of the layer of a weight."""
    return each.name.removesuffix(".weight")


def rewritten(
    contents: Contents,
    operators: int,
    replace: Callable[[Rewriting, Initializer, LayerScheme, tuple[int, int]], None],
) -> Documents:
    """Return the model of a result as its only document.

    operators: the least set of operators that it needs. replace: puts what a weight became in its place.
    Raises UnsupportedError where the source is no ONNX model, or ``onnx`` cannot translate it.
    """
    if not contents.graph:
        raise UnsupportedError(
            f"{option('format')} writes ONNX models from ONNX models, and the source is none; "
            "zeropoint quantize exports a checkpoint of transformers by itself; export others by "
            "torch.onnx.export, and pass the .onnx file"
        )
    places = {found.row.name: found for found in contents.tensors()}
    layers = {module.name: module.layer for module in contents.modules() if module.layer is not None}
    model, note = raised(_with_floats(parsed(contents.graph)), operators)
    edit = Rewriting(model, places)
    for each in initializers(model)[0]:
        layer = layers.get(module_name(each)) if each.use.reason is None else None
        if layer is not None:
            rows, columns = shape_of(each.dims, each.use)
            replace(edit, each, layer, (rows, columns))
        elif each.tensor.data_location == 1:
            edit.place(each.tensor, each.name)
    data = edit.model.SerializeToString(deterministic=True)
    if len(data) > _LIMIT:
        raise CheckpointError(f"the graph ({len(data)} bytes) must fit in the {_LIMIT} of one ONNX file")
    file = next(iter(places.values())).file
    notes = () if note is None else (note,)
    return Documents(section=None, files={file.removesuffix(".data"): data}, notes=notes)


def _with_floats(model: Any) -> Any:
    """Return a model with empty float tensors for quantized weights.

    What decoded or multiplied the codes is gone, and the codes with it.
    """
    _, layers = initializers(model)
    gone = _remove_inputs(model, layers)
    for key, layer in layers.items():
        node = layer.node
        graph = next(each for each in all_graphs(model) if any(own is node for own in each.node))
        weight = graph.initializer.add()
        weight.name, weight.data_location = f"{key}{WEIGHT}", 1
        gone |= {*node.input, *(part.tensor.name for part in layer.parts.values())}
        if node.op_type == DEQUANTIZE:
            weight.data_type = _values_type(layer)
            weight.dims.extend(layer.parts[CODES].dims)
            for read in layer.reads:
                read.node.input[read.index] = weight.name
            graph.node.remove(node)
            _remove_makers(graph, node.input[1])
        else:
            weight.data_type = layer.parts[BLOCK_SCALES].tensor.data_type
            weight.dims.extend([attribute_of(node, "K", 0), attribute_of(node, "N", 0)])
            _put_product(graph, node, weight.name)
    for each in initializers(model)[0]:
        if each.tensor.name in gone and not each.reads and not each.is_output:
            Rewriting(model, {}).drop(each)
    return model


def _remove_inputs(model: Any, layers: Mapping[str, GraphLayer]) -> set[str]:
    """Remove the nodes that quantize static inputs; return their parameters' names."""
    scales = {f"{key}.{INPUT_SCALE}" for key in layers}
    gone: set[str] = set()
    for graph in all_graphs(model):
        firsts = [n for n in graph.node if n.op_type == QUANTIZE and n.input[1] in scales]
        for first in firsts:
            seconds = [n for n in graph.node if n.op_type == DEQUANTIZE and n.input[0] == first.output[0]]
            _read_instead(graph.node, {node.output[0]: first.input[0] for node in seconds})
            gone |= {*first.input[1:]}
            for node in (first, *seconds):
                graph.node.remove(node)
    return gone


def _read_instead(nodes: Sequence[Any], names: Mapping[str, str]) -> None:
    for node in nodes:
        for index, name in enumerate(node.input):
            if name in names:
                node.input[index] = names[name]


def _values_type(layer: GraphLayer) -> int:
    """Return the type of the values that a DequantizeLinear gives."""
    scale = layer.parts.get(OUTER, layer.parts[SCALE])
    return attribute_of(layer.node, "output_dtype", 0) or int(scale.tensor.data_type)


def _remove_makers(graph: Any, name: str) -> None:
    """Remove the node that makes a tensor without readers."""
    if not any(name in node.input for node in graph.node):
        for node in [node for node in graph.node if name in node.output]:
            graph.node.remove(node)


def _put_product(graph: Any, node: Any, weight: str) -> None:
    """Replace MatMulNBits by a MatMul, and an Add of a bias."""
    (result,), bias = node.output, node.input[_BIAS] if len(node.input) > _BIAS else ""
    edit = Rewriting(None, {})
    out = f"{result}_product" if bias else result
    nodes = [edit.node("MatMul", [node.input[0], weight], out, name=node.name)]
    if bias:
        nodes.append(edit.node("Add", [out, bias], result))
    edit.put(graph, node, nodes)


_BIAS = 5
"""Input of MatMulNBits that is added to the product."""
