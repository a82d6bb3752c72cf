"""Sites, and weights that are solved in the order in which they run."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracles import tiny_models
from tests.peers import transformers
from torch import nn

import zeropoint as zp
from zeropoint.methods import LayerResult, Loss, method_named
from zeropoint.models import Steps
from zeropoint.models.sites import Site, sites_of
from zeropoint.models.solutions import Solved, WeightTask
from zeropoint.models.solving import solve
from zeropoint.models.unfuse import unfused
from zeropoint.schemes import Scheme

pytestmark = pytest.mark.rotating

Readers = Callable[[str], bool]


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny_models.llama(layers=3, initializer_range=0.15)


@pytest.fixture(scope="module")
def mixture() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=64, num_experts=8, num_experts_per_tok=2,
        initializer_range=0.15,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config).eval()


def data(batches: int = 16) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(0, 64, (2, 32), generator=draw) for _ in range(batches)]


def linears(root: nn.Module, keep: Readers = lambda name: name != "lm_head") -> dict[str, nn.Module]:
    return {name: m for name, m in root.named_modules() if type(m) is nn.Linear and keep(name)}


def tasks_of(root: nn.Module, method: str, scheme: str = "int3:g32") -> list[WeightTask]:
    made, parsed = method_named(method), Scheme.parse(scheme)
    return [WeightTask(name=name, layer=name, scheme=parsed, method=made) for name in linears(root)]


def solved(model: nn.Module, method: str, steps: Steps | None = None, into: Solved | None = None) -> Solved:
    found = Solved() if into is None else into
    with unfused(model) as root:
        solve(root, data(), tasks_of(root, method), steps or Steps(), found)
    return found


def divergence(model: nn.Module, method: str) -> float:
    """KL divergence of a quantized model from the float one, on tokens that nothing has seen."""
    unseen = torch.randint(0, 64, (8, 32), generator=torch.Generator().manual_seed(9))
    quantized = zp.quantize_model(
        model, "int3:g32", method=method, ignore="lm_head", calibration=data()
    ).model
    with torch.no_grad():
        own, base = (each(unseen).logits.log_softmax(-1) for each in (quantized, model))
    return float(nn.functional.kl_div(own, base, log_target=True, reduction="none").sum(-1).mean())


def sites(model: nn.Module, inner: Iterable[str]) -> list[tuple[tuple[str, ...], int]]:
    with unfused(model) as root, torch.no_grad():
        layers = linears(root, lambda _: True)
        found = sites_of(lambda: root(data(1)[0]), layers, [name for name in layers if name != "lm_head"])
    wanted = tuple(inner)
    return [
        (tuple(name.rpartition(".")[2] for name in site.readers), site.stage)
        for site in found
        if site.readers[0].startswith(wanted)
    ]


def test_layers_that_read_one_tensor_share_a_site(llama: nn.Module) -> None:
    assert sites(llama, ["model.layers.0."]) == [
        (("q_proj", "k_proj", "v_proj"), 0), (("o_proj",), 1), (("gate_proj", "up_proj"), 2),
        (("down_proj",), 3),
    ]  # fmt: skip
    assert [stage for _, stage in sites(llama, ["lm_head"])] == [12]


def test_experts_have_sites_of_their_own_in_two_stages(mixture: nn.Module) -> None:
    found = sites(mixture, ["model.layers.0.mlp.experts."])
    assert len(found) > 2
    assert {stage for _, stage in found} == {2, 3}


def test_a_gate_that_reads_the_same_tensor_is_a_reader() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.router, self.down = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.router(x).softmax(-1)
            out = torch.zeros_like(x)
            out[:, :4] += self.up(x)[:, :4] * weight[:, :1]  # written in place
            return self.down(out)

    model = Gated()
    layers = dict(model.named_children())
    found = sites_of(lambda: model(torch.ones(3, 8)), layers, ["up", "down"])
    assert found == (Site(readers=("router", "up"), stage=0), Site(readers=("down",), stage=1))


def test_methods_that_know_more_of_inputs_come_closer(llama: nn.Module, mixture: nn.Module) -> None:
    for model in (llama, mixture):
        before = [p.clone() for p in model.parameters()]
        nearest, gptq, shifted = (divergence(model, each) for each in ("nearest", "gptq", "shift+gptq"))
        assert gptq < 0.9 * nearest
        assert shifted < gptq
        assert all(map(torch.equal, before, model.parameters()))


def test_threads_folders_and_what_is_kept_change_no_byte(llama: nn.Module, tmp_path: Path) -> None:
    first = solved(llama, "shift+gptq", Steps(workers=1, memo=0))
    for steps in (Steps(workers=2), Steps(workers=3, memo=1 << 16), Steps(folder=tmp_path)):
        again = solved(llama, "shift+gptq", steps)
        assert first.losses == again.losses
        for name, result in first.items():
            assert torch.equal(result.q.data, again[name].q.data), name
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("floats", "runs"), [(0, (5, 4, 3)), (128, (2, 2, 2.75)), (1 << 10, (2, 2, 2))])
def test_layers_run_no_more_often_than_what_is_kept_asks_for(
    llama: nn.Module, monkeypatch: pytest.MonkeyPatch, floats: int, runs: tuple[float, ...]
) -> None:
    """Once in each stream where all is kept; else once more for each later stage of the block.

    floats: kept of a token, of which its queries, keys and values are 128 and what attention gives is 64.
    """
    names = {m: name.rsplit(".", 1)[1] for name, m in linears(llama).items()}
    seen = Counter[str]()
    plain = nn.Linear.forward

    def forward(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        seen[names.get(module, "")] += 1
        return plain(module, x)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    tokens = sum(batch.numel() for batch in data())
    solved(llama, "shift+gptq", Steps(workers=1, memo=4 * floats * tokens))
    blocks = len(llama.get_submodule("model.layers")._modules)
    # The sites of each block are found on one batch.
    found = [(seen[name] - blocks) / blocks / len(data()) for name in ("q_proj", "o_proj", "up_proj")]
    assert tuple(found) == runs


def test_what_is_known_is_not_solved_again_and_changes_no_byte(llama: nn.Module) -> None:
    class Broken(Solved):
        """Fails after some results."""

        def add(self, task: WeightTask, result: LayerResult, loss: Loss) -> None:
            if len(self) == 10:
                raise KeyboardInterrupt
            super().add(task, result, loss)

    first, broken = solved(llama, "shift+gptq"), Broken()
    with pytest.raises(KeyboardInterrupt):
        solved(llama, "shift+gptq", into=broken)
    resumed = Solved()
    resumed.update(broken)
    solved(llama, "shift+gptq", into=resumed)
    assert len(resumed.losses) == len(first) - 10
    assert all(torch.equal(first[name].q.data, resumed[name].q.data) for name in first)


def test_losses_say_how_much_was_learned_and_what_is_left(llama: nn.Module) -> None:
    losses = solved(llama, "shift+gptq").losses.values()
    assert {loss.vectors for loss in losses} == {14 * 2 * 32}
    assert all(re.fullmatch(r"shift strength [\d.]+", loss.notes[0]) for loss in losses)
    seen, held_out = ([getattr(loss, which) for loss in losses] for which in ("seen", "held_out"))
    assert min(seen) > 0
    assert sum(seen) < sum(held_out) < 0.5 * len(losses)


def test_experts_without_tokens_take_what_is_known_of_the_others(mixture: nn.Module) -> None:
    few = [torch.tensor([[3, 3, 3, 3]])]
    found = Solved()
    with unfused(mixture) as root:
        tasks = tasks_of(root, "gptq")
        solve(root, few, tasks, Steps(), found)
    assert found.keys() == {task.name for task in tasks}
    experts = [loss for name, loss in found.losses.items() if ".experts." in name]
    assert min(loss.vectors for loss in experts) > 0
    # One token four times: of the eight experts of each layer, it reaches the same two.
    assert sorted(loss.own for loss in experts) == [0] * 24 + [4] * 8
    assert {loss.own for name, loss in found.losses.items() if ".experts." not in name} == {4}


def test_a_layer_that_nothing_reaches_is_quantized_without_data(llama: nn.Module) -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
            self.blocks[1].idle = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return self.blocks[1](self.blocks[0](x))

    model = Idle()
    task = WeightTask(
        name="blocks.1.idle", layer="blocks.1.idle", scheme=Scheme.parse("int8:channel"),
        method=method_named("gptq"),
    )  # fmt: skip
    found = Solved()
    solve(model, [torch.ones(2, 8)] * 2, [task], Steps(), found)
    assert found.methods["blocks.1.idle"].name == "nearest"


def test_a_weight_that_the_model_uses_past_its_layer_takes_a_method_without_data() -> None:
    class Past(nn.Module):
        """A block that multiplies a layer's weight itself, as Mamba does with its time steps."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.past, self.last = (nn.Linear(32, 32) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.last(torch.relu(self.first(x)) @ self.past.weight.T)

    def alone(weight: torch.Tensor) -> torch.Tensor:
        return zp.quantize(weight, "int2:g32", method="mse").dequantize()

    torch.manual_seed(0)
    model = nn.Sequential(Past(), Past()).eval()
    x, parsed = [torch.randn(8, 32) for _ in range(16)], Scheme.parse("int2:g32")
    floats = {name: m.weight.clone() for name, m in linears(model).items()}
    methods = {name: method_named("mse" if name.endswith("past") else "gptq") for name in floats}
    tasks = [WeightTask(name=n, layer=n, scheme=parsed, method=method) for n, method in methods.items()]
    found = Solved()
    solve(model, x, tasks, Steps(), found)
    assert found.keys() == floats.keys()
    assert torch.equal(found["1.past"].dequantize(), alone(floats["1.past"]))
    # The last layer's inputs have passed the codes of the weight before it.
    model[0].past.weight.data = alone(floats["0.past"])
    only = Solved()
    solve(model, x, [task for task in tasks if not task.name.endswith("past")], Steps(), only)
    assert torch.equal(found["0.last"].q.data, only["0.last"].q.data)
    # A method that is given for this case alone does the same.
    gptq, mse = method_named("gptq"), method_named("mse")
    model[0].past.weight.data, given = floats["0.past"], Solved()
    solve(model, x, [replace(task, method=gptq, without_data=mse) for task in tasks], Steps(), given)
    assert given.methods == methods
    assert all(torch.equal(given[name].q.data, result.q.data) for name, result in found.items())


@pytest.mark.parametrize("rows", [0, 8])
def test_a_layer_that_only_held_out_batches_reach_has_no_inputs_to_learn_from(rows: int) -> None:
    class Block(nn.Module):
        """A layer sees some rows of one batch, and no rows of others."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.rare = (nn.Linear(32, 32) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            more = self.rare(x[: rows if bool(x[0, 0] > 90) else 0])
            return self.first(x) + nn.functional.pad(more, (0, 0, 0, len(x) - len(more)))

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).eval()
    x = [torch.randn(8, 32) for _ in range(16)]
    x[7][0, 0] = x[15][0, 0] = 99.0
    tasks, found = tasks_of(model, "shift+gptq", "int4:g32"), Solved()
    mse = method_named("mse")
    solve(model, x, [replace(task, without_data=mse) for task in tasks], Steps(), found)
    assert {name: method.name for name, method in found.methods.items()} == {
        f"{block}.{name}": method
        for block in "01"
        for name, method in (("first", "shift+gptq"), ("rare", "mse"))
    }


@pytest.mark.parametrize("experts", [2, 3])
def test_each_layer_of_an_expert_without_tokens_learns_from_the_others(experts: int) -> None:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.down(torch.relu(self.gate(x)) * self.up(x))
            return result

    class Mixture(nn.Module):
        """Experts in a list: the first two take half of the rows each."""

        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Expert() for _ in range(experts))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = x[:, 0] > 0
            y = torch.zeros_like(x)
            y[first], y[~first] = self.experts[0](x[first]), self.experts[1](x[~first])
            return x + y

    torch.manual_seed(0)
    model, found = nn.Sequential(Mixture(), Mixture()).eval(), Solved()
    x, mse = [torch.randn(8, 32) for _ in range(16)], method_named("mse")
    tasks = [replace(task, without_data=mse) for task in tasks_of(model, "gptq", "int4:g32")]
    solve(model, x, tasks, Steps(blocks=("0", "1")), found)
    assert {method.name for method in found.methods.values()} == {"gptq"}
    own = {name: loss.own for name, loss in found.losses.items()}
    assert all((vectors == 0) == (".2." in name) for name, vectors in own.items())


def test_a_part_of_a_model_that_no_batch_reaches_costs_eight_runs_and_none_of_floats() -> None:
    class Model(nn.Module):
        """A tower next to the blocks, and a head that counts its runs."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.tower = nn.ModuleList(nn.Linear(32, 32) for _ in range(2)), nn.Linear(32, 32)
            self.runs = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            self.runs += 1
            return x

    torch.manual_seed(0)
    model, found = Model().eval(), Solved()
    solve(
        model,
        [torch.randn(8, 32) for _ in range(64)],
        tasks_of(model, "shift+gptq", "int4:g32"),
        Steps(),
        found,
    )
    assert found.methods["tower"].name == "nearest"
    assert model.runs == 8


def test_a_part_that_reads_what_is_solved_later_is_computed_again() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, late: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * late

    class Block(nn.Module):
        """Its part holds a layer of the first stage, and multiplies with what one of the second gives."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.down = (nn.Linear(32, 32) for _ in range(3))
            self.part = Part()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.part(x, self.second(torch.relu(self.first(x)))))

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).eval()
    x = [torch.randn(8, 32) for _ in range(16)]
    found = []
    for memo in (0, 1 << 30):
        into, tasks = Solved(), tasks_of(model, "shift+gptq", "int2:g32")
        solve(model, x, tasks, Steps(memo=memo), into)
        found.append(into)
    for name, result in found[0].items():
        assert torch.equal(result.q.data, found[1][name].q.data), name


def test_layers_with_numbers_for_names_that_are_no_experts_share_nothing() -> None:
    class Two(nn.Module):
        def __init__(self, names: tuple[str, str]) -> None:
            super().__init__()
            self.branches = nn.ModuleDict({name: nn.Linear(32, 32) for name in names})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.branches.values()
            return x + first(x[:, :32]) + second(x.square())

    torch.manual_seed(0)
    x, found = [torch.randn(8, 32) for _ in range(16)], []
    for names in (("0", "1"), ("a", "b")):
        torch.manual_seed(1)
        model, into = nn.Sequential(Two(names), Two(names)).eval(), Solved()
        solve(model, x, tasks_of(model, "gptq"), Steps(), into)
        found.append([result.q.data for result in into.values()])
    assert all(map(torch.equal, *found))


@pytest.mark.slow  # two processes load torch and transformers and solve models of 8 and 32 blocks
def test_memory_does_not_grow_with_the_number_of_blocks(tmp_path: Path) -> None:
    peaks = []
    # glibc then gives freed tensors back at once; otherwise it keeps some, now these, now those.
    settings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    for layers in (8, 32):
        folder = tmp_path / str(layers)
        tiny_models.llama(layers=layers, hidden_size=512, intermediate_size=1024).save_pretrained(folder)
        done = subprocess.run(
            [sys.executable, "-c", SOLVES, str(folder), str(tmp_path / f"out{layers}")],
            capture_output=True, text=True, check=True, env=settings,
        )  # fmt: skip
        peaks.append(int(done.stdout.split()[-1]) << 10)
    block = 4 * (2 * 512**2 + 2 * 512 * 256 + 3 * 512 * 1024)
    assert peaks[1] - peaks[0] < 4 * block, peaks  # 24 blocks more


SOLVES = """
import re, sys, torch, zeropoint as zp
ids = torch.randint(0, 64, (16, 128), generator=torch.Generator().manual_seed(0))
zp.quantize_checkpoint(sys.argv[1], sys.argv[2], "int4:g64", method="shift+gptq", calibration=ids)
# getrusage would tell the peak of the process that started this one
print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""
