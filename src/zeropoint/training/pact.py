"""Pact: activations are clipped to 0..alpha, and alpha is trained (PACT)."""

import math

import torch

from ..errors import RangeError, SchemeError
from ..formats.torch_dtypes import wide_dtype
from ..params import QuantizationParams
from ..params.stored import LEAST_NORMAL
from ..schemes import Granularity, Scheme, ZeroPoint
from .learned_scale import require_wide
from .quantizer import Quantizer
from .straight_through import at_least, clip_learned, on_grid, settled, settled_text, stored_params


class Pact(Quantizer):
    """Quantized ReLU with a trained upper end alpha (PACT).

        y        = s clamp(round(x / s), 0, qmax),    s = alpha / qmax
        dx       = dy   where 0 <= x < alpha,   else 0
        d alpha  = sum dy over x >= alpha

    The masks are on x itself, as in the paper, and not on its rounded value, as in the other quantizers.

    An alpha that the optimizer drives to zero or below acts as the smallest with a positive scale; its
    gradient passes, so that it can return.

    Args:
        scheme: unsigned integers with one scale for the tensor, such as ``uint4``.
        alpha: where the end starts, finite and positive. The paper adds weight decay on alpha to the loss:
            give the optimizer ``alpha`` in a group with ``weight_decay``.
        dtype: of the tensors to be quantized; a scale of ``scale=input`` takes it.
        enabled: whether it quantizes; otherwise ``x`` is returned as it is.

    Raises:
        SchemeError: for another scheme.
        RangeError: for an alpha that is not positive and finite.

    Source: PACT, arXiv:1805.06085, section 3.

    Example:
        >>> quantizer = Pact("uint2", 6)
        >>> y = quantizer(torch.tensor([-1.0, 2.9, 7.0]))
        >>> y.sum().backward()
        >>> y.tolist(), quantizer.alpha.grad
        ([0.0, 2.0, 6.0], tensor(1.))
    """

    def __init__(
        self, scheme: str | Scheme, alpha: float, *, dtype: torch.dtype = torch.float32, enabled: bool = True
    ) -> None:
        parsed = Scheme.parse(scheme)
        _check_scheme(parsed)
        super().__init__(parsed, enabled=enabled)
        if not (math.isfinite(alpha) and alpha > 0):
            raise RangeError(f"alpha (={alpha}) must be positive and finite, the largest value that is kept")
        self.dtype = dtype
        self.alpha = torch.nn.Parameter(torch.tensor(float(alpha), dtype=wide_dtype(dtype)))

    @property
    def params(self) -> QuantizationParams:
        """The scale that the forward uses, for a tensor of any shape."""
        with torch.no_grad():
            stored = self._stored(self._end(), (1,))
        return QuantizationParams(scheme=self.scheme, shape=(1,), scales=(stored,), dtype=self.dtype)

    def _end(self) -> torch.Tensor:
        """Return alpha, floored so that its scale is normal."""
        return at_least(self.alpha, LEAST_NORMAL * self.quant_range()[1])

    def _stored(self, end: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        scale = on_grid(end / self.quant_range()[1], self.scheme.granularity, shape)
        return stored_params(settled(self.scheme, self.dtype), scale, None)[0]

    def simulate(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``dequantize(quantize(x, params))``, bit for bit, differentiable in x and alpha."""
        require_wide(x, self.scheme)
        end = self._end()
        stored = self._stored(end, tuple(x.shape))
        return clip_learned(x, end, stored, settled_text(self.scheme, self.dtype))


def _check_scheme(scheme: Scheme) -> None:
    element = scheme.element
    unsigned = element.is_integer and not element.signed and scheme.zero_point is ZeroPoint.NONE
    single = len(scheme.scales) == 1 and scheme.chained is None and scheme.granularity == Granularity.tensor()
    if not unsigned or not single or scheme.scales[0].rule.power_of_two:
        raise SchemeError(
            f"scheme (={scheme}) must be of unsigned integers with one linear scale a tensor, as uint4 is"
        )
