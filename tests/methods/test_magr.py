"""The step that shrinks the largest numbers of blocks: its objective, and its choice of a strength."""

import pytest
import torch

from zeropoint.methods import LayerData, Samples, method_named
from zeropoint.methods.factored import factored
from zeropoint.methods.magr import STEP, STRENGTHS, shrunk
from zeropoint.schemes import Scheme
from zeropoint.stats import GramMatrix, Statistics

DRAW = torch.Generator().manual_seed(0)
INPUTS = torch.randn(768, 96, generator=DRAW) @ (
    torch.randn(96, 96, generator=DRAW) * torch.logspace(0, -2, 96)
)
WEIGHT = torch.randn(24, 96, generator=DRAW) * 0.05


def _data(*, held_out: bool) -> LayerData:
    gram = GramMatrix(features=96)
    state = gram.update(gram.start(), INPUTS[:512])
    samples = Samples(inputs=INPUTS[512:], floats=INPUTS[512:]) if held_out else None
    statistics = {"gram": Statistics(accumulator=gram, state=state)}
    return LayerData(statistics=statistics, held_out=samples)


@pytest.mark.parametrize("width", [32, 40, 96])
def test_the_objective_falls_and_so_do_the_largest_numbers(width: int) -> None:
    h = factored(_data(held_out=False).statistics["gram"]).damped
    unit, w = h / h.square().sum().sqrt(), WEIGHT.double()
    most = torch.stack([part.abs().amax(1) for part in w.split(width, 1)], 1)

    def objective(v: torch.Tensor) -> float:
        ends = torch.stack([part.abs().amax(1) for part in v.split(width, 1)], 1)
        return float(((v - w) @ unit * (v - w)).sum() / 2 + 0.002 * (most * ends).sum())

    v = shrunk(w, h, width, 0.002)
    assert objective(v) < objective(w)
    # The proximal step has one fixed point, the minimum: no small move is better.
    for seed in range(20):
        move = torch.randn(w.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert objective(v) < objective(v + 0.005 * move)
    assert float(v.abs().max()) < float(w.abs().max())


def test_one_step_is_the_exact_minimum_where_inputs_are_not_correlated() -> None:
    w = torch.tensor([[4.0, 1.0, -4.0, 0.5]], dtype=torch.float64)
    v = shrunk(w, torch.eye(4, dtype=torch.float64), 4, 0.25)  # |H| = 2, so that the radius of all is 2 * 1
    assert torch.allclose(v, torch.tensor([[3.0, 1.0, -3.0, 0.5]], dtype=torch.float64), atol=0.02)


def test_the_strength_is_that_of_least_held_out_loss_and_identity_is_one_of_them() -> None:
    scheme, data = Scheme.parse("int3:g32"), _data(held_out=True)
    found = method_named("magr+gptq").quantize(WEIGHT, scheme, data)
    gptq = method_named("gptq")

    def loss(values: torch.Tensor) -> float:
        return float(((values - WEIGHT) @ INPUTS[512:].T).square().sum())

    h = factored(data.statistics["gram"]).damped
    losses = {
        f"magr strength {s:g}": loss(
            gptq.solve(WEIGHT, shrunk(WEIGHT.double(), h, 32, s), scheme, data).q.dequantize()
        )
        for s in STRENGTHS
    }
    assert found.notes == (min(losses, key=lambda name: losses[name]),)
    assert loss(found.q.dequantize()) <= losses["magr strength 0"] * 1.0001


def test_nothing_moves_where_nothing_is_held_out() -> None:
    moved = STEP(WEIGHT, WEIGHT.double(), _data(held_out=False), Scheme.parse("int3:g32"))
    assert torch.equal(moved.target, WEIGHT.double())
    assert moved.note == "strength 0, as nothing is held out"
