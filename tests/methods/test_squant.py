"""SQuant: errors of blocks cancel, codes move by one at most, and outputs for inputs with a mean."""

from __future__ import annotations

import pytest
import torch
from tests.tensors import normal

from zeropoint.layout.blocks import block_rows, spread_blocks
from zeropoint.methods.nearest import METHOD as NEAREST
from zeropoint.methods.squant import METHOD
from zeropoint.schemes import Scheme
from zeropoint.tensor import QuantizedTensor


def off(q: QuantizedTensor, x: torch.Tensor) -> torch.Tensor:
    """Return the errors of each block in steps, a block a row."""
    scale = q.params.effective_scale()
    assert scale is not None
    steps = spread_blocks(scale.double(), q.scheme.granularity, q.shape).expand(q.shape)
    return block_rows((q.dequantize(torch.float64) - x.double()) / steps, q.scheme.granularity, 0)


@pytest.mark.parametrize("text", ["int4:g32", "int3:g50:asym", "int8:channel", "uint4:g64:asym=real"])
def test_the_errors_of_a_block_sum_to_half_a_step_at_most(text: str) -> None:
    x, scheme = normal(40, 160, seed=3), Scheme.parse(text)
    found, plain = METHOD.quantize(x, scheme).q, NEAREST.quantize(x, scheme).q
    errors = off(found, x)
    inside = block_rows((found.codes > scheme.qmin) & (found.codes < scheme.qmax), scheme.granularity, 1).all(
        1
    )
    assert bool((errors.sum(1).abs()[inside] <= 0.5 + 1e-6).all())
    assert float(errors.sum(1).square().sum()) < 0.5 * float(off(plain, x).sum(1).square().sum())
    assert int((found.codes.int() - plain.codes.int()).abs().max()) == 1
    assert all(torch.equal(a, b) for a, b in zip(found.params.stored, plain.params.stored, strict=True))


def test_codes_that_move_are_those_of_the_largest_errors() -> None:
    x = torch.tensor([[-7.5, 0.4, 0.3, 0.2, 0.1, 7.5]])
    q = METHOD.quantize(x, Scheme.parse("int4:channel:narrow")).q
    errors = off(NEAREST.quantize(x, q.scheme).q, x)
    moved = (q.codes - NEAREST.quantize(x, q.scheme).q.codes).flatten()
    assert moved.tolist() == [0, 1, 0, 0, 0, 0]
    assert float(errors.sum()) < -0.5


def test_outputs_of_inputs_with_a_mean_come_closer() -> None:
    weight, inputs = normal(64, 256, seed=1), normal(500, 256, seed=2).relu()
    wrong = {}
    for method in (NEAREST, METHOD):
        q = method.quantize(weight, Scheme.parse("int3:g64")).q
        wrong[method.name] = float(((q.dequantize() - weight) @ inputs.T).square().mean())
    assert wrong["squant"] < 0.85 * wrong["nearest"]


def test_schemes_without_integers_in_groups_are_refused() -> None:
    for text in ("nvfp4", "int4:tensor", "int4:block16x16", "int8:cast", "mx9"):
        assert "method squant moves integers in groups of a row" in str(METHOD.refusal(Scheme.parse(text)))
    assert "draws at random" in str(METHOD.refusal(Scheme.parse("int4:g32:round=stochastic(7)")))
