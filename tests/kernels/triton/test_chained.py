"""Schemes whose levels follow from each other, such as those of llama.cpp, have the reference's bytes."""

import pytest
import torch
from tests.kernels.triton.interpreter import DEVICE
from tests.kernels.triton.test_gradient_masks import gradients
from tests.kernels.triton.test_schemes import run
from tests.tensors import same_bytes

import zeropoint as zp
from zeropoint.kernels.triton import BACKEND
from zeropoint.ops.library import request
from zeropoint.ops.registry import Op

pytestmark = pytest.mark.rotating

QUICK = ("q4_k", "q6_k", "q4_1", "iq4_nl")
OTHERS = (
    "q2_k", "q3_k", "q5_k", "q4_0", "q5_0", "q5_1", "q8_0", "iq4_xs", "int4:g16:scale=signed",
    "uint4:g32:offset=minimum", "q4_k:round=stochastic(3)", "int4:g128:dialect=ggml",
    "uint4:g64:scale=uint8:scale2=float16@g256:asym", "uint4:channel:offset=minimum/float16",
)  # fmt: skip
CASES = (((4, 512), torch.float32), ((2, 3, 256), torch.bfloat16), ((1, 768), torch.float16))


@pytest.mark.parametrize("scheme", [*QUICK, *(pytest.param(s, marks=pytest.mark.slow) for s in OTHERS)])
def test_levels_and_codes_have_the_bytes_of_the_reference(scheme: str) -> None:
    parsed = zp.Scheme.parse(scheme)
    for shape, dtype in CASES:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(len(scheme))).to(dtype)
        x.view(-1)[:64], x.view(-1)[7], x.view(-1)[64:128] = 2.0, -2.0, 0.0  # two of the largest magnitude
        data, *params = run("reference", Op.QUANTIZE_DYNAMIC, x, parsed, x)
        asked = (
            (Op.CHOOSE_PARAMS, (x,)), (Op.QUANTIZE_DYNAMIC, (x,)), (Op.DEQUANTIZE, (data, params)),
            (Op.QUANTIZE, (x * 1.5, params)), (Op.FAKE_QUANTIZE, (x * 1.5, params)),
        )  # fmt: skip
        for op, arguments in asked:
            assert BACKEND.refusal(request(op, torch.empty_like(x, device=DEVICE), parsed)) is None
            expected, found = (run(name, op, x, parsed, *arguments) for name in ("reference", "triton"))
            assert all(same_bytes(a, b) for a, b in zip(found, expected, strict=True)), op
        kept, masked = gradients(x * 1.5, torch.ones_like(x), parsed, params)
        assert same_bytes(masked, kept)


def test_errors_under_offsets_are_those_of_the_reference() -> None:
    x, scheme = torch.randn(3, 512), zp.Scheme.parse("q4_k")
    with zp.only_backend("reference"):
        q = zp.quantize(x * 1.25, zp.quantize(x, scheme).params)
        expected = zp.functional.row_errors(x * 1.25, q)
    with zp.only_backend("triton"):
        found = zp.functional.row_errors((x * 1.25).to(DEVICE), q.to(DEVICE))
    assert found.largest.tolist() == expected.largest.tolist()
    assert found.clipped.tolist() == expected.clipped.tolist()
    assert expected.clipped.sum() > 0


def test_numbers_that_are_not_finite_are_refused() -> None:
    x = torch.ones(2, 256)
    x[1, 3] = torch.inf
    with zp.only_backend("triton"), pytest.raises(zp.NonFiniteError, match=r"at \(1, 3\)"):
        zp.quantize(x.to(DEVICE), "q4_k")
