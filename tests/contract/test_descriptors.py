"""What kernels take as records comes out as it went in, field by field."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import pytest
import torch

from zeropoint.kernels.cpu.entries import MATRIX, unpack_matrix
from zeropoint.kernels.cpu.linear.from_codes import Matrix
from zeropoint.kernels.cpu.machine import descriptor as k
from zeropoint.ops import lowering
from zeropoint.schemes import Scheme


def distinct(kind: type[NamedTuple], first: int) -> Any:
    """Return an instance whose fields are different numbers, in the types that it names."""
    made: dict[str, Any] = {}
    for number, (name, hint) in enumerate(get_type_hints(kind).items(), first):
        if name == "thresholds":
            made[name] = tuple(np.float32(200 + n) for n in range(k.THRESHOLDS))
        else:
            made[name] = hint(number)
    return kind(**made)


def assert_same(found: Any, given: Any) -> None:
    assert type(found) is type(given)
    for name, a, b in zip(given._fields, found, given, strict=True):
        assert (a, type(a)) == (b, type(b)), name


LAYOUT, ELEMENT, RULE = distinct(k.RowLayout, 1), distinct(k.Element, 20), distinct(k.LoweredRule, 60)


@pytest.mark.parametrize(
    ("unpack", "given"), [(k.unpack_layout, LAYOUT), (k.unpack_element, ELEMENT), (k.unpack_rule, RULE)]
)
def test_every_field_comes_back_in_its_type(unpack: Any, given: Any) -> None:
    assert_same(unpack.py_func(k.pack(LAYOUT, ELEMENT, RULE)), given)


def test_a_coarse_scale_changes_itself_alone() -> None:
    descriptor = k.pack(LAYOUT, ELEMENT, RULE)
    changed = k.with_coarse(descriptor, 0.5)
    assert_same(k.unpack_rule.py_func(changed), RULE._replace(coarse=np.float32(0.5)))
    assert_same(k.unpack_element.py_func(changed), ELEMENT)
    assert_same(k.unpack_rule.py_func(descriptor), RULE)


def test_records_have_the_fields_of_the_constants_that_all_backends_share() -> None:
    assert k.Element._fields == lowering.Element._fields
    assert k.LoweredRule._fields == lowering.LoweredRule._fields


def test_constants_of_a_scheme_come_back_as_they_went_in() -> None:
    scheme = Scheme.parse("nf4:g32")
    element = lowering.element_of(scheme, torch.float32, multiply=False)
    found = k.unpack_element.py_func(k.pack(LAYOUT, element, lowering.GIVEN))
    count = len(element.thresholds)
    assert count == 15
    assert found.thresholds == tuple(np.float32(t) for t in element.thresholds)
    ternary = lowering.element_of(Scheme.parse("ternary:token"), torch.float32, multiply=False)
    padded = k.unpack_element.py_func(k.pack(LAYOUT, ternary, lowering.GIVEN)).thresholds
    assert len(ternary.thresholds) == 2
    assert padded[2:] == (math.inf,) * 13


def test_a_layout_alone_is_enough_for_kernels_that_need_no_more() -> None:
    assert_same(k.unpack_layout.py_func(k.pack(LAYOUT)), LAYOUT)


def test_every_number_of_a_matrix_comes_back_in_its_type() -> None:
    given = distinct(Matrix, 1)
    assert_same(unpack_matrix.py_func(k.packed(MATRIX, given)), given)
