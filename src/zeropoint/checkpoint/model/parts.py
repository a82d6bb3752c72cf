"""Parts of a converted model: quantized matrices, and float tensors."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ...codecs.layer_schemes import named_layer
from ...codecs.protocol import Codec, LayerScheme
from ...codecs.tensor_fields import TensorSpec
from ...errors import UnsupportedError, ZeropointError
from ...models import (
    DynamicQuantize,
    LocalQuantize,
    PackedWeight,
    PreparedLayer,
    QuantizedLinear,
    SplitAttention,
    SplitStacks,
)
from ...models.dequantize import QUANTIZED, restore
from ...recipes import Activation
from ...tensor import QuantizedTensor
from ...training import FakeQuantize
from .parameter_names import WEIGHT, file_rows, file_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedPart:
    """A quantized matrix of a checkpoint.

    layer: its scheme. shape, dtype: of the weight. codes: makes it. inputs: what its inputs need, by the last
    parts of the names.
    """

    layer: LayerScheme
    shape: tuple[int, int]
    dtype: torch.dtype
    codes: Callable[[], QuantizedTensor]
    inputs: Mapping[str, torch.Tensor]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all its tensors by the last parts of their names."""
        codec, codes = self.layer.codec, self.codes()
        constants = codec.constants(self.layer, codes.params, codes.shape)
        return {**codec.encode(self.layer, codes), **constants, **self.inputs}

    def specs(self) -> tuple[TensorSpec, ...]:
        """Return its codec's tensors, inputs excluded."""
        return self.layer.codec.tensors(self.layer, self.shape, self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Content of a model's checkpoint, by the names in the file.

    quantized: by module. floats: other tensors. named: module of a file to its name in the model, where that
    is another. kept: Linear layers of the model that are not quantized, by their names there.
    """

    quantized: Mapping[str, QuantizedPart]
    floats: Mapping[str, torch.Tensor]
    named: Mapping[str, str]
    kept: tuple[str, ...]


def parts_of(model: nn.Module, codec: Codec, *, allow_float: bool) -> Parts:
    """Return the parts of a converted model, which share its memory.

    codec: what its files are written in.
    Raises UnsupportedError for a model without quantized layers, for a prepared one, and, unless
    ``allow_float``, for a layer that no layout holds, with the reason.
    """
    tensors = itertools.chain(model.parameters(), model.buffers())
    skeleton = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    fits, others = _sorted(skeleton, codec)
    if others and not allow_float:
        name, (_, reason) = next(iter(others.items()))
        more = f" (and {len(others) - 1} more layers)" if len(others) > 1 else ""
        raise UnsupportedError(
            f"layer {name or 'model'}{more} cannot be written: {reason}; keep it by a rule, or pass "
            "allow_float=True, which writes its dequantized values as floats; QuantizedTensor.save and "
            "export_onnx keep any scheme"
        )
    skeleton = restore(skeleton, [module for module, _ in others.values()])
    experts = {n: m for n, m in skeleton.named_modules() if isinstance(m, SplitStacks)}
    gone = tuple(
        itertools.chain(
            (f"{name}.{part}" for name in fits for part in ("weight.", "input_quantizer.")),
            (f"{name}.{own}." for name, split in experts.items() for own in split.stacks),
        )
    )
    state = {
        name: value
        for name, value in skeleton.state_dict().items()
        if isinstance(value, torch.Tensor) and not name.startswith(gone)
    }
    floats, quantized, named = file_tensors(skeleton, state), {}, {}
    for rows in file_rows(skeleton, fits):
        layer = skeleton.get_submodule(rows.layer)
        if isinstance(layer, QuantizedLinear):
            quantized[rows.module] = _quantized(layer, rows.index, codec)
            named[rows.module] = rows.layer
        elif rows.tensor not in floats:  # of a stack without codes
            floats[rows.module + WEIGHT] = layer.get_parameter("weight").detach()[rows.index]
    kept = [n for n, m in skeleton.named_modules() if isinstance(m, nn.Linear) and not n.startswith(gone)]
    return Parts(quantized=quantized, floats=floats, named=named, kept=tuple(kept))


_Others = dict[str, tuple[nn.Module, str]]


def _sorted(model: nn.Module, codec: Codec) -> tuple[dict[str, QuantizedLinear], _Others]:
    """Return the layers that a layout holds, and the others with reasons."""
    fits: dict[str, QuantizedLinear] = {}
    others: _Others = {}
    for name, module in _outermost(model, ""):
        if isinstance(module, PreparedLayer):
            raise UnsupportedError(f"layer {name or 'model'} is prepared; convert the model first")
        if isinstance(module, SplitAttention):
            inner = [f"{name}.{n}".lstrip(".") for n, m in module.named_modules() if isinstance(m, QUANTIZED)]
            reason = "its original holds three projections in one tensor, which no layout holds quantized"
            others |= {name: (module, reason)} | {n: (model.get_submodule(n), reason) for n in inner}
        elif isinstance(module, QUANTIZED):
            found = _refusal(module, codec)
            if found is None and isinstance(module, QuantizedLinear):
                fits[name] = module
            else:
                others[name] = module, found or ""
    own = {rows.layer for rows in file_rows(model, fits) if not rows.joins_others}
    for name in [name for name in fits if name not in own]:  # files have no matrix of it
        others[name] = fits.pop(name), _TOGETHER
    if not fits:
        first = "; ".join(reason for _, reason in list(others.values())[:1])
        raise UnsupportedError(
            f"model (a {type(model).__name__}) has no layer that {codec.title} hold"
            + (f" ({first})" if first else "; pass what quantize_model or convert gives")
        )
    return _untied(fits, others), others


_TOGETHER = "files have its weight together with others, which no layout holds quantized"


def _outermost(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules by name, none inside quantized layers or split attention."""
    yield name, module
    if not isinstance(module, (*QUANTIZED, PreparedLayer, SplitAttention)):
        for key, child in module.named_children():
            yield from _outermost(child, f"{name}.{key}".lstrip("."))


def _untied(fits: dict[str, QuantizedLinear], others: _Others) -> dict[str, QuantizedLinear]:
    """Move layers that share a weight of ``others``, stored as floats, there."""
    owners = {
        id(packed): name
        for name, (module, _) in others.items()
        for packed in module.modules()
        if isinstance(packed, PackedWeight)
    }
    for name, layer in list(fits.items()):
        owner = owners.get(id(layer.weight))
        if owner is not None:
            others[name] = fits.pop(name), f"its weight is that of {owner}, for which there is no layout"
    return fits


def _refusal(module: nn.Module, codec: Codec) -> str | None:
    if not isinstance(module, QuantizedLinear):
        inside = module._modules.get("layer")
        kind = type(module).__name__.removeprefix("Quantized") if inside is None else type(inside).__name__
        return f"a {kind} has no layout, only Linear layers have"
    if module.weight.rotation is not None:
        return f"its codes are of a weight rotated by {module.weight.rotation}, and {_ROTATED}"
    if module.weight.has_low_rank:
        return "two narrow matrices lie next to its codes, which no layout holds (dequantize_model adds them)"
    if module.output_quantizer is not None:
        return "its output is quantized, and the layouts hold weights and schemes of inputs"
    try:
        layer = layer_scheme_of(module, codec)
    except ZeropointError as error:
        return str(error)
    problem = codec.refusal(layer, module.weight.shape)
    return None if problem is None else f"weight {layer.weight} of shape {module.weight.shape}: its {problem}"


def layer_scheme_of(module: QuantizedLinear, codec: Codec) -> LayerScheme:
    """Return the scheme of a layer; raises UnsupportedError without a layout."""
    return _named(codec, module.weight.scheme, _input_of(module.input_quantizer))


_ROTATED = (
    "transformers runs no transform_config, without which the file would be another model (dequantize_model "
    "rotates weights back)"
)


_named = functools.lru_cache(maxsize=1024)(named_layer)


def _input_of(quantizer: nn.Module | None) -> Activation | None:
    if quantizer is None:
        return None
    if isinstance(quantizer, DynamicQuantize | LocalQuantize):
        return quantizer.activation
    if type(quantizer) is FakeQuantize and quantizer.enabled:
        return Activation(scheme=quantizer.scheme, dynamic=False)
    kind = type(quantizer).__name__
    raise UnsupportedError(f"its input is quantized by a {kind}, which the layout cannot describe")


def _quantized(layer: QuantizedLinear, index: torch.Tensor, codec: Codec) -> QuantizedPart:
    packed, count = layer.weight, len(index)
    whole = count == packed.shape[0] and torch.equal(index, torch.arange(count))
    columns = packed.shape[1]
    return QuantizedPart(
        layer=layer_scheme_of(layer, codec),
        shape=(count, columns),
        dtype=packed.dtype,
        codes=packed.quantized if whole else functools.partial(packed.part, index),
        inputs=input_tensors(layer.input_quantizer, codec),
    )


_LARGE = 1 << 40


def whole_scale(quantizer: LocalQuantize) -> torch.Tensor:
    """Return the tensor-wide scale in its dialect's form: [1]."""
    columns = quantizer.activation.scheme.granularity.block_shape((1, _LARGE))[1]
    return quantizer.codes(torch.zeros(1, columns)).scales[-1].reshape(1)


def input_tensors(quantizer: nn.Module | None, codec: Codec) -> dict[str, torch.Tensor]:
    """Return the tensors of inputs with parameters from data, by suffix."""
    names = codec.input_names
    if names is None:
        return {}
    if isinstance(quantizer, LocalQuantize):
        return {names.global_scale: whole_scale(quantizer).reshape(names.shape)}
    if not isinstance(quantizer, FakeQuantize):
        return {}
    params = quantizer.params
    found = {names.scale: params.scales[0].reshape(names.shape)}
    if params.zero_point is not None:
        # Codes without a sign count as signed ones, so that 0 becomes the least of these.
        unsigned = params.scheme.qmin == 0
        shift = (1 << (params.scheme.bits - 1)) if unsigned and names.signed else 0
        dtype = torch.uint8 if unsigned and not names.signed else torch.int8
        found[names.zero_point] = (params.zero_point.reshape(names.shape) - shift).to(dtype)
    return found
