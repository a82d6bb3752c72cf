"""What kernels are told as one array of numbers comes out as it went in, field by field."""

from __future__ import annotations

from typing import Any, NamedTuple, get_type_hints

import numpy as np
import pytest

from zeropoint.kernels.cpu import layout as k
from zeropoint.kernels.cpu.entries import matrix_in
from zeropoint.kernels.cpu.linear import Matrix


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


LAYOUT, ELEMENT, RULE = distinct(k.Layout, 1), distinct(k.Element, 20), distinct(k.ScaleRule, 60)


@pytest.mark.parametrize(
    ("unpack", "given"), [(k.layout_in, LAYOUT), (k.element_in, ELEMENT), (k.rule_in, RULE)]
)
def test_every_field_comes_back_in_its_type(unpack: Any, given: Any) -> None:
    assert_same(unpack.py_func(k.tell(LAYOUT, ELEMENT, RULE)), given)


def test_a_coarse_scale_changes_itself_alone() -> None:
    told = k.tell(LAYOUT, ELEMENT, RULE)
    changed = k.with_coarse(told, 0.5)
    assert_same(k.rule_in.py_func(changed), RULE._replace(coarse=np.float32(0.5)))
    assert_same(k.element_in.py_func(changed), ELEMENT)
    assert_same(k.rule_in.py_func(told), RULE)


def test_every_number_of_a_matrix_comes_back_in_its_type() -> None:
    given = distinct(Matrix, 1)
    assert_same(matrix_in.py_func(np.array(given, np.float64)), given)
