"""Constants that kernels of every backend compute with, against numbers worked out by hand."""

import torch

from zeropoint.layout.blocks import row_mapping
from zeropoint.ops.lowering import (
    How,
    Kind,
    Narrow,
    Offset,
    ScaleBy,
    ZeroPlace,
    element_of,
    rule_of,
)
from zeropoint.schemes import Scheme


def test_an_integer_has_its_ends_and_its_sign() -> None:
    found = element_of(Scheme.parse("int8:channel:narrow"), torch.float32, multiply=False)
    assert (found.kind, found.low, found.high, found.sign) == (Kind.INTEGER, -127, 127, 128)
    assert (found.zero_place, found.scaling) == (ZeroPlace.NONE, ScaleBy.DIVIDE)
    assert (
        element_of(Scheme.parse("uint8:token:asym"), torch.float32, multiply=False).zero_place
        is ZeroPlace.AFTER
    )


def test_a_float_has_its_exponents_and_its_largest_value() -> None:
    found = element_of(Scheme.parse("float4_e2m1fn:g32"), torch.float32, multiply=False)
    assert (found.kind, found.mantissa, found.emin, found.maximum) == (Kind.FLOAT, 1, 127, float(3 + 3))
    assert (found.sign_shift, found.magnitude, found.max_code) == (28, 7, 7)


def test_a_power_of_two_comes_from_one_addition_to_the_bits() -> None:
    floor = rule_of(Scheme.parse("mxfp4:scale=floor"), torch.float32)
    ceil = rule_of(Scheme.parse("mxfp4:scale=ceil"), torch.float32)
    assert (floor.how, floor.emax, floor.addend) == (How.POWER, 2, 0)
    assert ceil.addend == (1 << 23) - 1


def test_a_range_gives_a_scale_and_a_zero_point() -> None:
    found = rule_of(Scheme.parse("uint8:tensor:asym"), torch.bfloat16)
    assert (found.how, found.low, found.high, found.offset) == (How.AFFINE, 0, 255, Offset.NEAREST)
    assert (found.divisor, found.stored, found.widen) == (255.0, Narrow.NONE, True)


def test_rows_find_the_row_of_their_parameters() -> None:
    assert row_mapping((6,), (1,), (6,)) == (1, 6)
    assert row_mapping((6,), (6,), (1,)) == (6, 1)
    assert row_mapping((4, 5), (1, 5), (4, 1)) == (5, 4)
    assert row_mapping((4, 5), (4, 1), (1, 5)) == (1, 5)
    assert row_mapping((4, 6), (3, 2), (2, 3)) is None
