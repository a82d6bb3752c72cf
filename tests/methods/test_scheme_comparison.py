"""Schemes on one tensor: the table has what each tensor says of itself."""

import json
import math

import pytest
import torch

import zeropoint as zp

SCHEMES = ("int4:g128", "mxfp4", "nvfp4", "nf4", "int8:channel")


def weight() -> torch.Tensor:
    return torch.randn(16, 256, generator=torch.Generator().manual_seed(0))


def test_each_row_is_what_the_tensor_of_the_scheme_says() -> None:
    x = weight()
    found = zp.compare(x, SCHEMES)
    assert [each.name for each in found.schemes] == list(SCHEMES)
    for each in found.schemes:
        q = zp.quantize(x, each.name)
        assert (each.bits, each.error) == (q.bits_per_value, q.error(x))
        assert each.bound == float(q.error_bound(x).max())
        assert 0 < each.error.largest <= each.bound
        assert each.scheme == str(q.scheme)


def test_clipped_values_are_counted() -> None:
    x = weight()
    by_range, searched = zp.compare(x, "int3:channel"), zp.compare(x, "int3:channel", method="mse")
    assert by_range.schemes[0].clipped == 0
    assert 0 < searched.schemes[0].clipped < 0.1
    assert searched.schemes[0].error.relative < by_range.schemes[0].error.relative


def test_the_table_is_aligned_and_its_document_is_json() -> None:
    exact = zp.compare(torch.zeros(2, 32), [zp.Scheme.parse("int8:channel"), "int4:g32"])
    heads, *rows = repr(exact).splitlines()
    assert heads.split("  ")[0] == "scheme"
    assert {len(row) for row in (heads, *rows)} == {len(heads)}
    assert rows[0].split()[3] == "exact"
    found = json.loads(exact.to_json())
    assert found["shape"] == [2, 32]
    assert found["schemes"][0]["sqnr_db"] is None
    assert math.isinf(exact.schemes[0].error.sqnr_db)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(zp.OptionError, match="must name at least one scheme"):
        zp.compare(weight(), [])
    with pytest.raises(zp.SchemeError):
        zp.compare(weight(), ["int4:g128", "int4:gx"])
    with pytest.raises(zp.NonFiniteError):
        zp.compare(torch.tensor([[math.nan]]), ["int8:channel"])
