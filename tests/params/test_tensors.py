"""The one list of tensors in which operators take parameters."""

import pytest
import torch

import zeropoint as zp
from zeropoint.errors import ShapeError
from zeropoint.params.tensors import (
    granularities,
    parameter_names,
    parameter_tensors,
    require_parameters,
    zero_point_of,
)
from zeropoint.schemes import Scheme

SCHEMES = (
    "int8:channel",
    "uint4:g32:asym",
    "uint4:g32:asym=real",
    "nvfp4",
    "nf4_double",
    "table3:g32:scale=float16",
    "table4:channel:scale=e4m3",
    "q4_k",
    "uint32:tensor:asym",
)


def stored(text: str) -> zp.QuantizedTensor:
    """Return a tensor under the scheme."""
    return zp.quantize(torch.randn(4, 256, generator=torch.Generator().manual_seed(0)), text)


@pytest.mark.parametrize("text", SCHEMES)
def test_the_list_of_parameters_has_the_names_shapes_and_dtypes_that_the_scheme_says(text: str) -> None:
    q = stored(text)
    listed = parameter_tensors(q.scheme, q.shape, q.dtype)
    assert [(tuple(each.shape), each.dtype) for each in q.params.stored] == list(listed)
    rank = len(q.shape)
    assert [blocks.grid(q.shape) for blocks in granularities(q.scheme)] == [grid[:rank] for grid, _ in listed]
    assert list(q.params.tensors()) == list(parameter_names(q.scheme))
    assert zero_point_of(q.scheme, q.params.stored) is q.zero_point
    assert zp.QuantizationParams.of(q.scheme, q.shape, q.dtype, q.params.stored) == q.params


@pytest.mark.parametrize("text", SCHEMES)
def test_a_list_that_is_too_short_or_too_long_is_an_error(text: str) -> None:
    q = stored(text)
    require_parameters(q.scheme, q.params.stored, q.shape)
    for wrong in (q.params.stored[:-1], (*q.params.stored, torch.ones(1))):
        with pytest.raises(ShapeError, match=r"scales and zero points .* must hold"):
            require_parameters(q.scheme, wrong, q.shape)


def test_no_operator_names_a_kind_of_parameter_so_that_another_changes_no_schema() -> None:
    for name in (
        "quantize",
        "dequantize",
        "fake_quantize",
        "fake_quantize_backward",
        "linear",
        "linear_values",
    ):
        schema = str(getattr(torch.ops.zeropoint, name).default._schema)
        assert "params" in schema
        assert not any(kind in schema for kind in ("scales", "zero_point", "offset")), schema
    assert Scheme.parse("q4_k").level_names == parameter_names(Scheme.parse("q4_k"))
