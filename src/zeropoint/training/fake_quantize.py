"""FakeQuantize: a quantizer with given or dynamic, unlearned parameters."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import replace

import torch

from ..errors import RangeError, SchemeError, ShapeError
from ..formats.torch_dtypes import format_of
from ..functional import check_input, choose_params, fake_quantize, fit_params
from ..layout.blocks import spread_blocks
from ..ops.straight_through import pass_where
from ..params import QuantizationParams
from ..params.module_buffers import buffered_params, bytes_of, check_buffered, register_params
from ..params.stored import store
from ..schemes import Scheme, ZeroPoint
from ..stats import MovingAverage, Observer
from .quantizer import Quantizer

MAX_BITS = 16
"""Widest integer, in bits."""


class GradientMask(enum.Enum):
    """Where the gradient passes."""

    ROUNDED = "rounded"
    """Where the rounded x lies within the codes: half a step past their ends too, as in torch."""
    RANGE = "range"
    """Where x itself lies within ``float_range()``, as in oxicuda."""


class FakeQuantize(Quantizer):
    """Fake quantization with given parameters, for every scheme.

        forward    y = dequantize(quantize(x))
        backward   dx = dy   where the rounded x lies within the codes, ends included,   else 0

    The straight-through estimator follows Bengio et al., arXiv:1308.3432, with the mask of
    ``torch.fake_quantize_per_tensor_affine``.

    Args:
        params: the parameters; their tensors become buffers ``scale1``, ``scale2``, ... and ``zero_point``,
            scales of 8 bits as their bytes. They are copied, and validated. Parameters of one block serve
            tensors of any shape, others those whose grid of blocks agrees. Or a number of bits, 1 to 16,
            which with symmetric, scale and zero_point defines integers with one scale: symmetric codes are
            signed, others unsigned, and one symmetric bit means -1 and 1.
        symmetric: with bits: whether codes are signed.
        scale: with bits.
        zero_point: with bits.
        enabled: whether it quantizes; otherwise ``x`` is returned as it is.
        observer: what watches x in training mode; parameters follow it, once it has seen finite numbers.
            mask: an attribute, where the gradient passes; assign ``GradientMask.RANGE`` for the rule of
            oxicuda.

    Raises:
        ZeropointError: what :meth:`QuantizationParams.validate` raises.
        RangeError: for bits, scale or zero point out of their range.
        SchemeError: when symmetric, scale or zero_point is given with parameters.

    Example:
        >>> quantizer = FakeQuantize(4, scale=0.5)
        >>> quantizer(torch.tensor([0.3, -9.0, 1.0]))
        tensor([ 0.5000, -4.0000,  1.0000])
    """

    observer: Observer | None
    zero_point: torch.Tensor | int

    def __init__(
        self,
        params: QuantizationParams | int,
        symmetric: bool = True,
        scale: float = 1.0,
        zero_point: int = 0,
        *,
        enabled: bool = True,
        observer: Observer | None = None,
    ) -> None:
        if not isinstance(params, QuantizationParams):
            params = _params_of_bits(params, symmetric, scale, zero_point)
        elif (symmetric, scale, zero_point) != (True, 1.0, 0):
            raise SchemeError("symmetric, scale and zero_point are part of params; give them with bits alone")
        super().__init__(params.scheme, enabled=enabled)
        params.validate()
        self.shape, self.dtype = params.shape, params.dtype
        self.mask = GradientMask.ROUNDED
        self.observer = observer
        register_params(self, params)
        if self.symmetric:
            self.zero_point = 0

    @classmethod
    def from_bits(
        cls,
        bits: int,
        *,
        symmetric: bool = True,
        scale: float = 1.0,
        zero_point: int = 0,
        enabled: bool = True,
    ) -> FakeQuantize:
        """Return ``FakeQuantize(bits, symmetric, scale, zero_point)``.

        Args:
            bits: 1 to 16.
            symmetric: whether codes are signed.
            scale: of the whole tensor.
            zero_point: of the whole tensor.
            enabled: whether it quantizes; otherwise ``x`` is returned as it is.

        Example:
            >>> FakeQuantize.from_bits(8, symmetric=False, scale=0.1, zero_point=3).quant_range()
            (0, 255)
        """
        return cls(_params_of_bits(bits, symmetric, scale, zero_point), enabled=enabled)

    @classmethod
    def from_tensor(cls, x: torch.Tensor, scheme: str | Scheme) -> FakeQuantize:
        """Return a quantizer with parameters from ``choose_params``, errors included.

        Args:
            x: a tensor from which the parameters are chosen.
            scheme: a :class:`~zeropoint.Scheme` or its text form, such as ``"int4:g128"``.

        Example:
            >>> FakeQuantize.from_tensor(torch.tensor([-1.0, 3.0]), "uint8:tensor:asym").zero_point
            tensor([64], dtype=torch.int32)
        """
        return cls(choose_params(x, scheme))

    @property
    def params(self) -> QuantizationParams:
        """The parameters, which share the memory of the buffers."""
        return buffered_params(self, self.scheme, self.shape, self.dtype)

    @property
    def scale(self) -> torch.Tensor:
        """One factor a finest block, all levels together."""
        factor = self.params.effective_scale()
        return torch.ones((1,) * len(self.shape)) if factor is None else factor

    def simulate(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``dequantize(quantize(x, params))``, bit for bit, differentiable in ``x``.

        In training mode the parameters follow the observer first, if there is one.
        """
        if self.observer is not None and self.training:
            self.observer(x)
            if int(self.observer.get_buffer("seen")) > 0:
                self.update_params(self.observer.params(self.scheme, dtype=self.dtype))
        if self.mask is GradientMask.ROUNDED:
            return fake_quantize(x, self.params)
        check_input(x)
        fitted = fit_params(self.params, tuple(x.shape), x.dtype)
        low, high = (
            spread_blocks(end, self.scheme.granularity, fitted.shape) for end in self.range_of(fitted)
        )
        return pass_where(x, fake_quantize(x.detach(), fitted), (x >= low) & (x <= high))

    def update_params(
        self, scale: float | torch.Tensor | QuantizationParams, zero_point: int | torch.Tensor = 0
    ) -> None:
        """Replace the parameters, written in place, for example by an observer's.

        After an error nothing has changed.

        Args:
            scale: a number, or one for each block, rounded to the format of scales; or whole parameters of
                the same scheme, in place of both.
            zero_point: the new zero point.

        Raises:
            SchemeError: for parameters of another scheme, or numbers where there is not one scale level.
            ShapeError: for numbers that do not fit.
            RangeError: for numbers that do not fit.
        """
        new = scale if isinstance(scale, QuantizationParams) else self._updated(scale, zero_point)
        if new.scheme != self.scheme:
            raise SchemeError(f"params (scheme {new.scheme}) must have the module's scheme, {self.scheme}")
        fitted = replace(new, shape=self.shape, dtype=self.dtype)
        fitted.validate()
        for name, tensor in fitted.tensors().items():
            self.get_buffer(name).copy_(bytes_of(tensor))

    def _updated(self, scale: float | torch.Tensor, zero_point: int | torch.Tensor) -> QuantizationParams:
        params = self.params
        if len(params.scales) != 1 or self.scheme.chained is not None:
            raise SchemeError(
                f"scale must be a QuantizationParams for {self.scheme}, which has more than "
                "positive scales of one level"
            )
        (level,), (old,) = self.scheme.scales, params.scales
        values = _numbers("scale", scale, old)
        _require("scale", values, torch.isfinite(values) & (values > 0), "positive and finite")
        zeros, wanted = params.zero_point, _numbers("zero_point", zero_point, old)
        if zeros is None:
            _require("zero_point", wanted, wanted == 0, f"0 for the symmetric {self.scheme}")
        elif self.scheme.zero_point is ZeroPoint.INTEGER:
            _require("zero_point", wanted, wanted == wanted.round(), f"an integer for {self.scheme}")
        return replace(
            params,
            scales=(store(values, level.format_for(format_of(self.dtype))),),
            zero_point=None if zeros is None else wanted.to(zeros.dtype),
        )

    def extra_repr(self) -> str:
        """Return the printed form: scheme and numbers of parameters."""
        text, numbers = super().extra_repr(), self.params.numbers
        head, comma, tail = text.partition(", ")
        return f"{head}, {numbers}{comma}{tail}" if numbers else text

    def check_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise a ZeropointError unless the tensors are valid parameters for this module."""
        super().check_state(tensors)
        check_buffered(self.params, tensors)


def _params_of_bits(bits: int, symmetric: bool, scale: float, zero_point: int) -> QuantizationParams:
    if type(bits) is not int or not 1 <= bits <= MAX_BITS:
        raise RangeError(f"bits (={bits!r}) must be an integer in 1..{MAX_BITS}; or pass a scheme")
    if symmetric and zero_point != 0:
        raise RangeError(f"zero_point (={zero_point}) must be 0 for symmetric codes; pass symmetric=False")
    signed = "binary:tensor" if bits == 1 else f"int{bits}:tensor"
    scheme = Scheme.parse(signed if symmetric else f"uint{bits}:tensor:asym")
    return QuantizationParams.new(scale, zero_point, scheme)


def _numbers(what: str, value: float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return one number or one a block as float64 on a grid."""
    numbers = torch.as_tensor(value, dtype=torch.float64, device=like.device)
    if numbers.numel() not in (1, like.numel()):
        raise ShapeError(
            f"{what} (shape {tuple(numbers.shape)}) must be one number, or one a block of grid "
            f"{tuple(like.shape)}"
        )
    return numbers.expand(like.shape) if numbers.numel() == 1 else numbers.reshape(like.shape)


def _require(what: str, values: torch.Tensor, good: torch.Tensor, rule: str) -> None:
    if not bool(good.all()):
        where = tuple(torch.nonzero(~good)[0].tolist())
        raise RangeError(f"{what} (={values[where].item()}) of block {where} must be {rule}")


class MovingAverageFakeQuantize(FakeQuantize):
    """Fake quantization under moving averages of extremes seen in training.

        low += rate (min x - low),    high += rate (max x - high),    params = parameters of low..high

    A :class:`~zeropoint.training.FakeQuantize` with an observer. In evaluation mode the parameters stay.
    Processes of torch.distributed share one range over all their data. A batch without finite numbers
    changes nothing.

    Args:
        params: where the parameters start; the first batch replaces them.
        rate: weight of the newest batch, in (0, 1].
        enabled: whether it quantizes; otherwise ``x`` is returned as it is.

    Raises:
        ZeropointError: what :class:`~zeropoint.stats.MovingAverage` and ``FakeQuantize`` raise.

    Source: the moving ranges of activations in arXiv:1712.05877, section 3.1.

    Example:
        >>> import torch
        >>> quantizer = MovingAverageFakeQuantize(QuantizationParams.new(1.0, 0, "int8"), rate=0.5)
        >>> for largest in (127.5, 63.75):
        ...     y = quantizer(torch.tensor([-largest, largest]))
        >>> quantizer.params.scales[0]
        tensor([0.7500])
    """

    def __init__(self, params: QuantizationParams, *, rate: float = 0.01, enabled: bool = True) -> None:
        statistic = MovingAverage(granularity=params.scheme.granularity, shape=params.shape, rate=rate)
        super().__init__(params, enabled=enabled, observer=Observer(statistic))
