"""LearnedScale: trained scales of blocks, with or without offset (LSQ, LSQ+)."""

from __future__ import annotations

import math

import torch

from ..errors import DtypeError, RangeError, SchemeError
from ..formats.torch_dtypes import format_of, wide_dtype
from ..functional import choose_params
from ..layout.blocks import sum_blocks
from ..params import QuantizationParams
from ..params.stored import LEAST_NORMAL, load_scale
from ..schemes import Arithmetic, Scheme, ZeroPoint
from .quantizer import Quantizer
from .straight_through import at_least, fake_quantize_learned, on_grid, settled, settled_text, stored_params


class LearnedScale(Quantizer):
    """Fake quantization with learned scales: LSQ, and LSQ+ with zero points.

    With v = (x - beta) / s and m = 1 where round(v) lies within the codes, ends included, else 0:

        y       = s * clamp(round(v), qmin, qmax) + beta
        dx      = m dy
        ds      = g sum_block dy (round(v) - v   inside,   qmin or qmax   outside)
        d beta  = g sum_block dy (1 - m)
        g       = 1 / sqrt(count * qmax)

    A symmetric scheme has beta = 0. One with ``asym=real`` learns ``offset`` = beta and is deployed with zero
    point -beta / s. One with ``asym`` learns ``zero_point`` z, which is rounded to a code: dz = g sum dy (m -
    1) s, and codes outside count as qmin - z and qmax - z in ds. A float element takes its largest value for
    qmax.

    A scale that the optimizer drives to zero or below acts as the smallest positive one, with its gradient,
    so that it can return, and ``guarded_count`` tells of it.

    Args:
        params: where the parameters start; one scale level of any granularity, with a linear rule. Scales
            that the format cannot hold (``scale=bfloat16``) are rounded to it, straight through.
        count: elements that share a scale, a block of ``params.shape`` unless given. For activations
            the paper counts the features of one sample: ``params`` of a batch need ``count``.
        enabled: whether it quantizes; otherwise ``x`` is returned as it is.

    Raises:
        SchemeError: for several levels, none, or powers of two.
        RangeError: for a count below 1.
        DtypeError: on the forward, for a 16-bit ``x`` in a dialect that rounds intermediates to the input's
            dtype.

    Sources: LSQ, arXiv:1902.08153, section 2; LSQ+, arXiv:2004.09576, section 3. Codes outside include
    numbers that round past the ends, where the papers compare v itself: the mask agrees with the other
    quantizers.

    Example:
        >>> quantizer = LearnedScale(QuantizationParams.new(0.5, 0, "int2"))
        >>> y = quantizer(torch.tensor([0.3, 2.0]))
        >>> y.sum().backward()
        >>> y.tolist(), quantizer.scale.grad  # (1 - 0.6 + 1) / sqrt(1 * 1)
        ([0.5, 0.5], tensor([1.4000]))
    """

    def __init__(self, params: QuantizationParams, *, count: int | None = None, enabled: bool = True) -> None:
        super().__init__(params.scheme, enabled=enabled)
        params.validate()
        _check_scheme(params.scheme)
        self.shape, self.dtype = params.shape, params.dtype
        if count is None:
            count = max(1, math.prod(params.shape)) // max(1, params.num_parameter_sets)
        if count < 1:
            raise RangeError(f"count (={count}) must be at least 1: the elements that share a scale")
        self.factor = 1.0 / math.sqrt(count * self.quant_range()[1])
        wide = wide_dtype(params.dtype)
        fmt = params.scheme.scales[0].format_for(format_of(params.dtype))
        scale = load_scale(params.scales[0].detach(), fmt, wide).clone()
        self.scale = torch.nn.Parameter(scale)
        kind, zeros = params.scheme.zero_point, params.zero_point
        start = None if zeros is None else zeros.detach().to(wide)
        integer = start is not None and kind is ZeroPoint.INTEGER
        self.zero_point = torch.nn.Parameter(start) if start is not None and integer else None
        unit = float(params.scheme.element_step) if start is not None else 1.0
        real = start is not None and kind is ZeroPoint.REAL
        self.offset = torch.nn.Parameter(-start * unit * scale) if start is not None and real else None

    @classmethod
    def from_tensor(cls, x: torch.Tensor, scheme: str | Scheme, *, count: int | None = None) -> LearnedScale:
        """Return a quantizer that starts at LSQ's ``2 mean|x| / sqrt(qmax)``.

        A block of zeros, and any block of an affine scheme, starts at the scale and zero point of its range.

        Args:
            x: a tensor from which the scales start.
            scheme: a :class:`~zeropoint.Scheme` or its text form, such as ``"int4:g128"``.
            count: values that share a scale.

        Raises:
            ZeropointError: what ``choose_params`` raises.
        """
        params = choose_params(x, scheme)
        quantizer = cls(params, count=count)
        if params.scheme.zero_point is ZeroPoint.NONE:
            wide = x.detach().to(quantizer.scale.dtype)
            granularity = params.scheme.granularity
            sizes = sum_blocks(torch.ones_like(wide), granularity)
            mean = sum_blocks(wide.abs(), granularity) / sizes
            start = 2 * mean / math.sqrt(quantizer.quant_range()[1])
            with torch.no_grad():
                quantizer.scale.copy_(torch.where(start > quantizer.least_scale, start, quantizer.scale))
        return quantizer

    @property
    def least_scale(self) -> float:
        """Smallest usable scale: the dialect's (2**-126, torch: 2**-23), or the format's."""
        fmt = self.scheme.scales[0].format_for(format_of(self.dtype))
        return max(self.scheme.dialect.small_scales.least, LEAST_NORMAL, float(fmt.smallest))

    @property
    def guarded_count(self) -> int:
        """Number of scales below the smallest, which replaces them."""
        return int((self.scale.detach() < self.least_scale).sum())

    @property
    def params(self) -> QuantizationParams:
        """The scales, in their format, and zero points that the forward uses."""
        with torch.no_grad():
            scale, shift = self._factors(self.shape)
            stored, zeros = stored_params(settled(self.scheme, self.dtype), scale, shift)
        return QuantizationParams(
            scheme=self.scheme, shape=self.shape, scales=(stored,), zero_point=zeros, dtype=self.dtype
        )

    def _factors(self, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return scale and zero point, or offset, on the grid."""
        granularity = self.scheme.granularity
        scale = on_grid(at_least(self.scale, self.least_scale), granularity, shape)
        shift = self.zero_point if self.offset is None else self.offset
        return scale, None if shift is None else on_grid(shift, granularity, shape)

    def simulate(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``dequantize(quantize(x, params))``, bit for bit, differentiable in x, scales and offset."""
        require_wide(x, self.scheme)
        scale, shift = self._factors(tuple(x.shape))
        return fake_quantize_learned(x, scale, shift, settled_text(self.scheme, self.dtype), self.factor)


def require_wide(x: torch.Tensor, scheme: Scheme) -> None:
    """Raise DtypeError for a 16-bit ``x`` whose codes depend on 16-bit intermediates."""
    if scheme.dialect.arithmetic is Arithmetic.INPUT and x.dtype in (torch.bfloat16, torch.float16):
        raise DtypeError(
            f"x (dtype {x.dtype}) must be float32 or float64 to learn in dialect {scheme.dialect.name}, "
            "which computes in the dtype of x; convert it, or take another dialect"
        )


def _check_scheme(scheme: Scheme) -> None:
    if len(scheme.scales) != 1 or scheme.scales[0].rule.power_of_two or scheme.chained is not None:
        raise SchemeError(
            f"scheme (={scheme}) must have one scale level with a linear rule to learn its scales; "
            "LearnedThreshold learns powers of two of symmetric integers, and FakeQuantize, which learns "
            "nothing, takes every scheme"
        )
