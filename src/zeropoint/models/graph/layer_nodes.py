"""Layers of a graph: their nodes, names, and recipe decisions.

A layer is a product with a parameter, a table of rows, or a recurrent layer. Its name comes from the module
that called it, as the graph recorded it; operators whose inputs share a scale (``Add``, ``Concatenate``) are
layers where a rule names their type.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from ...errors import RecipeError
from ...recipes import Decision, Recipe, Rule, Subject
from ..layer_types import LAYER_TYPES
from ..unfuse import CONV1D
from . import matrices
from .matrices import AS_IT_IS, SHAPING, Form
from .program import args_of, attribute, tensor_at

aten = torch.ops.aten

PRODUCTS: dict[object, tuple[str, int]] = {
    aten.linear.default: ("Linear", 1),
    aten.matmul.default: ("Linear", 1),
    aten.mm.default: ("Linear", 1),
    aten.addmm.default: ("Linear", 2),
    aten.conv1d.default: ("Conv1d", 1),
    aten.conv1d.padding: ("Conv1d", 1),
    aten.conv2d.default: ("Conv2d", 1),
    aten.conv2d.padding: ("Conv2d", 1),
    aten.conv3d.default: ("Conv3d", 1),
    aten.conv3d.padding: ("Conv3d", 1),
    aten.conv_transpose1d.default: ("ConvTranspose1d", 1),
    aten.conv_transpose2d.input: ("ConvTranspose2d", 1),
    aten.conv_transpose3d.input: ("ConvTranspose3d", 1),
    aten.embedding.default: ("Embedding", 0),
}
"""Operator to the type of its layer and the position of its weight."""
RECURRENT: dict[object, str] = {
    aten.lstm.input: "LSTM",
    aten.gru.input: "GRU",
    aten.rnn_tanh.input: "RNN",
    aten.rnn_relu.input: "RNN",
    aten.lstm_cell.default: "LSTMCell",
    aten.gru_cell.default: "GRUCell",
    aten.rnn_tanh_cell.default: "RNNCell",
    aten.rnn_relu_cell.default: "RNNCell",
}
"""Operator to the type of its layer; its weights are the matrices among its third argument or from it on."""
CONVOLUTIONS = frozenset(
    {aten.convolution.default, *(target for target, (kind, _) in PRODUCTS.items() if kind.startswith("Conv"))}
)
_WEIGHTED = frozenset(PRODUCTS) - {aten.matmul.default, aten.mm.default, aten.addmm.default}
"""Operators with an argument called weight; the others multiply activations, too."""
_CONVERTED = frozenset(kind.__name__ for kind in LAYER_TYPES) - {kind for kind, _ in PRODUCTS.values()}
"""Types with unquantizable operators: recurrent layers on packed sequences, and bags."""
SHARED_SCALE_OPS: dict[object, str] = {
    aten.add.Tensor: "Add",
    aten.add_.Tensor: "Add",
    aten.mul.Tensor: "Multiply",
    aten.cat.default: "Concatenate",
}
"""Operator to the type under which a rule names it."""
TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default, aten.numpy_T.default)
"""Operators that transpose a matrix."""
_GROUPS: dict[object, int] = {
    aten.conv_transpose1d.default: 6,
    aten.conv_transpose2d.input: 6,
    aten.conv_transpose3d.input: 6,
    aten.convolution.default: 8,
}
"""Position of the number of groups."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """One layer of a graph.

    name, type, shape: what rules see; the shape is the weight's, empty where there is none.
    nodes: where it is called; more than one for a module that is used again.
    weight: the node that reads the parameter, or None. form: its conversion to the quantized matrix.
    further: nodes that read the other weights of a recurrent layer, matrices as they are.
    reads: the parameters of a layer without a quantized form. left: why it has none.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    nodes: tuple[fx.Node, ...]
    weight: fx.Node | None = None
    form: Form = AS_IT_IS
    further: tuple[fx.Node, ...] = ()
    reads: tuple[fx.Node, ...] = ()
    left: str = ""

    @property
    def weights(self) -> tuple[fx.Node, ...]:
        """The nodes that read its weights."""
        return () if self.weight is None else (self.weight, *self.further)

    @property
    def subject(self) -> Subject:
        """What rules look at."""
        dtype = "" if self.weight is None else str(self.weight.meta["val"].dtype).removeprefix("torch.")
        return Subject(name=self.name, type=self.type, shape=self.shape, dtype=dtype)


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """Return a layer node's tensor inputs besides weight and bias."""
    if node.target in SHARED_SCALE_OPS:
        first = node.args[0]
        given = first if isinstance(first, (list, tuple)) else node.args[:2]
        return [arg for arg in given if isinstance(arg, fx.Node)]
    if node.target is aten.embedding.default:
        return []
    moving = node.args[1] if node.target is aten.addmm.default else node.args[0]
    assert isinstance(moving, fx.Node)
    return [moving]


def output_of(node: fx.Node) -> fx.Node:
    """Return the node of a layer's first result, made if missing."""
    results = node.meta["val"]
    if isinstance(results, torch.Tensor):
        return node
    found = next((user for user in node.users if user.target is operator.getitem and user.args[1] == 0), None)
    if found is None:
        with node.graph.inserting_after(node):
            found = node.graph.call_function(operator.getitem, (node, 0))
        found.meta["val"] = results[0]
    return found


def layers_of(module: fx.GraphModule, recipe: Recipe) -> list[Layer]:
    """Return the layers in the order in which they are first called.

    Calls of one module are one layer. Where tensors meet, there is a layer only if a rule names that type,
    and so for a module without weight that is one operator. Others are layers when they have parameters.
    """
    named = {kind for rule in recipe.rules for kind in rule.types}
    found: dict[tuple[object, ...], Layer] = {}
    used: Counter[str] = Counter()
    sizes = Counter(_call(node) for node in module.graph.nodes)
    for node in module.graph.nodes:
        layer = _product(module, node) or _recurrent(module, node) or _shared_scale_layer(node, named, used)
        layer = layer or _unnamed(node, named, sizes) or _other(module, node)
        if layer is None:
            continue
        key = _identity(module, layer)
        known = found.get(key, replace(layer, nodes=(), reads=()))
        reads = dict.fromkeys((*known.reads, *layer.reads))
        found[key] = replace(known, nodes=(*known.nodes, node), reads=tuple(reads))
    return list(found.values())


def _call(node: fx.Node) -> str:
    """Return the path of the calling module, unique per call."""
    return next((str(path) for path, _ in reversed(list(node.meta.get("nn_module_stack", {}).values()))), "")


def _unnamed(node: fx.Node, named: set[str], sizes: Counter[str]) -> Layer | None:
    """Return a named type's layer, if it is one float operator."""
    caller, kind = _stack(node)
    if kind is None or kind not in named or sizes[_call(node)] != 1 or node.op != "call_function":
        return None
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not all(_is_float(each) for each in (source, node)):
        return None
    return Layer(name=caller, type=kind, shape=(), nodes=(node,))


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _other(module: fx.GraphModule, node: fx.Node) -> Layer | None:
    """Return a layer without quantized form, for the list, or None."""
    caller, kind = _stack(node)
    reads = tuple(
        arg
        for arg in node.all_input_nodes
        if arg.op == "get_attr" and isinstance(attribute(module, str(arg.target)), torch.nn.Parameter)
    )
    if kind is None or not (reads or node.target in _WEIGHTED) or node.target in SHAPING:
        return None
    return Layer(name=caller, type=kind, shape=(), nodes=(node,), reads=reads, left=_left(node, kind, reads))


def _left(node: fx.Node, kind: str, reads: Sequence[fx.Node]) -> str:
    """Return the reason why a node has no quantized form."""
    product = _kind(node)
    if product is not None:
        weight = args_of(node)[product[1]]
        if weight.target is torch.ops.zeropoint.dequantize.default:
            return "its weight is quantized already"
        if weight in reads:
            return f"its weight (shape {'x'.join(map(str, weight.meta['val'].shape))}) is not a matrix"
        return "its weight is computed in the graph"
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    if kind in _CONVERTED:
        return f"{kind} is the operator {name} here, which has no quantized form; quantize_model has one"
    leaves = " and ".join(str(read.target).rpartition(".")[2] for read in reads)
    return f"{name} of {leaves} has no quantized form"


def _identity(module: fx.GraphModule, layer: Layer) -> tuple[object, ...]:
    """Return the key of one module's calls: weight and bias, or name.

    A module that stands in its model under two names is called under both.
    """
    if layer.weight is None:
        return (layer.name, layer.type)
    (node,) = layer.nodes
    others = [arg for arg in node.all_input_nodes if arg.op == "get_attr" and arg is not layer.weight]
    if not others:
        return (layer.name, layer.type, id(_tensor(module, layer.weight)))
    return (layer.type, *(id(_tensor(module, read)) for read in (layer.weight, *others)))


def _tensor(module: fx.GraphModule, read: fx.Node) -> torch.Tensor:
    return tensor_at(module, str(read.target))


def _product(module: fx.GraphModule, node: fx.Node) -> Layer | None:
    found = _kind(node)
    if found is None:
        return None
    kind, position = found
    read, transposed = _parameter(node.args[position])
    if read is None:
        return None
    weight = _tensor(module, read)
    if not weight.is_floating_point() or weight.ndim < 2 or (kind == "Linear" and weight.ndim > 2):
        return None
    transposed ^= kind == "Linear" and node.target is not aten.linear.default
    name, type_name = _called(node, str(read.target), kind)
    shape = tuple(weight.shape)[:: -1 if transposed else 1]
    form = _form(node, kind, shape) if not transposed else matrices.transposed_product()
    return Layer(name=name, type=type_name, shape=shape, nodes=(node,), weight=read, form=form)


def _recurrent(module: fx.GraphModule, node: fx.Node) -> Layer | None:
    if node.op != "call_function" or node.target not in RECURRENT:
        return None
    third = args_of(node)[2]
    given = third if isinstance(third, (list, tuple)) else args_of(node)[2:]
    if any(isinstance(arg, fx.Node) and arg.op != "get_attr" for arg in given):
        return None
    reads = [arg for arg in given if isinstance(arg, fx.Node) and _tensor(module, arg).ndim == 2]
    name, kind = _stack(node)
    if kind is None:
        name, kind = str(reads[0].target).rpartition(".")[0], RECURRENT[node.target]
    shape = tuple(_tensor(module, reads[0]).shape)
    return Layer(name=name, type=kind, shape=shape, nodes=(node,), weight=reads[0], further=tuple(reads[1:]))


def _form(node: fx.Node, kind: str, shape: tuple[int, ...]) -> Form:
    if not kind.startswith("ConvTranspose"):
        return matrices.flat(shape)
    position = _GROUPS[node.target]
    groups = node.args[position] if len(node.args) > position else 1
    assert isinstance(groups, int)
    return matrices.transposed(shape, groups)


def _kind(node: fx.Node) -> tuple[str, int] | None:
    if node.target is aten.convolution.default:
        rank, transposed = len(node.meta["val"].shape) - 2, node.args[6]
        return f"Conv{'Transpose' if transposed else ''}{rank}d", 1
    return PRODUCTS.get(node.target) if node.op == "call_function" else None


def _parameter(arg: object) -> tuple[fx.Node | None, bool]:
    """Return the parameter's node behind ``arg``, and whether it is transposed."""
    if not isinstance(arg, fx.Node):
        return None, False
    if arg.op == "get_attr":
        return arg, False
    if arg.target in TRANSPOSES and len(arg.meta["val"].shape) == 2:
        read, transposed = _parameter(arg.args[0])
        return read, not transposed
    return None, False


def _called(node: fx.Node, path: str, kind: str) -> tuple[str, str]:
    """Return name and type of a layer, from caller and weight path.

    A module that computes with a parameter of a module inside it (attention with its output projection)
    gives the name of the inner one; a parameter that is not called ``weight`` gives its own name.
    """
    caller, caller_type = _stack(node)
    owner, _, leaf = path.rpartition(".")
    if owner == caller and leaf != "weight":
        return path.removesuffix("_weight"), kind
    if caller_type is None or (owner != caller and (owner.startswith(f"{caller}.") or not caller)):
        return owner or leaf, kind
    return caller, caller_type


def _stack(node: fx.Node) -> tuple[str, str | None]:
    """Return name and class of the innermost calling module."""
    for path, kind in reversed(list(node.meta.get("nn_module_stack", {}).values())):
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        return str(path).partition("@")[0], "Linear" if name == CONV1D else name.rpartition(".")[2]
    return "", None


def _shared_scale_layer(node: fx.Node, named: set[str], used: Counter[str]) -> Layer | None:
    """Return the layer of a shared-scale operator on floats, if named."""
    kind = SHARED_SCALE_OPS.get(node.target) if node.op == "call_function" else None
    if kind not in named or kind is None:
        return None
    parts = inputs_of(node)
    if len(parts) < 2 or not all(part.meta["val"].is_floating_point() for part in parts):
        return None
    caller, caller_type = _stack(node)
    name = caller
    if caller_type != kind:
        name = f"{caller}.{kind.lower()}".lstrip(".")
        used[name] += 1
        name = name if used[name] == 1 else f"{name}_{used[name] - 1}"
    return Layer(name=name, type=kind, shape=(), nodes=(node,))


def decided(
    module: fx.GraphModule, layers: Sequence[Layer], recipe: Recipe
) -> Iterator[tuple[Layer, Decision]]:
    """Yield each layer with its decision; tied layers agree.

    The default of a recipe is for Linear layers. Raises RecipeError when a rule matches nothing or tied
    layers would differ.
    """
    decisions = [
        _narrowed(layer, decision, recipe)
        for layer, decision in zip(layers, recipe.decide([layer.subject for layer in layers]), strict=True)
    ]
    groups: dict[int, list[int]] = {}
    for position, layer in enumerate(layers):
        for read in layer.weights:
            groups.setdefault(id(_tensor(module, read)), []).append(position)
    for positions in groups.values():
        _agree(layers, decisions, positions)
    yield from zip(layers, decisions, strict=True)


def _narrowed(layer: Layer, decision: Decision, recipe: Recipe) -> Decision:
    """Keep what a rule would reach without having meant it."""
    if decision.gives is None:
        return decision
    if layer.weight is not None and decision.rule is recipe.default and layer.type != "Linear":
        kept = Rule(gives=None, reason="the default is for Linear layers")
    elif layer.weight is None and layer.type not in decision.rule.types:
        kept = Rule(gives=None, reason=layer.left or f"the rule does not name type {layer.type}")
    else:
        return decision
    return Decision(subject=decision.subject, rule=kept)


def _agree(layers: Sequence[Layer], decisions: list[Decision], positions: list[int]) -> None:
    """Keep layers tied to a kept one; different schemes are an error."""
    given = [decisions[p].gives for p in positions]
    if len({gives.weight for gives in given if gives is not None}) > 1:
        names = " and ".join(layers[p].name for p in positions)
        raise RecipeError(f"{names} share one weight but get different schemes; give them the same")
    if None in given:
        owner = layers[positions[given.index(None)]].name
        for p in positions:
            if decisions[p].gives is not None:
                rule = Rule(gives=None, reason=f"its weight is that of {owner}, which is kept")
                decisions[p] = Decision(subject=decisions[p].subject, rule=rule)
