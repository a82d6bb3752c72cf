"""What kernels take as records comes out as it went in, field by field."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import pytest
import torch

from zeropoint.kernels.cpu.decode.lookup_rows import LookupRows
from zeropoint.kernels.cpu.encode.power_levels import Powers
from zeropoint.kernels.cpu.feedback.rows import GridRounding
from zeropoint.kernels.cpu.least_error.minima import MinimaKind
from zeropoint.kernels.cpu.least_error.tried_scales import ScaleTries
from zeropoint.kernels.cpu.linear.chunks import Matrix
from zeropoint.kernels.cpu.machine import descriptor as k
from zeropoint.kernels.cpu.machine.bit_moves import BitMove
from zeropoint.kernels.cpu.machine.named_records import pack, reader, record_type
from zeropoint.ops import lowering
from zeropoint.schemes import Scheme

RECORDS = [
    k.Descriptor,
    lowering.Chain,
    lowering.Level,
    Matrix,
    LookupRows,
    BitMove,
    MinimaKind,
    Powers,
    GridRounding,
    ScaleTries,
]


def distinct(kind: Any, numbers: Any) -> Any:
    """Return an instance whose numbers are different, in its machine types, and its arrays too."""
    made: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        if hasattr(hint, "_fields"):
            made[name] = distinct(hint, numbers)
        elif hint is Any:
            made[name] = np.arange(next(numbers))
        elif name == "thresholds":
            made[name] = tuple(np.float32(next(numbers)) for _ in range(k.THRESHOLDS))
        else:
            made[name] = record_type(kind)[name].type(next(numbers))
    return kind(**made)


def assert_same(found: Any, given: Any) -> None:
    assert type(found) is type(given)
    for name, a, b in zip(given._fields, found, given, strict=True):
        if hasattr(b, "_fields"):
            assert_same(a, b)
        elif isinstance(b, np.ndarray):
            assert a is b, name
        else:
            assert (a, type(a)) == (b, type(b)), name


@pytest.mark.parametrize("kind", RECORDS)
def test_every_field_comes_back_in_its_type(kind: Any) -> None:
    given = distinct(kind, iter(range(1, 200)))
    arrays = {name: array for name, array in given._asdict().items() if isinstance(array, np.ndarray)}
    assert_same(reader(kind)(pack(given), **arrays), given)


def test_each_of_several_records_comes_back_by_its_number() -> None:
    one, two = distinct(BitMove, iter(range(1, 9))), distinct(BitMove, iter(range(11, 19)))
    packed = pack(one, two)
    assert_same(reader(BitMove)(packed, 1), two)
    assert_same(reader(BitMove)(packed), one)


class Swapped(NamedTuple):
    """A record."""

    low: np.float32
    high: np.uint64


def test_numbers_of_a_record_go_by_their_names() -> None:
    assert reader(Swapped)(pack(Swapped(high=np.uint64(3), low=np.float32(0.5)))) == (0.5, 3)
    assert record_type(Swapped).fields is not None
    assert record_type(Swapped)["high"] == np.uint64


GIVEN = distinct(k.Descriptor, iter(range(1, 200)))


def test_a_coarse_scale_changes_itself_alone() -> None:
    descriptor = pack(GIVEN)
    changed = k.with_coarse(descriptor, 0.5)
    rule = GIVEN.rule._replace(coarse=np.float32(0.5))
    assert_same(k.unpack.py_func(changed), GIVEN._replace(rule=rule))
    assert_same(k.unpack.py_func(descriptor), GIVEN)


def test_constants_of_a_scheme_come_back_as_they_went_in() -> None:
    element = lowering.element_of(Scheme.parse("nf4:g32"), torch.float32, multiply=False)
    found = k.unpack.py_func(pack(k.Descriptor(GIVEN.layout, element))).element
    assert len(element.thresholds) == 15
    assert found.thresholds == tuple(np.float32(t) for t in element.thresholds)
    ternary = lowering.element_of(Scheme.parse("ternary:token"), torch.float32, multiply=False)
    padded = k.unpack.py_func(pack(k.Descriptor(GIVEN.layout, ternary))).element.thresholds
    assert padded[2:] == (math.inf,) * 13
    assert padded[1] < math.inf


def test_a_layout_alone_is_enough_for_kernels_that_need_no_more() -> None:
    assert_same(k.unpack.py_func(pack(k.Descriptor(GIVEN.layout))).layout, GIVEN.layout)
