"""torch.library custom operators: schemes as text, parameters as tensors.

Fake kernels give shapes and dtypes without data, so that torch.compile and torch.export trace through; the
gradient of fake_quantize is the straight-through estimator with the inclusive mask on the rounded value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from ..errors import DtypeError, ShapeError, UnsupportedError
from ..layout.code_rows import packed_shape
from ..params.tensors import Params, parameter_tensors, require_parameters
from ..schemes import Scheme
from .linear import Layer, linear_request
from .registry import Counter, Dense, Kernel, Op, Request, counter, dense, kernel_now
from .threads import gradual_underflow

Made = TypeVar("Made")
_ONLY: ContextVar[str | None] = ContextVar("zeropoint_backend", default=None)


@contextmanager
def only_backend(name: str) -> Iterator[None]:
    """Run operators in a context on one backend, or raise UnsupportedError.

    Args:
        name: of a backend, such as ``"reference"``.

    Returns:
        A context manager.

    Example:
        >>> with only_backend("reference"):
        ...     pass
    """
    token = _ONLY.set(name)
    try:
        yield
    finally:
        _ONLY.reset(token)


def request(op: Op, x: torch.Tensor, scheme: Scheme) -> Request:
    """Return the request that a call of ``op`` on ``x`` makes."""
    return Request(
        op=op, scheme=scheme, shape=tuple(x.shape), dtype=x.dtype, own_dtype=x.dtype, device=x.device
    )


def kernel(wanted: Request) -> Kernel:
    """Return the kernel of a request, under :func:`only_backend`'s restriction."""
    return kernel_now(wanted, _ONLY.get())


def kernel_for(op: Op, x: torch.Tensor, scheme: Scheme) -> Kernel:
    """Return the kernel that runs ``op`` on ``x``."""
    return kernel(request(op, x, scheme))


def chosen_backend(only: str | None = None) -> str | None:
    """Return the only permitted backend: ``only``, or :func:`only_backend`'s."""
    return only or _ONLY.get()


def counter_for(x: torch.Tensor) -> Counter | None:
    """Return the statistics kernels for ``x``, or None for plain torch."""
    return counter(x, _ONLY.get())


def dense_for(x: torch.Tensor) -> Dense | None:
    """Return the dense-product kernels for ``x``, or None for plain torch."""
    return dense(x, _ONLY.get())


class Operator:
    """A torch custom operator for tracers and autograd, plain function otherwise.

    The first call of a custom operator imports all of dynamo, 2 seconds, which a program that only quantizes
    need not pay.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name, self._function = name, function
        self._op = torch.library.custom_op(f"zeropoint::{name}", function, mutates_args=())
        self.register_autograd = self._op.register_autograd

    def __call__(self, x: torch.Tensor, *rest: Any) -> Any:
        """Call the function, or the operator where something must see the call."""
        return self._function(x, *rest) if is_plain(x) else self._op(x, *rest)

    def register_fake(self, function: Callable[..., Any]) -> None:
        """Register what tells tracers the shapes of results.

        It raises UnsupportedError inside of ``torch.onnx.export``, which has no ONNX for the operator.
        """

        @functools.wraps(function)
        def checked(*given: Any) -> Any:
            if torch.onnx.is_in_onnx_export():
                raise UnsupportedError(
                    f"torch.onnx.export knows no zeropoint::{self._name}; write it by "
                    "zeropoint.export.onnx.export_onnx"
                )
            return function(*given)

        self._op.register_fake(checked)


def is_plain(x: torch.Tensor) -> bool:
    """Whether nothing observes ``x``: compiler, tracer, dispatch mode or gradient.

    Subclasses of tensors and meta tensors are not plain either.
    """
    if torch.compiler.is_compiling() or torch._C._is_tracing() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    plain = type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_meta
    return plain and not (x.requires_grad and torch.is_grad_enabled())


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Register the decorated function as ``torch.ops.zeropoint.<name>``; its signature is the schema."""
    return lambda function: Operator(name, function)


@operator("quantize_dynamic")
def quantize_dynamic(x: torch.Tensor, scheme: str) -> list[torch.Tensor]:
    """Return ``[data, *params]``: the codes and parameter tensors of ``x``."""
    value = Scheme.parse(scheme)
    with gradual_underflow():
        data, params = kernel_for(Op.QUANTIZE_DYNAMIC, x, value).run(x)
    return [data, *params]


@quantize_dynamic.register_fake
def _(x: torch.Tensor, scheme: str) -> list[torch.Tensor]:
    value = Scheme.parse(scheme)
    made = parameter_tensors(value, tuple(x.shape), x.dtype)
    return [_fake_data(x, value), *(x.new_empty(grid, dtype=dtype) for grid, dtype in made)]


def _fake_data(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    return x.new_empty(packed_shape(scheme, tuple(x.shape)), dtype=torch.uint8)


@operator("quantize")
def quantize(x: torch.Tensor, params: list[torch.Tensor], scheme: str) -> torch.Tensor:
    """Return the packed codes of ``x`` under given parameters."""
    value = Scheme.parse(scheme)
    with gradual_underflow():
        data: torch.Tensor = kernel_for(Op.QUANTIZE, x, value).run(x, params)
    return data


@quantize.register_fake
def _(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return _fake_data(x, Scheme.parse(rest[-1]))


@operator("dequantize")
def dequantize(
    data: torch.Tensor,
    params: list[torch.Tensor],
    scheme: str,
    shape: list[int],
    dtype: torch.dtype,
    own_dtype: torch.dtype,
) -> torch.Tensor:
    """Return packed codes dequantized to ``dtype``; ShapeError for negative lengths."""
    if any(length < 0 for length in shape):
        raise ShapeError(f"shape (={tuple(shape)}) must not have a negative length")
    wanted = Request(
        op=Op.DEQUANTIZE,
        scheme=Scheme.parse(scheme),
        shape=tuple(shape),
        dtype=dtype,
        own_dtype=own_dtype,
        device=data.device,
    )
    with gradual_underflow():
        values: torch.Tensor = kernel(wanted).run(data, params)
    return values


@dequantize.register_fake
def _(data: torch.Tensor, *rest: Any) -> torch.Tensor:
    *_, shape, dtype, _own_dtype = rest
    return data.new_empty(shape, dtype=dtype)


@operator("fake_quantize")
def fake_quantize(x: torch.Tensor, params: list[torch.Tensor], scheme: str) -> torch.Tensor:
    """Return ``x`` quantized and dequantized, in its own dtype."""
    value = Scheme.parse(scheme)
    with gradual_underflow():
        values: torch.Tensor = kernel_for(Op.FAKE_QUANTIZE, x, value).run(x, params)
    return values


@fake_quantize.register_fake
def _(x: torch.Tensor, *_rest: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


@operator("fake_quantize_backward")
def fake_quantize_backward(
    grad: torch.Tensor, x: torch.Tensor, params: list[torch.Tensor], scheme: str
) -> torch.Tensor:
    """Return ``grad`` where the rounded ``x`` lies within the codes, else zero.

    Raises ShapeError when ``grad`` and ``x`` differ in shape, DtypeError when they differ in dtype.
    """
    if grad.shape != x.shape:
        raise ShapeError(f"grad (shape {tuple(grad.shape)}) must have the shape of x, {tuple(x.shape)}")
    if grad.dtype != x.dtype:
        raise DtypeError(f"grad ({grad.dtype}) must have the dtype of x, {x.dtype}; convert it first")
    value = Scheme.parse(scheme)
    with gradual_underflow():
        gradient: torch.Tensor = kernel_for(Op.FAKE_QUANTIZE_BACKWARD, x, value).run(grad, x, params)
    return gradient


@fake_quantize_backward.register_fake
def _(grad: torch.Tensor, *_rest: Any) -> torch.Tensor:
    return grad.new_empty(grad.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, params, ctx.scheme = inputs
    ctx.save_for_backward(x, *params)


def _straight_through(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, list[None], None]:
    x, *params = ctx.saved_tensors
    return fake_quantize_backward(grad, x, params, ctx.scheme), [None] * len(params), None


fake_quantize.register_autograd(_straight_through, setup_context=_keep)


@operator("linear")
def linear(
    x: torch.Tensor,
    params: list[torch.Tensor],
    weight: torch.Tensor,
    weight_params: list[torch.Tensor],
    bias: torch.Tensor | None,
    scheme: str,
    weight_scheme: str,
    weight_dtype: torch.dtype,
) -> torch.Tensor:
    """Return a linear layer's output from integer codes; see :mod:`.linear`.

    x: (..., in_features). params: given for all of ``x`` under ``scheme``; empty where each row gives its
    own, or where ``scheme`` is empty and ``x`` is not quantized. weight: (out_features, bytes) packed codes
    of ``weight_scheme``, of which ``weight_params`` are the parameters. Raises UnsupportedError for schemes
    that are not products of integer codes, ShapeError for rows of another length than ``x`` has and for
    scales, zero points or a bias that are too few or too many, NonFiniteError and RangeError as quantizing
    ``x`` does.
    """
    shape, dtypes = (weight.shape[0], x.shape[-1]), (x.dtype, weight_dtype)
    wanted = linear_request(scheme, weight_scheme, shape, dtypes, x.device, given=bool(params))
    return _layer_of(wanted, weight, weight_params, bias)(x, _given(wanted, params))


@linear.register_fake
def _(x: torch.Tensor, _params: list[torch.Tensor], weight: torch.Tensor, *_rest: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _layer_of(wanted: Request, weight: torch.Tensor, params: Params, bias: torch.Tensor | None) -> Layer:
    """Return a layer's function, or raise ShapeError for unfit tensors."""
    _require_weight(wanted, weight, params, bias)
    layer: Layer = kernel(wanted).run(weight, params, bias)
    return layer


def _require_weight(wanted: Request, weight: torch.Tensor, params: Params, bias: torch.Tensor | None) -> None:
    """Raise ShapeError for a wrong number of codes, parameters or biases."""
    scheme, shape = wanted.scheme, wanted.shape
    rows, cols = shape
    if weight.dtype is not torch.uint8 or weight.shape != packed_shape(scheme, shape):
        raise ShapeError(
            f"weight ({weight.dtype} of shape {tuple(weight.shape)}) must be bytes that hold {cols} codes of "
            f"{scheme} a row, as x has numbers on its last axis"
        )
    require_parameters(scheme, params, shape)
    if bias is not None and bias.shape != (rows,):
        raise ShapeError(
            f"bias (shape {tuple(bias.shape)}) must have shape {(rows,)}, a number a row of weight"
        )


def _given(wanted: Request, params: list[torch.Tensor]) -> Params | None:
    """Return given input parameters, or raise ShapeError for a wrong number."""
    if not params:
        return None
    assert wanted.source is not None
    require_parameters(wanted.source, params, (1, wanted.shape[1]))
    return params


class Kept:
    """Last result, keyed by the storage and layout of its inputs.

    Numbers in the inputs may change. The result must hold their memory, so that no other tensor is allocated
    there.
    """

    def __init__(self) -> None:
        self._last: tuple[object, Any] | None = None

    def of(
        self, key: tuple[object, ...], tensors: Iterable[torch.Tensor | None], make: Callable[[], Made]
    ) -> Made:
        """Return the last result for equal key and storage, or compute one."""
        known = key, [None if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]
        last = self._last
        if last is None or last[0] != known:
            last = self._last = known, make()
        made: Made = last[1]
        return made


class LinearLayer:
    """:data:`linear` for one layer, with the common work cached."""

    def __init__(self, scheme: str, weight_scheme: str, weight_dtype: torch.dtype) -> None:
        self._schemes = scheme, weight_scheme, weight_dtype
        self._kept = Kept()

    def __call__(
        self,
        x: torch.Tensor,
        params: list[torch.Tensor],
        weight: torch.Tensor,
        weight_params: list[torch.Tensor],
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the output, as :data:`linear` does."""
        if not is_plain(x):
            y: torch.Tensor = linear(x, params, weight, weight_params, bias, *self._schemes)
            return y

        def make() -> tuple[Request, Layer]:
            scheme, weight_scheme, dtype = self._schemes
            shape, dtypes = (weight.shape[0], x.shape[-1]), (x.dtype, dtype)
            wanted = linear_request(scheme, weight_scheme, shape, dtypes, x.device, given=bool(params))
            return wanted, _layer_of(wanted, weight, weight_params, bias)

        key = x.dtype, x.device, x.shape[-1], len(params), _ONLY.get()
        wanted, layer = self._kept.of(key, (weight, *weight_params, bias), make)
        return layer(x, _given(wanted, params))


@operator("linear_values")
def linear_values(
    x: torch.Tensor,
    weight: torch.Tensor,
    params: list[torch.Tensor],
    bias: torch.Tensor | None,
    scheme: str,
    weight_dtype: torch.dtype,
) -> torch.Tensor:
    """Return a linear layer's output from weight values, decoded in pieces.

    x: (..., in_features). weight: (out_features, bytes) packed codes of ``scheme``.
    Raises ShapeError as :data:`linear` does.
    """
    wanted = _values_request(x, weight, Scheme.parse(scheme), weight_dtype)
    return _layer_of(wanted, weight, params, bias)(x, None)


@linear_values.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, *_rest: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _values_request(
    x: torch.Tensor, weight: torch.Tensor, scheme: Scheme, weight_dtype: torch.dtype
) -> Request:
    return Request(
        op=Op.LINEAR_VALUES,
        scheme=scheme,
        shape=(weight.shape[0], x.shape[-1]),
        dtype=x.dtype,
        own_dtype=weight_dtype,
        device=x.device,
    )


class ValueLayer:
    """:data:`linear_values` for one layer, with the common work cached."""

    def __init__(self, scheme: Scheme, weight_dtype: torch.dtype) -> None:
        self._scheme, self._dtype, self._kept = scheme, weight_dtype, Kept()

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, params: list[torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the output, as :data:`linear_values` does."""
        if not is_plain(x):
            y: torch.Tensor = linear_values(x, weight, params, bias, str(self._scheme), self._dtype)
            return y

        def make() -> Layer:
            wanted = _values_request(x, weight, self._scheme, self._dtype)
            return _layer_of(wanted, weight, params, bias)

        key = x.dtype, x.device, x.shape[-1], _ONLY.get()
        return self._kept.of(key, (weight, *params, bias), make)(x, None)
