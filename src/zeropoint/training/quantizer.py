"""The quantizer base: scheme, switch, ranges, noise and strict state.

This module knows nothing of how parameters are learned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..errors import DtypeError, SchemeError, ShapeError
from ..formats import RoundingMode
from ..formats.torch_dtypes import wide_dtype
from ..functional import fake_quantize
from ..params import QuantizationParams
from ..params.module_buffers import (
    check_dtypes,
    described,
    keeping_dtypes,
    refusal_of_state,
    scheme_described,
)
from ..params.tracing import scheme_text
from ..schemes import Scheme, ZeroPoint


class Quantizer(torch.nn.Module, ABC):
    """A module that quantizes and dequantizes a tensor, bit-exactly.

    Scales, zero points and learned parameters keep their dtype whatever ``module.half()`` or
    ``module.to(dtype)`` asks, so that a model in bfloat16 has the parameters it was given. ``state_dict``
    holds the scheme together with the tensors, and loading refuses another one.

    Of methods, ``x`` is a float tensor of any shape.

    Args:
        scheme: how tensors are quantized.
        enabled: whether it does anything; a quantizer that is not enabled returns its input.
    """

    def __init__(self, scheme: Scheme, *, enabled: bool = True) -> None:
        super().__init__()
        self.scheme = scheme
        self.enabled = enabled

    @property
    def text(self) -> str:
        """Text form of the scheme, the spelling that operators take."""
        return scheme_text(self.scheme)

    @property
    @abstractmethod
    def params(self) -> QuantizationParams:
        """The forward pass's current parameters, which give the deployed codes."""

    @abstractmethod
    def simulate(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``dequantize(quantize(x, params))``, bit for bit, differentiable."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.scheme.bits

    @property
    def symmetric(self) -> bool:
        """Whether there is no zero point."""
        return self.scheme.zero_point is ZeroPoint.NONE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` fake-quantized, or itself when empty or disabled.

        Raises:
            DtypeError: for anything but a tensor.
        """
        if not isinstance(x, torch.Tensor):
            raise DtypeError(f"x (a {type(x).__name__}) must be a torch.Tensor; pass torch.as_tensor(x)")
        return self.simulate(x) if self.enabled and x.numel() > 0 else x

    def backward(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the gradient for ``x`` from the result's, as autograd does.

        ``grad`` where the rounded ``x`` lies within the codes, ends included, else 0; all of ``grad`` when
        not enabled.

        Args:
            grad: the gradient of the output.
            x: what the forward pass was given.

        Raises:
            ShapeError: when the two differ in shape.
        """
        if grad.shape != x.shape:
            raise ShapeError(
                f"grad (shape {tuple(grad.shape)}) must have the shape of x, {tuple(x.shape)}; "
                "pass the gradient of the result"
            )
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(self(leaf), leaf, grad)
        return gradient

    def quant_range(self) -> tuple[float, float]:
        """Return the smallest and largest unscaled number of the codes.

        For integer formats without fraction bits these are the smallest and largest code in use, integers.
        """
        if self.scheme.element.is_whole:
            return self.scheme.qmin, self.scheme.qmax
        return self.scheme.ends

    def float_range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each finest block's smallest and largest value.

        ``(q - zero_point) * scale``, shaped like the grid of blocks, in the wide dtype; values outside are
        clipped.
        """
        return self.range_of(self.params)

    def range_of(self, params: QuantizationParams) -> tuple[torch.Tensor, torch.Tensor]:
        """Return :meth:`float_range` under other parameters of the same scheme.

        Args:
            params: parameters of the same scheme and grid.
        """
        wide = wide_dtype(params.dtype)
        scale = params.effective_scale()
        factor = torch.ones((), dtype=wide) if scale is None else scale
        zero = torch.zeros_like(factor, dtype=torch.float64)
        if params.zero_point is not None:
            zero = params.zero_point.double() * float(self.scheme.element_step)
        if self.scheme.chained is not None:
            ends = params.representable()
            return ends[0].to(wide), ends[1].to(wide)
        low, high = self.quant_range()
        return (low - zero).to(wide) * factor, (high - zero).to(wide) * factor

    def quantization_noise(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error of quantizing ``x``, a float64 scalar.

        It is computed whether the quantizer is enabled or not. An empty tensor has 0.
        """
        if x.numel() == 0:
            return torch.zeros((), dtype=torch.float64, device=x.device)
        with torch.no_grad():
            return (fake_quantize(x, self.params).double() - x.double()).square().mean()

    def reseed(self, seed: int) -> None:
        """Reseed stochastic rounding, as each training step needs.

        Args:
            seed: of the random numbers.

        Raises:
            SchemeError: when the scheme does not round stochastically, or for a seed outside 0..2**31-1.
        """
        if self.scheme.rounding.mode is not RoundingMode.STOCHASTIC:
            raise SchemeError(f"seed (={seed}) needs a scheme that rounds stochastically, got {self.scheme}")
        self.scheme = replace(self.scheme, rounding=replace(self.scheme.rounding, seed=seed))

    def extra_repr(self) -> str:
        """Return the module's printed form."""
        return str(self.scheme) + ("" if self.enabled else ", not enabled")

    def get_extra_state(self) -> torch.Tensor:
        """Return the scheme's text as a uint8 tensor, for files of tensors."""
        return described(self.scheme)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Take the seed of stochastic rounding from a checked state.

        Args:
            state: as :meth:`get_extra_state` gives it.
        """
        self.scheme = scheme_described(state)

    def check_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise a ZeropointError when ``tensors`` cannot be loaded.

        Here: when a dtype differs, which loading would silently cast.

        Args:
            tensors: the buffers and parameters, by their names in this module.
        """
        check_dtypes(self, tensors)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        refusal = refusal_of_state(state_dict, prefix, self.scheme, self.check_state)
        if refusal is not None:
            rest[-1].append(f"quantizer {refusal}")
            return
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Quantizer:
        super()._apply(keeping_dtypes(fn), recurse)  # type: ignore[no-untyped-call]
        return self
