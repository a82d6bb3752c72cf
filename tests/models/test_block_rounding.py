"""Weights of a block that are rounded together: their two values, the steps, and what is kept of them."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.methods.test_gptq import SCHEMES, inputs, weights
from torch import nn

import zeropoint as zp
from zeropoint.methods import LayerResult, Loss, Scope, method_named
from zeropoint.methods.chain import start_of
from zeropoint.methods.rounding_grid import grid_of
from zeropoint.methods.signround import Sides
from zeropoint.models import Steps, block_rounding, block_training
from zeropoint.models.solutions import Solved, WeightTask
from zeropoint.models.solving import solve
from zeropoint.recipes import Assignment, Recipe, Rule
from zeropoint.schemes import Scheme

pytestmark = pytest.mark.rotating


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_rounding, "STEPS", 30)


class Block(nn.Module):
    """A residual block of two layers with a nonlinearity between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).eval()


def data(windows: int = 16) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(64, 32, generator=draw) for _ in range(windows)]


def tasks_of(root: nn.Module, method: str, scheme: str = "int3:g32") -> list[WeightTask]:
    made, parsed = method_named(method), Scheme.parse(scheme)
    return [
        WeightTask(name=name, layer=name, scheme=parsed, method=made)
        for name, module in root.named_modules()
        if type(module) is nn.Linear
    ]


def solved(
    model: nn.Module, method: str, steps: Steps | None = None, into: Solved | None = None,
    scheme: str = "int3:g32",
) -> Solved:  # fmt: skip
    found = Solved() if into is None else into
    solve(model, data(), tasks_of(model, method, scheme), steps or Steps(workers=1), found)
    return found


def same_codes(a: Solved, b: Solved) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name].q.data, b[name].q.data) for name in a)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_number_starts_as_its_code_and_may_become_a_neighbor(scheme: str) -> None:
    weight = weights(24, 256)
    q = zp.quantize(weight, scheme, method="gptq", inputs=inputs(400))
    sides, grid = Sides(weight, q), grid_of(q.params)
    start, values = sides.goes_up, q.dequantize(torch.float32).reshape(24, 256)
    assert torch.equal(sides.values(start), values)
    assert torch.equal(sides.codes(start).data, q.data)
    other = sides.values(~start)
    assert torch.equal(sides.codes(~start).dequantize(torch.float32).reshape(24, 256), other)
    # The other value lies on the side of the weight, and none lies between both.
    moved = other != values
    assert bool(((other > values) == (weight >= values))[moved].all())
    assert float(moved.float().mean()) > 0.5
    scale, zero = (each[:, grid.block_of].double() for each in (grid.scale, grid.all_zeros))
    offset = grid.all_offsets[:, grid.block_of].double()
    units = [((each.double() - offset) / scale + zero)[moved] for each in (values, other)]
    first, second = (torch.searchsorted(grid.bounds, unit.contiguous()) for unit in units)
    assert set((first - second).abs().tolist()) == {1}


def test_steps_turn_the_numbers_whose_slope_keeps_its_sign() -> None:
    weight = torch.tensor([[0.2, 0.2, 0.2, -0.4, 7.0, 0.0]])
    sides = Sides(weight, zp.quantize(weight, "int4:tensor"))
    assert sides.codes(sides.goes_up).codes.tolist() == [[0, 0, 0, 0, 7, 0]]
    for step in range(10):
        changing = 1.0 if step % 2 else -1.0
        sides.step(torch.tensor([[-1e-9, 1e-9, changing, 1e9, 1.0, torch.nan]]), (1 - step / 10) / 10)
    assert sides.codes(sides.goes_up).codes.tolist() == [[1, 0, 0, -1, 7, 0]]


def test_codes_that_feedback_moved_stay_where_no_slope_is() -> None:
    weight = weights(24, 256)
    q = zp.quantize(weight, "int3:g32", method="gptq", inputs=inputs(400))
    assert not torch.equal(q.data, zp.functional.quantize(weight, q.params).data)
    sides = Sides(weight, q)
    for _ in range(5):
        sides.step(torch.zeros(24, 256), 1.0)
    assert torch.equal(sides.codes(sides.goes_up).data, q.data)


@pytest.mark.parametrize("scheme", ["int3:g32", "uint2:g32:asym", "mxfp4", "nvfp4"])
def test_blocks_come_closer_on_windows_that_are_held_out(model: nn.Module, scheme: str) -> None:
    before = [p.clone() for p in model.parameters()]
    start, found = solved(model, "gptq", scheme=scheme), solved(model, "signround", scheme=scheme)
    pairs = [found.losses[name].together or (0.0, 0.0) for name in ("0.up", "1.up")]
    assert all(then <= first for first, then in pairs)
    assert pairs[1][1] < 0.97 * pairs[1][0]  # the first block has no error of inputs to make up for
    held = [x for number, x in enumerate(data()) if number % 8 == 7]
    measured = [block_error(model, into, held) for into in (start, found)]
    assert measured == pytest.approx(pairs[0], rel=2e-2)  # products of the search are rounded more
    assert all(map(torch.equal, before, model.parameters()))
    assert all(p.requires_grad for p in model.parameters())


def block_error(model: nn.Module, found: Solved, held: list[torch.Tensor]) -> float:
    """Return the squared error of the first block over the squares of its outputs."""
    quantized = Block()
    quantized.load_state_dict(model[0].state_dict())
    with torch.no_grad():
        for name in ("up", "down"):
            getattr(quantized, name).weight.copy_(found[f"0.{name}"].q.dequantize())
        shares = []
        for x in held:
            wanted = model[0](x)
            shares.append(float((quantized(x) - wanted).square().sum() / wanted.square().sum()))
    return sum(shares) / len(shares)


def test_codes_that_nothing_improves_stay(model: nn.Module) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Down the slope becomes up.
        step = Sides.step
        patch.setattr(Sides, "step", lambda self, slope, size: step(self, -slope, size))
        found = solved(model, "signround")
    start = solved(model, "gptq")
    assert same_codes(start, found)
    assert all(loss.together and loss.together[0] == loss.together[1] for loss in found.losses.values())
    assert all(loss.outputs is None for loss in found.losses.values())


def test_threads_and_windows_at_once_change_no_byte(model: nn.Module, tmp_path: Path) -> None:
    first, asked = solved(model, "shift+signround"), []

    def two(fixed: int, window: int) -> int:
        asked.append((fixed, window))
        return 2

    for steps in (Steps(workers=2), Steps(workers=3, at_once=two), Steps(workers=1, folder=tmp_path, memo=0)):
        again = solved(model, "shift+signround", steps)
        assert same_codes(first, again)
        assert first.losses == again.losses
    numbers = 2 * 32 * 64
    # A window of 64 tokens keeps the inputs of both layers, and what the nonlinearity and the loss keep.
    assert all(fixed == numbers * (4 + Sides.NUMBER_BYTES) for fixed, _ in asked)
    assert all(4 * (numbers + 64 * (32 + 64 + 32)) < window < 40 * numbers for _, window in asked)


def test_a_block_that_was_kept_in_part_is_rounded_again_to_the_same_bytes(model: nn.Module) -> None:
    class Broken(Solved):
        """Fails after some results."""

        def add(self, task: WeightTask, result: LayerResult, loss: Loss) -> None:
            if len(self) == 3:
                raise KeyboardInterrupt
            super().add(task, result, loss)

    first, broken = solved(model, "signround"), Broken()
    with pytest.raises(KeyboardInterrupt):
        solved(model, "signround", into=broken)
    assert len(broken) == 3
    resumed = Solved()
    resumed.update(broken)
    assert same_codes(first, solved(model, "signround", into=resumed))
    assert resumed.losses.keys() == {"1.up", "1.down"}


def test_other_methods_keep_their_codes_next_to_it(model: nn.Module) -> None:
    found, plain = Solved(), Solved()
    tasks = [
        WeightTask(
            name=task.name, layer=task.layer, scheme=task.scheme,
            method=method_named("gptq") if task.name.endswith("up") else task.method,
        )
        for task in tasks_of(model, "signround")
    ]  # fmt: skip
    solve(model, data(), tasks, Steps(workers=1), found)
    solve(model, data(), tasks_of(model, "gptq"), Steps(workers=1), plain)
    assert torch.equal(found["0.up"].q.data, plain["0.up"].q.data)
    assert not torch.equal(found["0.down"].q.data, plain["0.down"].q.data)
    assert found.losses["0.up"].together is None


def test_a_model_in_memory_takes_the_codes(model: nn.Module) -> None:
    made = zp.quantize_model(model, "int3:g32", method="signround", calibration=data()).model
    codes = solved(model, "signround")
    assert torch.equal(made[0].up.weight.quantized().dequantize(), codes["0.up"].q.dequantize())
    x = data(24)[-1]
    gptq = zp.quantize_model(model, "int3:g32", method="gptq", calibration=data()).model
    with torch.no_grad():
        errors = [float((each(x) - model(x)).square().sum()) for each in (made, gptq)]
    assert errors[0] < errors[1]


def test_a_weight_outside_of_blocks_has_the_codes_of_its_start_and_says_so(model: nn.Module) -> None:
    whole = nn.Sequential(model, nn.Linear(32, 8))
    steps, found, plain = Steps(blocks=("0.0", "0.1")), Solved(), Solved()
    solve(whole, data(), tasks_of(whole, "signround"), steps, found)
    assert found.losses["1"].notes == ("outside of all blocks: codes of gptq",)
    outside = [name for name, loss in found.losses.items() if loss.together is None]
    assert outside == ["1"]
    inside = {name: "signround" if name != "1" else "gptq" for name in found}
    tasks = [replace(task, method=method_named(inside[task.name])) for task in tasks_of(whole, "signround")]
    solve(whole, data(), tasks, steps, plain)
    assert all(torch.equal(found[name].q.data, plain[name].q.data) for name in plain)


def test_a_weight_alone_is_refused(model: nn.Module) -> None:
    with pytest.raises(zp.CalibrationError, match=r"signround rounds the weights of a block .* runs on data"):
        zp.quantize(torch.ones(4, 32), "int4:g32", method="signround", inputs=torch.ones(8, 32))
    recipe = Recipe(default=Rule(gives=Assignment.of(weight="int3:g32", method="signround")))
    with pytest.raises(zp.CalibrationError, match=r"signround rounds the weights of a block"):
        zp.quantize_model(model, recipe, calibration=zp.calibrate(model, recipe, data()))


def test_every_chain_begins_with_the_codes_of_feedback() -> None:
    scheme = Scheme.parse("int4:g32")
    assert {name: start_of(method_named(name)).name for name in ("signround", "shift+signround", "mse")} == {
        "signround": "gptq", "shift+signround": "shift+gptq", "mse": "mse",
    }  # fmt: skip
    assert method_named("awq+shift+signround").scope(scheme) is Scope.BLOCK
    assert "signround" in str(method_named("signround").refusal(Scheme.parse("if4")))


def test_experts_without_tokens_keep_their_codes() -> None:
    class Experts(nn.Module):
        """Only the first of two experts gets tokens."""

        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.experts[0](x) + (self.experts[1](x[:1]).sum() if bool(x[0, 0] > 1e6) else 0)

    torch.manual_seed(0)
    root = nn.Sequential(Experts(), Experts()).eval()
    x = data()
    x[0][0, 0] = 2e6  # one window reaches the other expert
    found: dict[str, Any] = {}
    for method in ("gptq", "signround"):
        found[method] = Solved()
        solve(root, x[:1] + x[8:], tasks_of(root, method), Steps(workers=1), found[method])
    assert found["signround"].keys() == found["gptq"].keys()


def test_a_structure_of_outputs_counts_as_a_whole() -> None:
    wanted = (torch.tensor([3.0, 4.0]), {"more": torch.tensor([0.0]), "kind": torch.tensor([7])})
    found = (torch.tensor([3.0, 5.0]), {"more": torch.tensor([2.0]), "kind": torch.tensor([8])})
    assert float(block_training.error_of(found, wanted)) == pytest.approx((1 + 4) / 25)


def test_windows_are_drawn_without_one_that_is_held_out(model: nn.Module) -> None:
    learned: set[int] = set()
    search = functools.partial(block_training._Search._slopes)

    def watched(self: Any, numbers: Any) -> Any:
        learned.update(numbers)
        return search(self, numbers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_training._Search, "_slopes", watched)
        solved(model, "signround")
    assert learned == set(range(16)) - {7, 15}
