"""The public operators: from tensors to quantized tensors and back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch._C import _functorch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .errors import DtypeError, ShapeError, UnsupportedError
from .formats.torch_dtypes import INPUT_DTYPES, wide_dtype
from .layout.blocks import reduce_blocks
from .ops import library, registry, straight_through
from .ops.row_errors import RowErrors
from .ops.threads import gradual_underflow
from .params import QuantizationParams
from .params.tensors import Params, parameter_tensors
from .params.tracing import traced_as_constant
from .schemes import Scheme
from .schemes.scale_rules import Store
from .signatures import by_signature
from .tensor import QuantizedTensor


@traced_as_constant
def _resolve(scheme: str | Scheme) -> tuple[Scheme, str]:
    parsed = Scheme.parse(scheme)
    return parsed, str(parsed)


def choose_params(x: torch.Tensor, scheme: str | Scheme) -> QuantizationParams:
    """Return the parameters that ``x`` gives under ``scheme``, with its observed extremes.

    Args:
        x: float64, float32, float16 or bfloat16; any shape and stride; finite.
        scheme: a :class:`~zeropoint.Scheme` or its text form, such as ``"int4:g128"``.

    Raises:
        NonFiniteError: for NaN and Inf with the first index.
        DtypeError: for a tensor of another dtype, layout or device.
        ShapeError: when the blocks of the scheme do not fit.

    Example:
        >>> choose_params(torch.tensor([-1.0, 3.0]), "uint8:tensor:asym").zero_point
        tensor([64], dtype=torch.int32)
    """
    check_input(x)
    parsed, text = _resolve(scheme)
    wide = wide_dtype(x.dtype)
    source = x.detach()
    if not library.is_plain(source):
        # A tracer sees the operator, whose fake kernel needs no data; a choice in plain torch does.
        _, *stored = library.quantize_dynamic(source, text)
    else:
        with gradual_underflow():
            stored = library.kernel_for(registry.Op.CHOOSE_PARAMS, source, parsed).run(source)
    low = reduce_blocks(source, parsed.granularity, "amin", math.inf).to(wide)
    high = reduce_blocks(source, parsed.granularity, "amax", -math.inf).to(wide)
    chosen = QuantizationParams.of(parsed, tuple(x.shape), x.dtype, stored)
    return replace(chosen, minimum=low, maximum=high)


def quantize(
    x: torch.Tensor, scheme: str | Scheme | QuantizationParams, *, out: QuantizedTensor | None = None
) -> QuantizedTensor:
    """Return ``x`` in codes, with parameters computed from ``x`` or given.

    Args:
        x: float64, float32, float16 or bfloat16; any shape and stride; finite; never modified.
        scheme: parameters, or a scheme (also as text, such as ``"int4:g128"``) whose parameters come from
            ``x``.
        out: an earlier result for the same scheme, shape and dtype, whose memory is used again; after an
            error its content means nothing. Not for traced code.

    Raises:
        NonFiniteError: for NaN and Inf, with the first index.
        DtypeError: for a tensor of another dtype, layout or device.
        ShapeError: when the blocks of the scheme, or ``out``, do not fit.

    Example:
        >>> quantize(torch.tensor([[1.0, -2.0, 4.0]]), "int8:channel:narrow").codes
        tensor([[ 32, -64, 127]], dtype=torch.int8)
    """
    check_input(x)
    source = x.detach() if x.requires_grad else x
    if out is not None:
        return _quantize_into(source, scheme, out)
    if isinstance(scheme, QuantizationParams):
        _require_valid(scheme, source)
        params = fit_params(scheme, tuple(x.shape), x.dtype)
        data = library.quantize(source, list(straight_through.detached(params.stored)), params.text)
        return QuantizedTensor(data=data, params=params, shape=tuple(x.shape), dtype=x.dtype)
    parsed, text = _resolve(scheme)
    data, *chosen = library.quantize_dynamic(source, text)
    return _made(x, parsed, data, chosen)


def quantize_part(
    x: torch.Tensor, scheme: Scheme, extremes: tuple[float, float], *, out: QuantizedTensor | None = None
) -> QuantizedTensor:
    """Return a part of a tensor in the whole tensor's codes.

    x: whole blocks of the finest scales, of the dtypes of :func:`quantize`. extremes: smallest and largest
    value of the whole tensor, from which its own scale comes. out: as :func:`quantize`. Raises what
    :func:`quantize` raises, and NonFiniteError for extremes that are not finite.
    """
    check_input(x)
    if out is not None:
        return _quantize_into(x.detach(), scheme, out, extremes)
    kernel = library.kernel_for(registry.Op.QUANTIZE_DYNAMIC, x, scheme)
    with gradual_underflow():
        data, params = kernel.run(x.detach(), extremes=extremes)
    return _made(x, scheme, data, params)


def _made(x: torch.Tensor, scheme: Scheme, data: torch.Tensor, chosen: Params) -> QuantizedTensor:
    """Return the codes of ``x`` with their chosen parameters."""
    shape = tuple(x.shape)
    params = QuantizationParams.of(scheme, shape, x.dtype, chosen)
    return QuantizedTensor(data=data, params=params, shape=shape, dtype=x.dtype, own_params=True)


def _quantize_into(
    x: torch.Tensor,
    scheme: str | Scheme | QuantizationParams,
    out: QuantizedTensor,
    extremes: tuple[float, float] | None = None,
) -> QuantizedTensor:
    given = isinstance(scheme, QuantizationParams)
    if not isinstance(out, QuantizedTensor):
        raise DtypeError(f"out (a {type(out).__name__}) must be a QuantizedTensor, an earlier result")
    if isinstance(scheme, QuantizationParams):
        _require_valid(scheme, x)
    params = (
        fit_params(scheme, tuple(x.shape), x.dtype) if isinstance(scheme, QuantizationParams) else out.params
    )
    parsed = params.scheme if given else Scheme.parse(scheme)  # type: ignore[arg-type]
    same = (out.scheme, out.shape, out.dtype) == (parsed, tuple(x.shape), x.dtype)
    if not same or not out.takes_results(x.device, params=not given):
        raise ShapeError(
            f"out ({out}) must be a result for {parsed}, shape {tuple(x.shape)}, {x.dtype}, on {x.device}, "
            "its tensors contiguous"
        )
    check_apart((out.data,) if given else tensors_of(out), (x,))
    if given:
        kernel = library.kernel_for(registry.Op.QUANTIZE, x, parsed)
        with gradual_underflow():
            data = kernel.run(x, straight_through.detached(params.stored), out.data)
        return QuantizedTensor(data=data, params=params, shape=out.shape, dtype=out.dtype)
    kernel = library.kernel_for(registry.Op.QUANTIZE_DYNAMIC, x, parsed)
    with gradual_underflow():
        kernel.run(x, (out.data, params.stored), extremes)
    return out if out.own_params else replace(out, own_params=True)


def tensors_of(q: QuantizedTensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors that make up ``q``: codes and parameters."""
    return (q.data, *q.params.stored)


def check_apart(outputs: tuple[torch.Tensor, ...], inputs: tuple[torch.Tensor, ...]) -> None:
    """Raise ShapeError where outputs share memory with inputs or each other.

    DtypeError for an output whose memory holds negated or conjugated numbers: a kernel does not know it.
    """
    for tensor in outputs:
        if tensor.is_neg() or tensor.is_conj():
            raise DtypeError(
                "out is a view with torch's negative or conjugate bit, whose memory holds other numbers; "
                "pass torch.resolve_neg(torch.resolve_conj(out))"
            )
    spans = [_span(tensor) for tensor in (*outputs, *inputs)]
    for index in range(len(outputs)):
        begin, end = spans[index]
        for other, other_end in spans[index + 1 :]:
            if begin < other_end and other < end:
                raise ShapeError(
                    "out must not share memory with the input, which is never modified, nor its tensors "
                    "with each other; pass memory of its own"
                )


def _span(x: torch.Tensor) -> tuple[int, int]:
    """Return the first address of ``x`` and the one past its last."""
    start = x.data_ptr()
    if x.is_contiguous():
        return start, start + x.nbytes
    if x.numel() == 0:
        return 0, 0
    last = sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True))
    return start, start + (last + 1) * x.itemsize


def dequantize(
    q: QuantizedTensor, dtype: torch.dtype | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the values of ``q``, in its original dtype by default.

    Args:
        q: the quantized tensor.
        dtype: of the result; the quantized tensor's if None.
        out: a contiguous tensor of floats of the shape of ``q`` that takes the values, in its own dtype. Not
            for traced code, nor in memory that is read-only, which ends the process as writing to it does
            elsewhere in torch.

    Raises:
        DtypeError: for ``out`` of integers, or with torch's negative or conjugate bit.
        ShapeError: when ``out`` does not fit.
        UnsupportedError: for ``out`` in traced code.

    Example:
        >>> dequantize(quantize(torch.tensor([0.5, -1.0]), "int8:narrow"))
        tensor([ 0.5039, -1.0000])
    """
    if not isinstance(q, QuantizedTensor):
        raise UnsupportedError(
            f"q (a {type(q).__name__}) must be a QuantizedTensor; for a model call dequantize_model"
        )
    if out is None:
        return q.dequantize(dtype)
    if tuple(out.shape) != q.shape or not out.is_contiguous() or out.requires_grad:
        raise ShapeError(
            f"out (shape {tuple(out.shape)}) must be a contiguous tensor of shape {q.shape} without gradient"
        )
    if not out.is_floating_point():
        raise DtypeError(f"out ({out.dtype}) must hold floats, as values are; pass one of {q.dtype}")
    check_apart((out,), tensors_of(q))
    wanted = registry.Request(
        op=registry.Op.DEQUANTIZE,
        scheme=q.scheme,
        shape=q.shape,
        dtype=out.dtype,
        own_dtype=q.dtype,
        device=q.device,
    )
    with gradual_underflow():
        library.kernel(wanted).run(q.data, q.params.stored, out)
    return out


def fake_quantize(x: torch.Tensor, params: QuantizationParams | str | Scheme) -> torch.Tensor:
    """Return ``dequantize(quantize(x, params))``, differentiable in ``x`` and given scales.

    The gradient is the straight-through estimator: 1 where ``x``, rounded, lies within the codes (ends
    included), else 0; scales and real zero points that require a gradient get LSQ's, see
    :mod:`zeropoint.ops.straight_through`. A scheme instead of parameters takes them from ``x`` itself.

    Args:
        x: a float tensor of any shape.
        params: parameters, or a scheme (also as text) whose parameters come from ``x``.
    """
    check_input(x)
    if not isinstance(params, QuantizationParams):
        late, q = _rounds_late(params), quantize(x, params)
        if library.is_plain(x):
            return q.dequantize()  # nobody asks for a gradient, and the codes are there
        params = q.params
        if late:  # parameters as they are stored give other codes
            given, text = list(straight_through.detached(params.stored)), params.text
            mask = library.fake_quantize_backward(torch.ones_like(x), x.detach(), given, text) != 0
            return straight_through.pass_where(x, q.dequantize(), mask)
    else:
        _require_valid(params, x.detach())
    fitted = fit_params(params, tuple(x.shape), x.dtype)
    if straight_through.learns(fitted.stored):
        return straight_through.fake_quantize(x, fitted.scheme, fitted.stored)
    result: torch.Tensor = library.fake_quantize(x, list(fitted.stored), fitted.text)
    return result


@traced_as_constant
def _rounds_late(scheme: str | Scheme) -> bool:
    return any(level.stores(Store.LATE) for level in Scheme.parse(scheme).levels)


def row_errors(x: torch.Tensor, q: QuantizedTensor) -> RowErrors:
    """Return row errors of ``q`` against its source ``x``.

    Raises ShapeError or DtypeError when ``x`` is not such a tensor.
    """
    if (tuple(x.shape), x.dtype) != (q.shape, q.dtype):
        raise ShapeError(f"x (shape {tuple(x.shape)}, {x.dtype}) must be the tensor that was quantized: {q}")
    kernel = library.kernel_for(registry.Op.MEASURE, x, q.scheme)
    errors: RowErrors = kernel.run(x.detach(), q.data, q.params.stored)
    return errors


@by_signature
def explain(x: torch.Tensor, scheme: str | Scheme, op: str = "quantize_dynamic") -> registry.Explanation:
    """Return the backend of ``op`` on ``x``, and refusals of others.

    Args:
        x: the tensor that the operator would take.
        scheme: a :class:`~zeropoint.Scheme` or its text form, such as ``"int4:g128"``.
        op: the name of an operator, such as ``"quantize"``.

    Raises:
        UnsupportedError: for another operator.

    Example:
        >>> explain(torch.zeros(4, dtype=torch.float64), "int8", op="dequantize").chosen
        'reference'
    """
    known = {member.value: member for member in registry.Op}
    if op not in known:
        raise UnsupportedError(f"op (={op!r}) must be one of {', '.join(known)}")
    return registry.explain(library.request(known[op], x, Scheme.parse(scheme)))


def _require_valid(params: QuantizationParams, x: torch.Tensor) -> None:
    """Raise what :meth:`QuantizationParams.validate` raises, where values can be looked at."""
    if library.is_plain(x):
        params.validate_once()


def fit_params(params: QuantizationParams, shape: tuple[int, ...], dtype: torch.dtype) -> QuantizationParams:
    """Return parameters on the grid of a tensor of ``shape``.

    Parameters for a single value, as those without a shape are, serve all blocks of any tensor. Otherwise the
    grids must agree but for axes of length 1: a list of channels fits the axis it is for. Raises ShapeError
    when they do not.

    >>> fit_params(QuantizationParams.new(0.5), (2, 3), torch.float32).scales[0].shape
    torch.Size([1, 1])
    """
    if params.shape == shape and params.dtype == dtype:
        return params
    grids = [grid for grid, _ in parameter_tensors(params.scheme, shape, params.dtype)]
    pairs = list(zip(params.stored, grids, strict=True))
    if math.prod(params.shape) == 1:
        fitted = [_spread(values, grid) for values, grid in pairs]
    elif any(_long_axes(values.shape) != _long_axes(grid) for values, grid in pairs):
        have = [tuple(level.shape) for level in params.levels]
        raise ShapeError(
            f"parameters for shape {params.shape} (scales {have}) do not fit a tensor of shape {shape}"
        )
    else:
        fitted = [values.reshape(grid) for values, grid in pairs]
    return QuantizationParams.of(params.scheme, shape, params.dtype, fitted)


def _spread(values: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
    """Return one number per grid place, repeating a single one."""
    return values.reshape(grid) if math.prod(grid) == values.numel() else values.reshape(()).repeat(grid)


def detached_params(params: QuantizationParams) -> QuantizationParams:
    """Return parameters without gradients, sharing memory."""
    given = params.stored
    kept = straight_through.detached(given)
    if kept is given:
        return params
    plain = QuantizationParams.of(params.scheme, params.shape, params.dtype, kept)
    return replace(plain, minimum=params.minimum, maximum=params.maximum)


def _long_axes(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(side for side in shape if side != 1)


def check_input(x: torch.Tensor) -> None:
    """Raise DtypeError for anything but a dense, quantizable tensor.

    >>> check_input(torch.ones(2))
    """
    if not isinstance(x, torch.Tensor):
        raise DtypeError(f"x (a {type(x).__name__}) must be a torch.Tensor")
    wrapper: bool = is_traceable_wrapper_subclass(x)
    if wrapper:
        raise DtypeError(
            f"x (a {type(x).__name__}) must be a plain tensor; take its local or dequantized tensor first"
        )
    if not torch.compiler.is_compiling() and (
        _functorch.is_batchedtensor(x) or _functorch.is_gradtrackingtensor(x)
    ):
        raise DtypeError(
            "x (a wrapper of torch.func: vmap, grad, jvp) must be a plain tensor; quantize outside of the "
            "transform, or take gradients by torch.autograd"
        )
    if x.layout is not torch.strided or x.is_quantized or x.is_nested:
        raise DtypeError(
            f"x (layout {x.layout}, {x.dtype}) must be a dense tensor; call to_dense() or dequantize() first"
        )
    if x.dtype not in INPUT_DTYPES:
        known = ", ".join(str(dtype) for dtype in INPUT_DTYPES)
        raise DtypeError(f"x (dtype {x.dtype}) must be one of {known}; convert it first")


__all__ = ["check_input", "choose_params", "dequantize", "explain", "fake_quantize", "fit_params", "quantize"]
