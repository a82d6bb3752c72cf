"""The small choices on which implementations of one format differ, under the names of those implementations.

A scheme names one dialect; operators read its fields and never its name.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from types import MappingProxyType

from ..errors import SchemeError, near_misses
from ..formats import RoundingMode


class Arithmetic(enum.Enum):
    """The precision of the intermediates."""

    WIDE = "wide"
    """float32, or float64 for float64 input: one rounding an operation."""
    INPUT = "input"
    """Each intermediate is rounded to the input's dtype, as eager torch does on bfloat16 tensors."""
    SUMS = "sums"
    """As wide; to round half up is ``trunc(u + (0.5 - smallest code))``, whose sum rounds, as in C."""


class Scaling(enum.Enum):
    """How an element is brought to the scale of its block."""

    DIVIDE = "divide"
    """``x / scale``, IEEE division."""
    RECIPROCAL = "reciprocal"
    """``x * (1 / scale)``: two roundings, as torch.fake_quantize computes it."""


class ZeroPointPlace(enum.Enum):
    """When the zero point is added."""

    AFTER_ROUNDING = "after_rounding"
    INSIDE_ROUNDING = "inside_rounding"


class TensorScale(enum.Enum):
    """How the coarsest of several scale levels is kept."""

    DIRECT = "direct"
    """As the factor it is; the scale of a block is ``scale_1 * scale_2``."""
    RECIPROCAL = "reciprocal"
    """As its reciprocal, ``max_2 / amax``; the scale of a block is ``scale_1 / scale_2``."""


LEAST_NORMAL = 2.0**-126


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One implementation's small choices; the defaults are zeropoint's own.

    Args:
        name: as text forms spell it.
        arithmetic: precision of intermediates.
        scaling: division, or multiplication by a reciprocal.
        zero_point_place: whether the zero point is added before or after rounding.
        zero_point_rounding: how ``qmin - minimum / scale`` becomes an integer.
        rounds_quotient: whether it is ``minimum / scale`` that is rounded so, before the difference.
        widen_to_zero: whether the range of an affine scheme is widened to contain 0.
        zero_scale: the linear scale of a block whose range is zero; None means the machine epsilon of the
            input's dtype. Where it is 0, so are scales too small for their format.
        formula_zero_point: whether the zero point of a block whose range is zero follows from the formula,
            which gives the smallest code; otherwise it is 0.
        minimum_scale: the smallest linear scale, where the scale's format reaches it; the least normal
            float32 keeps reciprocals finite and results independent of flush-to-zero modes.
        rounding: the rounding of elements when the scheme does not say.
        even_mantissa_bits: mantissa width to which the even scale rule rounds; None means that of the
            elements.
        tensor_scale: whether the coarsest of several levels is kept as itself or as its reciprocal.
        zero_block_scale: the finest of several levels where it would be zero; 0 keeps the zero.
        positive_zero_bits: float elements of at most this many bits write a negative zero as code 0.
    """

    name: str
    arithmetic: Arithmetic = Arithmetic.WIDE
    scaling: Scaling = Scaling.DIVIDE
    zero_point_place: ZeroPointPlace = ZeroPointPlace.AFTER_ROUNDING
    zero_point_rounding: RoundingMode = RoundingMode.HALF_EVEN
    rounds_quotient: bool = False
    widen_to_zero: bool = True
    zero_scale: float | None = 1.0
    formula_zero_point: bool = False
    minimum_scale: float = LEAST_NORMAL
    rounding: RoundingMode = RoundingMode.HALF_EVEN
    even_mantissa_bits: int | None = None
    tensor_scale: TensorScale = TensorScale.DIRECT
    zero_block_scale: float = 0.0
    positive_zero_bits: int = 0


ZEROPOINT = Dialect(name="zeropoint")
_EPSILON32 = 2.0**-23

_COMPRESSED_TENSORS = Dialect(
    name="compressed-tensors",
    arithmetic=Arithmetic.INPUT,
    zero_point_place=ZeroPointPlace.INSIDE_ROUNDING,
    zero_scale=None,
    minimum_scale=0.0,
    even_mantissa_bits=1,
    tensor_scale=TensorScale.RECIPROCAL,
    zero_block_scale=2.0**-3,
    positive_zero_bits=4,
)

_DIALECTS = (
    ZEROPOINT,
    # torch.fake_quantize_per_*_affine and torch.ao MinMaxObserver, torch 2.13.
    Dialect(
        name="torch",
        scaling=Scaling.RECIPROCAL,
        rounds_quotient=True,
        zero_scale=_EPSILON32,
        formula_zero_point=True,
        minimum_scale=_EPSILON32,
    ),
    # QuantizeLinear-25 and DynamicQuantizeLinear-11 as onnxruntime computes them: our formula in float32. To
    # float4 the zero point 0.0 is added, which makes a negative zero positive.
    Dialect(name="onnx", positive_zero_bits=4),
    # The same as their text has it, and ONNX's reference evaluator: the division is in the type of the scale.
    Dialect(name="onnx-reference", arithmetic=Arithmetic.INPUT, positive_zero_bits=4),
    # compressed-tensors 0.19 and 0.20 as model_free_ptq of llm-compressor 0.14 calls it. Its MX rule takes
    # the mantissa width of FP4 for every element; its FP4 cast takes the sign from torch.sign, 0 for zeros.
    _COMPRESSED_TENSORS,
    # As oneshot calls it: it adds a zero point of 0 before the cast to FP8 too, which makes -0.0 positive.
    replace(_COMPRESSED_TENSORS, name="compressed-tensors-oneshot", positive_zero_bits=8),
    # burn v0.16, QuantizationScheme::compute_q_params; f32::round rounds half away from zero.
    Dialect(
        name="burn",
        zero_point_place=ZeroPointPlace.INSIDE_ROUNDING,
        zero_point_rounding=RoundingMode.TOWARD_ZERO,
        zero_scale=0.1,
        formula_zero_point=True,
        minimum_scale=0.0,
        rounding=RoundingMode.HALF_AWAY,
    ),
    # quantize_row_q*_ref of ggml as gguf 0.19 computes them: ``(x - m) * (1 / d) + 0.5`` in float32, cut off.
    Dialect(
        name="ggml",
        arithmetic=Arithmetic.SUMS,
        scaling=Scaling.RECIPROCAL,
        zero_scale=0.0,
        minimum_scale=0.0,
        rounding=RoundingMode.HALF_UP,
    ),
)
DIALECTS: MappingProxyType[str, Dialect] = MappingProxyType({d.name: d for d in _DIALECTS})
"""Name to dialect."""


def get_dialect(name: str) -> Dialect:
    """Return the dialect called ``name``; raises SchemeError with the closest names.

    Args:
        name: of a dialect, such as ``"ggml"``.
    """
    if name not in DIALECTS:
        raise SchemeError(f"dialect {name!r} is unknown; {near_misses(name, DIALECTS)}")
    return DIALECTS[name]
