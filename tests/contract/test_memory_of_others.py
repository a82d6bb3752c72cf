"""Memory that a caller hands to the kernels: what does not fit is refused before it is read or written.

Kernels take bare addresses. Each of these calls read or wrote past the end of a tensor, or wrote codes in the
wrong places, when nobody looked.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import zeropoint as zp
from zeropoint import QuantizedTensor, ShapeError
from zeropoint.ops.library import dequantize as dequantize_operator
from zeropoint.ops.library import fake_quantize as fake_quantize_operator
from zeropoint.ops.library import fake_quantize_backward as backward_operator
from zeropoint.ops.library import quantize as quantize_operator

X = torch.randn(8, 128, generator=torch.Generator().manual_seed(3))
# One of each way to keep scales: float32, rounded, bytes, two levels, with zero points, one for all.
SCHEMES = [
    "int8:channel",
    "int4:g32:scale=float16",
    "mxfp4",
    "nvfp4",
    "int4:g32:asym",
    "float8_e4m3fn:tensor",
]

Change = Callable[[torch.Tensor], torch.Tensor]


def strided(x: torch.Tensor) -> torch.Tensor:
    """Return the same numbers, each in the place of two."""
    return torch.stack([x.view(torch.uint8).reshape(*x.shape, -1)] * 2, -2).view(x.dtype)[..., 0, 0]


def short(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1)[:-1].clone()


def with_params(q: QuantizedTensor, **tensors: object) -> QuantizedTensor:
    """Return ``q`` with parameters that a constructor would refuse."""
    params = object.__new__(type(q.params))
    for name in q.params.__dataclass_fields__:
        object.__setattr__(params, name, tensors.get(name, getattr(q.params, name)))
    return replace(q, params=params)


def kernels_run(q: QuantizedTensor) -> None:
    with zp.only_backend("cpu"):
        zp.dequantize(q)
        zp.quantize(X, q.scheme, out=q)


@pytest.mark.crossed
@pytest.mark.parametrize("change", [strided, short])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_are_written_only_where_all_of_them_belong(scheme: str, change: Change) -> None:
    q = zp.quantize(X, scheme)
    kernels_run(q)
    held = change(q.data).fill_(7)
    target = replace(q, data=held)
    with pytest.raises(ShapeError, match="contiguous"):
        zp.quantize(X, scheme, out=target)
    with pytest.raises(ShapeError, match="contiguous"):
        zp.quantize(X, q.params, out=target)
    assert torch.all(held == 7)


@pytest.mark.crossed
@pytest.mark.parametrize("change", [strided, short])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_scales_are_written_only_where_all_of_them_belong(scheme: str, change: Change) -> None:
    q = zp.quantize(X, scheme)
    if change is strided and q.scales[0].numel() == 1:
        change = short  # one number lies contiguous at any stride
    fine = change(q.scales[0])
    target = with_params(q, scales=(fine, *q.scales[1:]))
    before = fine.clone()
    with pytest.raises(ShapeError, match="contiguous"):
        zp.quantize(X, scheme, out=target)
    assert torch.equal(fine.float(), before.float())


@pytest.mark.parametrize("change", [strided, short])
def test_zero_points_are_written_only_where_all_of_them_belong(change: Change) -> None:
    q = zp.quantize(X, "int4:g32:asym")
    assert q.zero_point is not None
    points = change(q.zero_point)
    before = points.clone()
    with pytest.raises(ShapeError, match="contiguous"):
        zp.quantize(X, q.scheme, out=with_params(q, zero_point=points))
    assert torch.equal(points, before)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_are_read_only_as_far_as_they_go(scheme: str) -> None:
    q = zp.quantize(X, scheme)
    with pytest.raises(ShapeError, match="data"):
        zp.dequantize(replace(q, data=short(q.data)))
    assert torch.equal(zp.dequantize(replace(q, data=strided(q.data))), zp.dequantize(q))


@pytest.mark.crossed
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("part", ["scales", "zero_point"])
def test_parameters_are_read_only_as_far_as_they_go(scheme: str, part: str) -> None:
    """Through the operators, which take bare tensors and know no grid."""
    q = zp.quantize(X, scheme)
    given, text = list(q.params.stored), str(q.scheme)
    if part == "scales":
        given[0] = short(given[0])
    elif q.zero_point is not None:
        given[-1] = short(given[-1])
    else:
        given.append(torch.zeros(1, dtype=torch.int32))  # one that the scheme does not have
    calls: list[Callable[[], object]] = [
        lambda: quantize_operator(X, given, text),
        lambda: dequantize_operator(q.data, given, text, list(q.shape), X.dtype, X.dtype),
        lambda: fake_quantize_operator(X, given, text),
        lambda: torch.ops.zeropoint.dequantize(q.data, given, text, list(q.shape), X.dtype, X.dtype),
    ]
    for call in calls:
        with pytest.raises(ShapeError, match="scales and zero points"):
            call()


@pytest.mark.parametrize("shape", [(8, 127), (7, 128), (1024,), ()])
def test_a_gradient_is_read_only_where_it_has_a_number_for_each(shape: tuple[int, ...]) -> None:
    q = zp.quantize(X, "int8:channel:narrow")
    arguments = X, list(q.scales), str(q.scheme)
    assert torch.equal(backward_operator(torch.ones_like(X), *arguments), torch.ones_like(X))
    with pytest.raises(ShapeError, match=r"^grad"):
        backward_operator(torch.ones(shape), *arguments)
