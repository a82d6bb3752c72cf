"""Weights and quantized weights among the initializers of an ONNX graph.

    MatMul(x, W)             W is (..., inputs, outputs)
    MatMul(W, x)             W is (..., outputs, inputs)
    Gemm(x, W, bias)         W is (outputs, inputs) with transB, and (inputs, outputs) without
    Conv(x, W)               W is (outputs, inputs, kernel ...), where the kernel is part of the inputs
    ConvTranspose(x, W)      W is (inputs, outputs, kernel ...), where the kernel is part of the outputs
    LSTM, GRU, RNN(x, W, R)  W and R are (directions, outputs, inputs)
    Gather(W, i)             W is an embedding, (rows, inputs)

What Identity, Cast and a Transpose of the last two axes give of W is read in the place of W.

A weight is quantized where DequantizeLinear, or MatMulNBits of onnxruntime, reads its codes. Graphs inside of
nodes, such as If and Loop, are looked at like the main one, and may read its initializers.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import CheckpointError, UnsupportedError, printable
from ...libraries import reading
from .protocol import Use

STANDARD, RUNTIME = ("", "ai.onnx"), "com.microsoft"
QUANTIZE, DEQUANTIZE, NBITS = "QuantizeLinear", "DequantizeLinear", "MatMulNBits"
CODES, SCALE, ZERO, OUTER = "weight_quantized", "weight_scale", "weight_zero_point", "weight_scale_2"
INPUT_SCALE, INPUT_ZERO = "input_scale", "input_zero_point"
BLOCKS, BLOCK_SCALES, BLOCK_ZEROS = "weight_nbits", "weight_nbits_scales", "weight_nbits_zero_points"
_FLOATS = (1, 10, 11, 16)
"""Numbers of the types FLOAT, FLOAT16, DOUBLE and BFLOAT16."""
MATMUL = Use(kind="Linear", operators=("MatMul",), transposed=True, axis=0)
"""Usual uses of weights."""
_MATRIX = 2
_FREE_INITIALIZERS = 4
"""The first version of the format in which initializers need not be inputs of the graph."""
RECURRENT = ("LSTM", "GRU", "RNN")
_SUFFIX = re.compile(r"(\.weight)?(_quantized|_nbits|(_DQ)?_Q\d+(G\d+)?)$")
"""Suffixes of the names of codes, ours and onnxruntime's."""


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """A node that reads a tensor as input ``index``; its graph's reads."""

    graph: Any
    node: Any
    index: int
    reads: Mapping[str, Sequence[Read]]


@dataclass(slots=True, kw_only=True, eq=False)
class Initializer:
    """A tensor of a graph.

    name: by which it is known here; a weight's ends in ``.weight``. tensor, graph: its messages. reads:
    nodes that read it. use: what follows from these.
    """

    name: str
    tensor: Any
    graph: Any
    reads: Sequence[Read]
    is_output: bool = False
    use: Use = field(default_factory=Use)

    @property
    def dims(self) -> tuple[int, ...]:
        """Its shape in the file."""
        return tuple(self.tensor.dims)

    @property
    def data(self) -> Mapping[str, str]:
        """The place of its data: location, offset, length; empty inside."""
        found: dict[str, str] = {}
        for entry in self.tensor.external_data if self.tensor.data_location == 1 else ():
            if entry.key in found:
                raise CheckpointError(f"says its {printable(entry.key)} twice")
            found[entry.key] = entry.value
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphLayer:
    """A quantized weight: decoding node, tensors by part, and use.

    reads: nodes that read the values.
    """

    node: Any
    parts: Mapping[str, Initializer]
    use: Use
    reads: Sequence[Read] = ()


def parsed(graph: bytes) -> Any:
    """Return a ModelProto; raises UnsupportedError without ``onnx``, CheckpointError for other bytes."""
    try:
        import onnx
    except ImportError as error:
        raise UnsupportedError(f"reading ONNX needs {error.name}; install zeropoint[onnx]") from error
    model = onnx.ModelProto()
    with reading("it is no ONNX model", "download or export it again"):
        model.ParseFromString(graph)
    if not model.HasField("graph") or not model.graph.node:
        raise CheckpointError("it is no ONNX model: it has no graph with nodes")
    texts = itertools.chain.from_iterable(map(_texts, all_graphs(model)))
    damaged = next((text for text in texts if isinstance(text, bytes)), None)
    if damaged is not None:
        raise CheckpointError(f"a name of its graph is not UTF-8: {printable(repr(damaged))}")
    return model


def inlined(model: Any) -> Any:
    """Return a model with its local functions inlined.

    Functions of another operator set than the model's stay. Raises CheckpointError for damaged ones.
    """
    if not model.functions:
        return model
    import onnx.inliner

    with reading("its functions cannot be inlined", "export it again"):
        return onnx.inliner.inline_local_functions(model)


def all_graphs(model: Any) -> Iterator[Any]:
    """Yield the main graph and those inside of nodes."""
    pending = [model.graph]
    while pending:
        graph = pending.pop()
        yield graph
        for node in graph.node:
            pending += _graphs(node)


def _texts(graph: Any) -> Iterator[Any]:
    """Yield the texts of a graph; protocol buffers give non-UTF-8 as bytes."""
    yield graph.name
    for node in graph.node:
        yield from (node.op_type, node.domain, node.name, node.doc_string, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)
    for tensor in (*graph.initializer, *(a.t for node in graph.node for a in node.attribute)):
        yield tensor.name
        yield from (text for entry in tensor.external_data for text in (entry.key, entry.value))


def lifted(model: Any, many: Callable[[Any], bool]) -> list[Any]:
    """Move large Constant nodes to initializers; return other node tensors."""
    others: list[Any] = []
    for graph in list(all_graphs(model)):
        for node in list(graph.node):
            held = [attribute for attribute in node.attribute if attribute.HasField("t")]
            constant = node.op_type == "Constant" and node.domain in STANDARD and len(node.output) == 1
            if constant and held and many(held[0].t):
                held[0].t.name = node.output[0]
                graph.initializer.append(held[0].t)
                graph.node.remove(node)
                # Until then, each initializer had to be an input, too.
                model.ir_version = max(model.ir_version, _FREE_INITIALIZERS)
            else:
                others += [attribute.t for attribute in held]
    return others


def constants(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors that nodes Constant give, each with its name."""
    for graph in all_graphs(model):
        for node in graph.node:
            for attribute in node.attribute:
                if node.op_type == "Constant" and attribute.HasField("t") and node.output:
                    yield node.output[0], attribute.t


def initializers(model: Any) -> tuple[list[Initializer], dict[str, GraphLayer]]:
    """Return all initializers in order, and quantized weights by layer name.

    Raises CheckpointError for a name that a graph gives twice.
    """
    found: dict[str, Initializer] = {}
    _collect(model.graph, found)
    layers = _layers(list(found.values()))
    for key, layer in layers.items():
        for part, each in layer.parts.items():
            each.use = Use(part=(key, part))
    for each in found.values():
        if each.use.part is None:
            inside = any(read.graph is not model.graph for read in products(each.reads))
            each.use = _use(each)._replace(inside=inside)
            longer = f"{each.name}.weight"
            if each.use.kind != "Other" and not each.name.endswith(".weight") and longer not in found:
                each.name = longer
    return list(found.values()), layers


def _collect(graph: Any, found: dict[str, Initializer]) -> dict[str, list[Read]]:
    """Collect initializers of nested graphs; return reads by tensor name."""
    reads: dict[str, list[Read]] = {}
    for node in graph.node:
        for index, name in enumerate(node.input):
            reads.setdefault(name, []).append(Read(graph, node, index, reads))
        for inner in _graphs(node):
            for name, more in _collect(inner, found).items():
                reads.setdefault(name, []).extend(more)
    own: set[str] = set()
    outputs = {each.name for each in graph.output}
    for tensor in graph.initializer:
        if not tensor.name or tensor.name in own:
            raise CheckpointError(f"a graph has two tensors of the name {printable(repr(tensor.name))}")
        own.add(tensor.name)
        name = tensor.name
        while name in found:
            name = f"{graph.name or 'graph'}/{name}"
        found[name] = Initializer(
            name=name,
            tensor=tensor,
            graph=graph,
            reads=reads.get(tensor.name, ()),
            is_output=tensor.name in outputs,
        )
    for sparse in graph.sparse_initializer:
        if sparse.values.data_location or sparse.indices.data_location:
            name = printable(sparse.values.name)
            raise UnsupportedError(f"sparse tensor {name} lies in another file, which is not read")
    made = own.union([each.name for each in graph.input], *(node.output for node in graph.node))
    return {name: more for name, more in reads.items() if name and name not in made}


def _graphs(node: Any) -> Iterator[Any]:
    """Yield the graphs inside of a node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


_Inputs = dict[int, Initializer]
"""The initializers that a node reads, by which input they are."""


def _layers(found: Sequence[Initializer]) -> dict[str, GraphLayer]:
    """Return the quantized weights of a model."""
    inputs: dict[int, _Inputs] = {}
    reads: dict[int, Read] = {}
    makers: dict[str, _Inputs] = {}
    for each in found:
        for read in each.reads:
            reads[id(read.node)] = read
            inputs.setdefault(id(read.node), {})[read.index] = each
            if read.node.op_type == DEQUANTIZE and read.node.output:
                makers[read.node.output[0]] = inputs[id(read.node)]
    layers: dict[str, GraphLayer] = {}
    for number, read in reads.items():
        layer = _layer(read, inputs[number], makers)
        if layer is not None:
            codes = next(iter(layer.parts.values())).name
            key = _SUFFIX.sub("", codes)
            if key not in layers or not _alike(layers[key], layer):
                layers[codes if key in layers else key] = layer
    return layers


def _alike(one: GraphLayer, other: GraphLayer) -> bool:
    """Return whether two nodes decode the same weight in the same way."""
    said = [{a.SerializeToString(deterministic=True) for a in each.node.attribute} for each in (one, other)]
    return (one.parts, one.use, said[0]) == (other.parts, other.use, said[1])


def _layer(read: Read, inputs: _Inputs, makers: Mapping[str, _Inputs]) -> GraphLayer | None:
    """Return the weight that a node decodes, or None.

    makers: what DequantizeLinear reads that gives a tensor, by its name.
    """
    node = read.node
    if node.op_type == NBITS and node.domain == RUNTIME and 1 in inputs:
        parts = {BLOCKS: 1, BLOCK_SCALES: 2, BLOCK_ZEROS: 3}
        held = {part: inputs[index] for part, index in parts.items() if index in inputs}
        return GraphLayer(node=node, parts=held, use=Use(kind="Linear", operators=(NBITS,)))
    if node.op_type != DEQUANTIZE or 0 not in inputs or len(inputs[0].dims) < _MATRIX or not node.output:
        return None
    readers = read.reads.get(node.output[0], ())
    if readers and all(r.node.op_type == DEQUANTIZE and r.index == 1 for r in readers):
        return None  # scales of others, which are theirs
    parts = {CODES: 0, SCALE: 1, ZERO: 2}
    held = {part: inputs[index] for part, index in parts.items() if index in inputs}
    outer = makers.get(node.input[1]) if len(node.input) > 1 and SCALE not in held else None
    if outer is not None and outer.keys() == {0, 1}:
        held |= {SCALE: outer[0], OUTER: outer[1]}
    if ZERO in held and not held[ZERO].data and not any(held[ZERO].tensor.int32_data):
        del held[ZERO]  # no zero points, which some quantizers write all the same
    return GraphLayer(node=node, parts=held, use=_of_reads(readers, inputs[0].dims), reads=readers)


def _use(each: Initializer) -> Use:
    """Return the use of an initializer by the nodes that read it."""
    if each.is_output:
        return Use(reason="an output of the graph")
    if not each.reads:
        return Use(reason="read by no node")
    if each.tensor.data_type not in _FLOATS:
        names = {name for read in each.reads for name in _operators(read, len(each.dims))}
        return Use(operators=tuple(sorted(names)))  # see its dtype
    return _of_reads(each.reads, each.dims)


def _of_reads(reads: Sequence[Read], dims: tuple[int, ...]) -> Use:
    """Return the use of a tensor on whose axes all nodes agree."""
    operators = tuple(sorted({name for read in reads for name in _operators(read, len(dims))}))
    if len(dims) < _MATRIX:
        return Use(operators=operators, reason=f"{len(dims)}-D, not a matrix")
    sides = {_side(read, len(dims)) for read in reads}
    side = next(iter(sides)) if len(sides) == 1 else None
    if side is None:
        odd = sorted({r.node.op_type for r in reads if _side(r, len(dims)) is None})
        several = "both as (inputs, outputs) and as (outputs, inputs)"
        how = f"by {', '.join(map(printable, odd))}" if odd else several
        return Use(operators=operators, reason=f"read {how}, not as the weight of a product alone")
    transposed, axis = side
    before, behind = dims[:axis], dims[axis + 1 :]
    outputs = behind if transposed else before
    return Use(
        kind="Embedding" if "Gather" in operators else "Linear",
        operators=operators,
        transposed=transposed,
        axis=axis,
        kernel=1 if transposed else math.prod(behind),
        run=dims[axis] if transposed and math.prod(before) > 1 else 0,
        spread=sum(size > 1 for size in outputs) > 1,
    )


def _operators(read: Read, rank: int) -> Iterator[str]:
    """Yield the operators that a node applies to a weight."""
    node = read.node
    plain = {"alpha": 1.0, "beta": 1.0, "transA": 0}
    values = {each.name: each.i if each.name == "transA" else each.f for each in node.attribute}
    more = [name for name, value in plain.items() if values.get(name, value) != value]
    name = str(node.op_type)
    if name == "Gemm" and more:
        yield f"Gemm with {' and '.join(more)}"
    elif name == "MatMul" and (read.index == 0 or rank > _MATRIX):
        yield "MatMul from the left" if read.index == 0 else "MatMul of several matrices"
    else:
        yield name
    for other in _behind(read) or ():
        yield from _operators(other, rank)


def _behind(read: Read) -> Sequence[Read] | None:
    """Return the reads behind a node that passes a weight on.

    Those are Identity, Cast to floats, and a Transpose of the last two axes.
    """
    node = read.node
    passes = node.op_type in ("Identity", "Transpose") or (
        node.op_type == "Cast" and attribute_of(node, "to", 0) in _FLOATS
    )
    if not passes or node.domain not in STANDARD or len(node.output) != 1:
        return None
    (name,) = node.output
    return () if any(each.name == name for each in read.graph.output) else read.reads.get(name, ())


def products(reads: Sequence[Read]) -> Iterator[Read]:
    """Yield the nodes that compute with a tensor, passing nodes skipped."""
    for read in reads:
        behind = _behind(read)
        yield from (read,) if behind is None else products(behind)


def _side(read: Read, rank: int) -> tuple[bool, int] | None:
    """Return the orientation and input axis of a read weight.

    The orientation: whether it is (inputs, outputs). None where the tensor is no weight to the node.
    """
    node, index = read.node, read.index
    behind = _behind(read)
    if behind is not None:
        sides = {_side(other, rank) for other in behind}
        side = next(iter(sides)) if len(sides) == 1 else None
        return _swapped(side, node, rank) if node.op_type == "Transpose" else side
    if node.domain not in STANDARD:
        return None
    if node.op_type in RECURRENT:
        return (False, 2) if index in (1, 2) and rank == _STACK else None
    if len(node.output) != 1:
        return None
    if node.op_type == "MatMul":
        return (True, rank - 2) if index == 1 else (False, rank - 1)
    if rank > _MATRIX:
        return {"Conv": (False, 1), "ConvTranspose": (True, 0)}.get(node.op_type) if index == 1 else None
    if node.op_type == "Gemm":
        transposed = not attribute_of(node, "transB", 0)
        return (transposed, 1 - transposed) if index == 1 else None
    if node.op_type == "Gather":
        return (False, 1) if index == 0 and attribute_of(node, "axis", 0) == 0 else None
    return None


_STACK = 3


def _swapped(side: tuple[bool, int] | None, node: Any, rank: int) -> tuple[bool, int] | None:
    """Return the orientation before a Transpose of the last axes."""
    last = [*range(rank - 2), rank - 1, rank - 2]
    axes = list(next((each.ints for each in node.attribute), range(rank - 1, -1, -1)))
    both = {(True, rank - 2): (False, rank - 1), (False, rank - 1): (True, rank - 2)}
    return both.get(side) if side is not None and axes == last else None


def attribute_of(node: Any, name: str, default: int) -> int:
    """Return an integer attribute of a node, or its default."""
    return next((int(each.i) for each in node.attribute if each.name == name), default)
