"""Dialects: numerical details in which implementations of a format differ.

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


class ZeroPointFormula(enum.Enum):
    """Formula of an integer zero point from a block's minimum and scale."""

    NEAREST = "nearest"
    """``round(qmin - minimum / scale)``"""
    TRUNCATED = "truncated"
    """``trunc(qmin - minimum / scale)``"""
    OF_ROUNDED = "of_rounded"
    """``qmin - round(minimum / scale)``"""


@dataclass(frozen=True, kw_only=True)
class ZeroPoints:
    """Formula and placement of integer zero points.

    formula: from the smallest number of a block.
    of_empty_range: whether the formula also applies to a block whose range is zero, where it gives the
        smallest code; otherwise its zero point is 0.
    place: whether it is added before or after rounding.
    """

    formula: ZeroPointFormula = ZeroPointFormula.NEAREST
    of_empty_range: bool = False
    place: ZeroPointPlace = ZeroPointPlace.AFTER_ROUNDING


@dataclass(frozen=True, kw_only=True)
class SmallScales:
    """Linear scales of blocks that hold zeros or tiny numbers.

    of_zeros: the scale of a block whose range is zero; None means the machine epsilon of the input's dtype.
        Where it is 0, scales too small for their format are 0, too.
    least: the smallest scale, where its format reaches it; the least normal float32 keeps reciprocals finite
        and results independent of flush-to-zero modes.
    finest: replaces a zero scale of the finest of several levels; 0 keeps the zero.
    finest_of_zeros: the same for a scale that was zero before it was rounded, as in a block of zeros; None
        means ``finest``.
    """

    of_zeros: float | None = 1.0
    least: float = 2.0**-126
    finest: float = 0.0
    finest_of_zeros: float | None = None


class FinestQuotient(enum.Enum):
    """Order of operations for the finest of several linear scales."""

    OF_IDEAL = "of_ideal"
    """``(amax / divisor) / scale_2``, or times its reciprocal where that is kept."""
    BY_PRODUCT = "by_product"
    """``amax / (divisor * scale_2)``, of scales that are kept as factors."""


class TensorScale(enum.Enum):
    """How the coarsest of several scale levels is kept."""

    DIRECT = "direct"
    """As the factor it is; the scale of a block is ``scale_1 * scale_2``."""
    RECIPROCAL = "reciprocal"
    """As its reciprocal, ``max_2 / amax``; the scale of a block is ``scale_1 / scale_2``."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One implementation's numerical details; the defaults are zeropoint's own.

    Args:
        name: as text forms spell it.
        arithmetic: precision of intermediates.
        scaling: division, or multiplication by a reciprocal.
        zero_points: formula and placement of integer zero points.
        small_scales: linear scales of blocks that hold zeros or tiny numbers.
        rounding: the rounding of elements when the scheme does not say.
        even_mantissa_bits: mantissa width to which the even scale rule rounds; None means the elements'
            width.
        even_own_bits: width of float elements that take their own mantissa width there all the same.
        tensor_scale: whether the coarsest of several levels is kept as itself or as its reciprocal.
        finest_quotient: order of operations for the finest of several linear scales.
        positive_zero_bits: float elements of at most this many bits write a negative zero as code 0.
        table_steps: scales that are stored as codes of a table are rounded to so many steps from -1 to 1
            first; 0 means that they are not.
    """

    name: str
    arithmetic: Arithmetic = Arithmetic.WIDE
    scaling: Scaling = Scaling.DIVIDE
    zero_points: ZeroPoints = ZeroPoints()
    small_scales: SmallScales = SmallScales()
    rounding: RoundingMode = RoundingMode.HALF_EVEN
    even_mantissa_bits: int | None = None
    even_own_bits: int = 0
    tensor_scale: TensorScale = TensorScale.DIRECT
    finest_quotient: FinestQuotient = FinestQuotient.OF_IDEAL
    positive_zero_bits: int = 0
    table_steps: int = 0


ZEROPOINT = Dialect(name="zeropoint")
_EPSILON32 = 2.0**-23

_COMPRESSED_TENSORS = Dialect(
    name="compressed-tensors",
    arithmetic=Arithmetic.INPUT,
    zero_points=ZeroPoints(place=ZeroPointPlace.INSIDE_ROUNDING),
    small_scales=SmallScales(of_zeros=None, least=0.0, finest=2.0**-3),
    even_mantissa_bits=1,
    even_own_bits=6,
    tensor_scale=TensorScale.RECIPROCAL,
    positive_zero_bits=4,
)

# torch.fake_quantize_per_*_affine and torch.ao MinMaxObserver, torch 2.13.
_TORCH = Dialect(
    name="torch",
    scaling=Scaling.RECIPROCAL,
    zero_points=ZeroPoints(formula=ZeroPointFormula.OF_ROUNDED, of_empty_range=True),
    small_scales=SmallScales(of_zeros=_EPSILON32, least=_EPSILON32),
)

_DIALECTS = (
    ZEROPOINT,
    _TORCH,
    # AMD Quark 0.13 on float32: UniformScalingObserver, and real_quantize_int, which adds zero points before
    # it rounds; its fake_quantize is torch's.
    replace(
        _TORCH, name="quark", zero_points=replace(_TORCH.zero_points, place=ZeroPointPlace.INSIDE_ROUNDING)
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
    # NVFP4QTensor and MXFP8QTensor of nvidia-modelopt 0.47. FP4 has the sign bit of ``x < 0``, which -0.0
    # does not have.
    Dialect(
        name="modelopt",
        small_scales=SmallScales(finest=2.0**-9, finest_of_zeros=1.0),
        finest_quotient=FinestQuotient.BY_PRODUCT,
        positive_zero_bits=4,
    ),
    # mx.quantize of MLX 0.32, for rule edge of scales.
    Dialect(name="mlx", small_scales=SmallScales(of_zeros=1e-7, least=1e-7)),
    # downcast_to_mxfp_torch of triton_kernels, by which transformers quantizes gpt-oss: ties away from zero.
    Dialect(name="gpt-oss", rounding=RoundingMode.HALF_AWAY),
    # quantize_4bit of bitsandbytes 0.50 on a CPU, and quantize_blockwise of absmax, which looks codes up in a
    # table of 2 ** 16 numbers.
    Dialect(name="bitsandbytes", scaling=Scaling.RECIPROCAL, table_steps=(1 << 16) - 1),
    # quantize_affine of torchao 0.18, as its classes of integers call it.
    Dialect(
        name="torchao",
        arithmetic=Arithmetic.INPUT,
        scaling=Scaling.RECIPROCAL,
        zero_points=ZeroPoints(formula=ZeroPointFormula.OF_ROUNDED, of_empty_range=True),
    ),
    # burn v0.16, QuantizationScheme::compute_q_params; f32::round rounds half away from zero.
    Dialect(
        name="burn",
        zero_points=ZeroPoints(
            formula=ZeroPointFormula.TRUNCATED, of_empty_range=True, place=ZeroPointPlace.INSIDE_ROUNDING
        ),
        small_scales=SmallScales(of_zeros=0.1, least=0.0),
        rounding=RoundingMode.HALF_AWAY,
    ),
    # quantize_row_q*_ref of ggml as gguf 0.19 computes them: ``(x - m) * (1 / d) + 0.5`` in float32, cut off.
    Dialect(
        name="ggml",
        arithmetic=Arithmetic.SUMS,
        scaling=Scaling.RECIPROCAL,
        small_scales=SmallScales(of_zeros=0.0, least=0.0),
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
