"""Scales that are trained while codes stay."""

import pytest
import torch
from tests.methods.test_gptq import weights
from torch import nn

import zeropoint as zp
from zeropoint.models.block_distillation import TrainedScales, scales_stay
from zeropoint.schemes import Scheme


@pytest.mark.parametrize(
    "scheme",
    ["int4:g64", "uint4:g32:asym", "uint3:g32:asym=real", "nf4:g64", "nvfp4", "int4:g64:scale=bfloat16"],
)
def test_scales_go_down_the_slope_and_codes_stay(scheme: str) -> None:
    target = weights(16, 256)
    q = zp.quantize(target, scheme)
    wrong = target * 1.1
    weight = nn.Parameter(q.dequantize().clone())
    trained = TrainedScales(weight, None, q, 0.02)
    assert torch.equal(trained.state().view(torch.uint8), q.scales[0].view(torch.uint8))
    before = float((weight - wrong).detach().square().sum())
    best = float((1.1 * q.dequantize() - wrong).square().sum())
    for step in range(20):
        trained.step(2 * (weight.detach() - wrong), 1 - step / 20)
    assert float((weight - wrong).detach().square().sum()) < best + 0.3 * (before - best)
    found = trained.codes(trained.state())
    assert torch.equal(found.data, q.data)
    assert found.scales[0].dtype is q.scales[0].dtype
    assert torch.equal(found.dequantize(), weight.detach())


def test_a_scale_keeps_its_sign_and_none_becomes_zero() -> None:
    q = zp.quantize(torch.tensor([[1.0, -7.0], [0.0, 0.0]]), "int4:channel:scale=float16")
    trained = TrainedScales(nn.Parameter(q.dequantize().clone()), None, q, 5.0)
    trained.step(q.dequantize(), 1.0)  # past zero
    assert torch.equal(trained.state(), q.scales[0])


def test_rows_of_a_parameter_are_trained_apart() -> None:
    rows = torch.tensor([3, 1])
    parameter = nn.Parameter(torch.zeros(4, 64))
    q = zp.quantize(torch.randn(2, 64, generator=torch.Generator().manual_seed(0)), "int4:g32")
    trained = TrainedScales(parameter, rows, q, 0.01)
    trained.put(trained.state())
    assert torch.equal(parameter.detach()[rows], q.dequantize())
    slope = torch.zeros(4, 64)
    slope[3, :32] = parameter.detach()[3, :32]
    trained.step(slope, 1.0)
    share = trained.state() / q.scales[0]
    assert torch.allclose(share, torch.tensor([[0.99, 1.0], [1.0, 1.0]]))
    assert not parameter.detach()[[0, 2]].any()


def test_scales_that_cannot_be_trained_are_named() -> None:
    schemes = ("mxfp4", "bfloat16:cast", "q4_k", "int4:g64")
    assert {text: scales_stay(Scheme.parse(text)) for text in schemes} == {
        "mxfp4": "its scales are powers of two", "bfloat16:cast": "it has none",
        "q4_k": "its values are more than a code times a scale", "int4:g64": None,
    }  # fmt: skip
