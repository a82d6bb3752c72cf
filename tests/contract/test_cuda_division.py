"""The reference on a host whose torch divides as it does on a GPU: by numbers, with a rounded reciprocal."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.contract.test_backends import SCHEMES, sample_for
from tests.tensors import same_bytes
from torch.utils._python_dispatch import TorchDispatchMode

import zeropoint as zp
from zeropoint.formats.division import divided, over
from zeropoint.ops.library import request
from zeropoint.ops.registry import Op, kernel_of
from zeropoint.schemes import Scheme

SEARCHED = (
    "int4:g32:scale=search", "int3:g64:scale=search", "uint4:g32:asym:scale=search", "nvfp4:scale=search",
    "mxfp4:scale=search", "nf4:g64:scale=search", "int4:g32:scale=signed",
)  # fmt: skip


class CudaDivision(TorchDispatchMode):
    """Divide by Python numbers as ``div_true_kernel_cuda`` does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.div.Tensor and not isinstance(args[1], torch.Tensor):
            x, number = args
            wide = torch.float64 if x.dtype is torch.float64 else torch.float32
            return (x.to(wide) * torch.full((), number, dtype=wide).reciprocal()).to(x.dtype)
        return func(*args, **(kwargs or {}))


def results(x: torch.Tensor, scheme: Scheme) -> Iterator[torch.Tensor]:
    """Yield all that the reference makes of ``x``, without the dispatcher, which would hide what it runs."""

    def run(op: Op, *arguments: Any) -> Any:
        return kernel_of(request(op, x, scheme), "reference").run(*arguments)

    data, params = run(Op.QUANTIZE_DYNAMIC, x)
    yield from (data, *params, run(Op.QUANTIZE, x, params), run(Op.DEQUANTIZE, data, params))
    yield from (run(Op.FAKE_QUANTIZE, x, params), run(Op.FAKE_QUANTIZE_BACKWARD, x, x * 1.5, params))


def test_division_on_cuda_is_imitated() -> None:
    x = torch.arange(1, 1000, dtype=torch.float32)
    with CudaDivision():
        found, whole = x / 127.5, x / torch.full((), 127.5)
    assert not torch.equal(found, x / 127.5)
    assert torch.equal(whole, x / 127.5)


def test_numbers_past_the_largest_of_a_dtype_divide_as_infinity() -> None:
    x = torch.tensor([1.0, -2.0])
    assert divided(x, 1e300).tolist() == [0.0, -0.0]
    assert over(-1e300, x).tolist() == [-math.inf, math.inf]
    assert divided(x.double(), 1e300).tolist() == [1e-300, -2e-300]


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("scheme", [*SEARCHED, *SCHEMES])
def test_no_scheme_divides_by_a_rounded_reciprocal(scheme: str, dtype: torch.dtype) -> None:
    parsed = zp.Scheme.parse(scheme)
    x = sample_for(scheme, (4, 256), dtype)
    expected = list(results(x, parsed))
    with CudaDivision():
        found = list(results(x, parsed))
    assert all(same_bytes(a, b) for a, b in zip(found, expected, strict=True))
