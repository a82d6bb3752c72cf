"""Dispatch order of the paths of a quantized linear layer, with refusals.

All give the same result but for rounding in float32: integer paths have the same sums. This module knows
schemes and numbers of tokens; the registry knows which kernels there are for a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ..functional import quantize
from ..ops import library, registry
from ..ops import linear as products
from ..ops.devices import CPU
from ..ops.registry import REFERENCE, Op, Request, has_kernel
from ..params.tracing import traced_as_constant
from ..recipes import Activation
from ..schemes import Granularity, Scheme, ZeroPoint
from ..training import FakeQuantize
from . import integer_product
from .dynamic_quantize import DynamicQuantize
from .packed_weight import PackedWeight

TILE_VALUES = 1 << 22
"""Numbers of a weight that are dequantized at once: 16 MiB of float32."""
MANY_ROWS = 512
"""Tokens from which torch's product, taken apart into several operators, is as fast as a kernel."""
STEP = 64
"""Multiple of columns for which the kernel multiplies bytes, faster than torch's product without AMX."""
FEW_ROWS = 32
"""Tokens up to which codes of a weight are read by each, rather than made values once for all."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


Run = Callable[[torch.Tensor], torch.Tensor]
"""From a layer's input to its output, before that is quantized."""


class LinearParts(Protocol):
    """A layer's parts: packed weight, bias, and input quantizer."""

    @property
    def weight(self) -> PackedWeight:
        """The weight."""

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias."""

    @property
    def input_quantizer(self) -> nn.Module | None:
        """What the input passes through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """One way to compute.

    name, when: as :func:`explain` prints them. op: the operator whose kernel it calls, if any. device: the
    only one that it is for, if any. refusal: why it is not for such a layer, on any device, or None. prepare:
    from the layer to what runs. fits: whether it is for an input, where there is a kernel.
    """

    name: str
    when: str = ""
    op: Op | None = None
    device: torch.device | None = None
    refusal: Callable[[LinearParts], str | None]
    prepare: Callable[[LinearParts], Run]
    fits: Callable[[LinearParts, torch.Tensor], bool]

    def takes(self, layer: LinearParts, x: torch.Tensor) -> bool:
        """Return whether the path supports an input on its device."""
        if self.device not in (None, x.device) or not self.fits(layer, x):
            return False
        return self.op is None or _runs(self.op, layer, x.dtype, x.device)


def _scheme_of(source: nn.Module | None) -> Activation | str:
    """Return the input's activation scheme, or a refusal."""
    if source is None:
        return "the input is not quantized"
    if isinstance(source, DynamicQuantize):
        return source.activation
    if type(source) is FakeQuantize:
        return Activation(scheme=source.scheme, dynamic=False)
    return f"the input is quantized by a {type(source).__name__}"


def _request(op: Op, layer: LinearParts, dtype: torch.dtype, device: torch.device) -> Request:
    """Return the request of the layer's kernel for such inputs."""
    source, weight = _scheme_of(layer.input_quantizer), layer.weight
    known = source if op is Op.LINEAR and isinstance(source, Activation) else None
    return Request(
        op=op, scheme=weight.scheme, shape=tuple(weight.shape), dtype=dtype, own_dtype=weight.dtype,
        device=device, source=None if known is None else known.scheme,
        given=known is not None and not known.dynamic,
    )  # fmt: skip


@traced_as_constant
def _runs(op: Op, layer: LinearParts, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a kernel faster than the reference runs a layer."""
    return has_kernel(_request(op, layer, dtype, device))


def _integers_refusal(layer: LinearParts) -> str | None:
    source = _scheme_of(layer.input_quantizer)
    return source if isinstance(source, str) else _products_refusal(layer)


def _weight_refusal(layer: LinearParts) -> str | None:
    return "the input is quantized" if layer.input_quantizer is not None else _products_refusal(layer)


def _products_refusal(layer: LinearParts) -> str | None:
    return products.refusal(_request(Op.LINEAR, layer, torch.float32, torch.device("meta")))


def _fits_few(layer: LinearParts, x: torch.Tensor) -> bool:
    """Whether ``x`` has few rows; unknown while tracing."""
    few = not torch.compiler.is_compiling() and x.numel() <= FEW_ROWS * layer.weight.shape[1]
    return few and _fits_integers(layer, x)


def _fits_integers(layer: LinearParts, x: torch.Tensor) -> bool:
    """Whether ``x`` suits an integer product, without gradients."""
    source = layer.input_quantizer
    if x.dtype not in _DTYPES or (x.requires_grad and torch.is_grad_enabled()):
        return False
    return not isinstance(source, FakeQuantize) or (source.enabled and source.dtype == x.dtype)


def _codes(layer: LinearParts) -> Run:
    source, weight = layer.input_quantizer, layer.weight
    activation = _scheme_of(source)
    text = str(activation.scheme) if isinstance(activation, Activation) else ""
    product = library.LinearLayer(text, str(weight.scheme), weight.dtype)

    def run(x: torch.Tensor) -> torch.Tensor:
        given: list[torch.Tensor] = []
        if isinstance(source, FakeQuantize):
            given = _stored(source)
        data = weight._buffers["data"]
        assert data is not None
        return product(x, given, data, _stored(weight), layer.bias)

    return run


def _stored(holder: PackedWeight | FakeQuantize) -> list[torch.Tensor]:
    """Return a weight's or input's parameters, from buffers if possible."""
    scale, zero = holder._buffers["scale1"], holder._buffers.get("zero_point")
    assert scale is not None
    if len(holder.scheme.levels) == 1 and scale.element_size() > 1:
        return [scale] if zero is None else [scale, zero]
    params = holder.quantized().params if isinstance(holder, PackedWeight) else holder.params
    return list(params.stored)


def _torch_refusal(layer: LinearParts) -> str | None:
    source = _scheme_of(layer.input_quantizer)
    if isinstance(source, str):
        return source
    if not source.dynamic:
        return "the input has fixed parameters"
    for scheme, blocks in (
        (layer.weight.scheme, Granularity.channel(0)),
        (source.scheme, Granularity.token()),
    ):
        if not _is_plain_int8(scheme):
            return f"{scheme} is not symmetric int8 with float scales"
        if scheme.granularity.block_shape((2, 2)) != blocks.block_shape((2, 2)):
            return f"{scheme} does not have one scale a row"
    reason = integer_product.refusal()
    if reason is None and layer.weight.shape[1] % STEP == 0 and not torch.cpu._is_amx_tile_supported():
        return "no faster without AMX"
    return reason


def _is_plain_int8(scheme: Scheme) -> bool:
    fmt = scheme.element
    whole = fmt.is_whole and fmt.signed and fmt.bits == 8
    one_level = len(scheme.scales) == 1 and not scheme.scales[0].rule.power_of_two
    return whole and one_level and scheme.zero_point is ZeroPoint.NONE and scheme.chained is None


def _fits_torch(layer: LinearParts, x: torch.Tensor) -> bool:
    many = x.numel() >= MANY_ROWS * layer.weight.shape[1]
    return many and not torch.compiler.is_compiling() and _fits_integers(layer, x)


def _torch(layer: LinearParts) -> Run:
    source, packed = layer.input_quantizer, layer.weight
    assert isinstance(source, DynamicQuantize)
    scheme = source.activation.scheme

    def run(x: torch.Tensor) -> torch.Tensor:
        q, weight = quantize(x.reshape(-1, x.shape[-1]), scheme), packed.quantized()
        y = integer_product.int_mm(q.codes, weight.codes).to(torch.float32)
        y = y.mul_(weight.scales[0].float().reshape(1, -1)).mul_(q.scales[0].float())
        y = y if layer.bias is None else y.add_(layer.bias)
        return y.to(x.dtype).reshape(*x.shape[:-1], -1)

    return run


def _values(layer: LinearParts) -> Run:
    source, weight = layer.input_quantizer, layer.weight
    product = library.ValueLayer(weight.scheme, weight.dtype)

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x if source is None else source(x)
        data = weight._buffers["data"]
        assert data is not None
        return product(x, data, _stored(weight), layer.bias)

    return run


def _tiles(layer: LinearParts) -> Run:
    return lambda x: _product_of_tiles(layer, x)


def _product_of_tiles(layer: LinearParts, x: torch.Tensor) -> torch.Tensor:
    weight, (total, width) = layer.weight, layer.weight.shape
    x = x if layer.input_quantizer is None else layer.input_quantizer(x)
    step = max(1, TILE_VALUES // max(1, width) // weight.block_rows) * weight.block_rows
    if step >= total:
        return nn.functional.linear(x, weight.codes(0, total).dequantize(x.dtype), layer.bias)
    tiles = []
    for start in range(0, total, step):
        stop = min(total, start + step)
        bias = None if layer.bias is None else layer.bias[start:stop]
        tiles.append(nn.functional.linear(x, weight.codes(start, stop).dequantize(x.dtype), bias))
    return torch.cat(tiles, -1)


PATHS = (
    Path(
        name="torch._int_mm",
        when=f" from {MANY_ROWS} tokens on",
        device=CPU,
        refusal=_torch_refusal,
        prepare=_torch,
        fits=_fits_torch,
    ),
    Path(name="integer codes", op=Op.LINEAR, refusal=_integers_refusal, prepare=_codes, fits=_fits_integers),
    Path(
        name="weight codes",
        when=f" up to {FEW_ROWS} tokens",
        op=Op.LINEAR,
        refusal=_weight_refusal,
        prepare=_codes,
        fits=_fits_few,
    ),
    Path(
        name="dequantized panels",
        op=Op.LINEAR_VALUES,
        refusal=lambda _: None,
        prepare=_values,
        fits=lambda _, x: x.dtype in _DTYPES and not (x.requires_grad and torch.is_grad_enabled()),
    ),
    Path(name="dequantized tiles", refusal=lambda _: None, prepare=_tiles, fits=lambda _, __: True),
)
"""Fastest first; the last takes everything."""


def _refusal_in_place(path: Path, layer: LinearParts) -> str | None:
    """Return the reason why a path does not support the weight's device."""
    data = layer.weight._buffers["data"]
    if data is None:
        return None
    if path.device not in (None, data.device):
        return f"the data is on {data.device}"
    if path.op is None:
        return None
    explanation = registry.explain(_request(path.op, layer, torch.float32, data.device))
    if explanation.chosen != REFERENCE:
        return None
    return "; ".join(f"{name}: {reason}" for name, reason in explanation.reasons.items())


def _limits(path: Path, layer: LinearParts) -> str:
    """Return the tokens and dtypes of a path, empty for all."""
    data, op = layer.weight._buffers["data"], path.op
    if data is None or op is None:
        return path.when
    served = [str(dtype)[6:] for dtype in _DTYPES if _runs(op, layer, dtype, data.device)]
    return path.when + ("" if len(served) == len(_DTYPES) else f" for {' and '.join(served)}")


def explain(layer: LinearParts) -> str:
    """Return the layer's paths in words, and refusals of others."""
    taken, refused = list[str](), dict[str, list[str]]()
    for path in PATHS:
        reason = path.refusal(layer) or _refusal_in_place(path, layer)
        if reason is None:
            limits = _limits(path, layer)
            taken.append(f"{path.name}{limits}")
            if not limits:
                break
        elif not taken:
            refused.setdefault(reason, []).append(path.name)
    reasons = "".join(f"; not by {' or '.join(names)}: {reason}" for reason, names in refused.items())
    return f"inputs are multiplied by {', otherwise by '.join(taken)}{reasons}"


def prepared(layer: LinearParts) -> list[tuple[Callable[[LinearParts, torch.Tensor], bool], Run]]:
    """Return supported paths, fastest first: input predicate and function."""
    return [(_asked_once(path), path.prepare(layer)) for path in PATHS if path.refusal(layer) is None]


def _asked_once(path: Path) -> Callable[[LinearParts, torch.Tensor], bool]:
    """Return a cached :meth:`Path.takes` of one layer."""
    op = path.op
    if op is None:
        return path.takes
    known: dict[tuple[torch.dtype, torch.device], bool] = {}

    def takes(layer: LinearParts, x: torch.Tensor) -> bool:
        if torch.compiler.is_compiling():
            return path.takes(layer, x)
        place = x.dtype, x.device
        if place not in known:
            known[place] = _runs(op, layer, *place)
        return known[place] and path.fits(layer, x)

    return takes
