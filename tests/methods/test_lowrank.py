"""Two narrow matrices next to codes: what they keep, states, what has no place for them."""

import copy
from pathlib import Path

import pytest
import torch
from tests.oracles import tiny_models
from torch import nn

import zeropoint as zp
from zeropoint.methods import LayerData, method_named
from zeropoint.methods.chain import spelled
from zeropoint.methods.factored import factored
from zeropoint.methods.lowrank import STEP, LowRankStep
from zeropoint.methods.method import GRAM
from zeropoint.schemes import Scheme
from zeropoint.stats import GramMatrix, Statistics


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 64)).eval()
    with torch.no_grad():
        made[0].weight.add_(torch.randn(96, 3) @ torch.randn(3, 128) * 0.3)
    return made.to(dtype)


def batches(seed: int = 1) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(32, 128, generator=draw) * torch.logspace(-1, 1, 128) for _ in range(8)]


def loss(found: nn.Module, wanted: nn.Module) -> float:
    x = torch.cat(batches(5))
    with torch.no_grad():
        return float((found(x) - wanted(x)).square().sum() / wanted(x).square().sum())


def test_the_product_has_the_least_error_of_its_rank_on_the_statistics() -> None:
    """The Eckart-Young theorem in the norm of the damped Gram matrix, by the singular values of torch."""
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.randn(24, 40, generator=draw), torch.randn(300, 40, generator=draw)
    gram = GramMatrix(features=40)
    statistics = Statistics(accumulator=gram, state=gram.update(gram.start(), x * torch.logspace(-1, 1, 40)))
    data, scheme = LayerData(statistics={GRAM: statistics}), Scheme.parse("int4:g8")
    moved = LowRankStep(width=5)(weight, weight.double(), data, scheme)
    assert moved.low_rank is not None
    kept = moved.low_rank.product(torch.float64)
    assert torch.linalg.matrix_rank(kept) == 5
    assert torch.equal(moved.target, weight.double() - kept)
    h = factored(statistics).damped
    error = float(((moved.target @ h) * moved.target).sum())
    root = torch.linalg.cholesky(h)
    least = float(torch.linalg.svdvals(weight.double() @ root)[5:].square().sum())
    assert error == pytest.approx(least, rel=1e-4)
    every = STEP(weight, weight.double(), data, scheme)
    assert every.note == "rank 24"
    assert float(every.target.abs().max()) < 1e-5


@pytest.mark.parametrize("method", ["lowrank4+gptq", "lowrank4+shift+descent", "lowrank4+gptq+bias"])
def test_outputs_come_closer_on_vectors_that_nothing_was_learned_from(method: str) -> None:
    layers = model()
    plain = zp.quantize_model(layers, "int3:g32", method="gptq", calibration=batches())
    made = zp.quantize_model(layers, "int3:g32", method=method, calibration=batches())
    assert loss(made.model, layers) < 0.5 * loss(plain.model, layers)
    assert made.layers[0].error < plain.layers[0].error
    more = 4 * 4 * (96 + 128)
    assert made.layers[0].nbytes[1] == plain.layers[0].nbytes[1] + more


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dequantized_model_has_the_sum_as_its_weight(dtype: torch.dtype) -> None:
    layers = model(dtype)
    data = [x.to(dtype) for x in batches()]
    made = zp.quantize_model(layers, "int3:g32", method="lowrank8+gptq", calibration=data).model
    plain = zp.dequantize_model(made)
    packed = made[0].weight
    kept = packed.low_rank
    assert kept is not None
    assert (kept.left.dtype, tuple(kept.left.shape), tuple(kept.right.shape)) == (dtype, (96, 8), (8, 128))
    wanted = packed.codes(0, 96).dequantize().float() + kept.left.float() @ kept.right.float()
    assert torch.equal(plain[0].weight, wanted.to(dtype))
    assert torch.equal(packed.tile(0, 96), plain[0].weight)
    # A product of fewer rows may add in another order.
    assert torch.allclose(packed.rows(torch.tensor([5, 3])), plain[0].weight[[5, 3]], rtol=1e-5)
    x = data[0]
    bound = 1e-5 if dtype is torch.float32 else 0.03
    assert float((plain(x) - made(x)).norm() / made(x).norm()) < bound
    assert "two narrow matrices" in made[0].explain()
    assert "rank 8" in repr(packed)


def test_a_state_holds_both_matrices_and_another_rank_is_refused() -> None:
    layers = model()
    made, other, wide = (
        zp.quantize_model(layers, "int3:g32", method=method, calibration=batches(seed)).model
        for method, seed in (("lowrank8+gptq", 1), ("lowrank8+gptq", 2), ("lowrank16+gptq", 2))
    )
    x = batches()[0]
    assert not torch.equal(other(x), made(x))
    other.load_state_dict(made.state_dict())
    assert torch.equal(other(x), made(x))
    assert torch.equal(copy.deepcopy(made)(x), made(x))
    with pytest.raises(RuntimeError, match="size mismatch"):
        wide.load_state_dict(made.state_dict())
    plain = zp.quantize_model(layers, "int3:g32", method="gptq", calibration=batches()).model
    with pytest.raises(RuntimeError, match="Unexpected key"):
        plain.load_state_dict(made.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        made.load_state_dict(plain.state_dict())


def test_files_and_single_tensors_have_no_place_for_them(tmp_path: Path) -> None:
    source = tmp_path / "source"
    llama = tiny_models.llama(layers=2)
    llama.save_pretrained(source)
    with pytest.raises(zp.UnsupportedError, match="narrow matrices next to codes, for which no file"):
        zp.quantize_checkpoint(
            source, tmp_path / "out", "int4:g32", method="lowrank+gptq", calibration="random"
        )
    with pytest.raises(zp.UnsupportedError, match="next to codes; use"):
        zp.quantize(torch.randn(8, 32), "int4:g32", method="lowrank+gptq", inputs=torch.randn(64, 32))
    ids = [torch.randint(0, 64, (2, 16)) for _ in range(4)]
    made = zp.quantize_model(llama, "int4:g32", method="lowrank4+gptq", calibration=ids, ignore="lm_head")
    with pytest.raises(zp.UnsupportedError, match="two narrow matrices lie next to its codes"):
        zp.save_checkpoint(made.model, tmp_path / "saved")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lowrank0+gptq", "keeps nothing; give it a rank, such as lowrank32"),
        ("lowrank16", r"names no method.* write lowrank16\+gptq"),
        ("shift+lowrank16+gptq", r"write lowrank16\+shift\+gptq"),
        ("lowrank+lowrank16+gptq", "do the same; leave one out"),
        ("lowrank8+shift+signround", r"lowrank8 takes a part away; write lowrank8\+shift\+gptq"),
        ("lowrank+nearest", "these steps end with gptq or descent or adaround"),
    ],
)
def test_a_chain_that_makes_no_sense_is_refused(text: str, says: str) -> None:
    with pytest.raises(zp.RecipeError, match=says):
        spelled(text)


def test_a_rank_is_spelled_behind_the_name_and_32_goes_without() -> None:
    names = [method_named(text).name for text in ("lowrank32+gptq", "lowrank7+shift+gptq", "lowrank+gptq")]
    assert names == ["lowrank+gptq", "lowrank7+shift+gptq", "lowrank+gptq"]


@pytest.mark.parametrize("method", ["shift+gptq", "nearest+bias"])
def test_blocks_without_weights_pass_the_float_stream_on(method: str) -> None:
    """Such as an activation between layers, and a block that is kept."""
    layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))).eval()
    data = [torch.randn(16, 32, generator=torch.Generator().manual_seed(n)) for n in range(8)]
    made = zp.quantize_model(layers, "int3:g32", method=method, calibration=data, ignore=["1", "2"]).model
    assert made[1] is not layers[0]
    assert torch.equal(made[2].weight, layers[2].weight)
    assert float((made(data[0]) - layers(data[0])).detach().square().mean()) > 0
