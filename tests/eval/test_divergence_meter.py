"""Weights of a model that are replaced: what comes out is what a model with these weights gives."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.oracles import tiny_models
from tests.oracles.tiny_tokenizers import TEXT
from tests.peers import transformers

import zeropoint as zp
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.read.source import open_source
from zeropoint.errors import CalibrationError
from zeropoint.eval import DivergenceMeter, Estimate, TextTokenizer, WindowProbe, divergence_meter

CONTEXT = 32
LAST = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("meter")
    tiny_models.write(root, "llama", dtype=torch.float32)
    return root


@pytest.fixture(scope="module")
def probe(folder: Path) -> WindowProbe:
    words = TEXT.split()
    text = " ".join(words[(7 * n * n) % len(words)] for n in range(200))
    return WindowProbe(TextTokenizer(open_source(folder))(text).windows(CONTEXT, 3))


@pytest.fixture(scope="module")
def meter(folder: Path, probe: WindowProbe) -> Iterator[DivergenceMeter]:
    with divergence_meter(open_source(folder), probe) as found:
        yield found


def changed(weight: torch.Tensor) -> torch.Tensor:
    return weight + 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))


def expected(folder: Path, probe: WindowProbe, weights: dict[str, torch.Tensor]) -> float:
    """Return the mean KL divergence by transformers and torch alone."""
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    own = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in weights.items():
            own.get_submodule(name).weight.copy_(weight)
        p, q = (
            m(probe.windows.given).logits[:, CONTEXT // 2 : -1].double().log_softmax(-1) for m in (base, own)
        )
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize(
    "names",
    [
        ["model.layers.0.self_attn.q_proj"], [LAST], ["model.layers.0.mlp.down_proj", LAST],
        ["lm_head"], ["lm_head", LAST],
    ],
    ids="+".join,
)  # fmt: skip
def test_the_divergence_is_that_of_a_model_with_these_weights(
    names: list[str], meter: DivergenceMeter, folder: Path, probe: WindowProbe
) -> None:
    weights = {name: changed(meter.weight(name)) for name in names}
    found = meter.mean_divergence(weights)
    assert found.value == pytest.approx(expected(folder, probe, weights), rel=1e-4)
    assert found.value > 1e-4
    assert found.error is not None
    # All is as it was: what is asked first does not matter, and no change is no distance.
    assert meter.mean_divergence({}) == Estimate(value=0.0, error=0.0)
    assert meter.mean_divergence(weights) == found
    assert meter.mean_divergence({name: meter.weight(name) for name in names}).value == 0.0


def test_all_linear_layers_can_be_replaced(meter: DivergenceMeter) -> None:
    assert len(meter.modules) == 15
    assert {LAST, "lm_head"} <= set(meter.modules)
    scores = meter.scores({LAST: changed(meter.weight(LAST))})
    assert len(scores.kld) == 3 * 15
    assert (scores.kld >= -1e-12).all()


def test_a_tied_head_changes_embeddings_too(tmp_path: Path) -> None:
    tiny_models.write(tmp_path, "qwen2", dtype=torch.float32)
    words = TEXT.split() * 4
    own = WindowProbe(TextTokenizer(open_source(tmp_path))(" ".join(words)).windows(CONTEXT, 2))
    with divergence_meter(open_source(tmp_path), own) as meter:
        head = next((name for name in meter.modules if name.endswith("lm_head")), None)
        if head is not None:
            weights = {head: changed(meter.weight(head))}
            assert meter.mean_divergence(weights).value == pytest.approx(
                expected(tmp_path, own, weights), rel=1e-4
            )
        first = {"model.layers.0.mlp.up_proj": changed(meter.weight("model.layers.0.mlp.up_proj"))}
        assert meter.mean_divergence(first).value == pytest.approx(expected(tmp_path, own, first), rel=1e-4)


def test_names_and_shapes_that_the_model_has_not_are_errors(meter: DivergenceMeter) -> None:
    with pytest.raises(
        CalibrationError, match=r"'model.norm' is no Linear layer of LlamaForCausalLM; name one"
    ):
        meter.mean_divergence({"model.norm": torch.zeros(64)})
    with pytest.raises(CalibrationError, match=r"has shape \(2, 2\), and the model has \(96, 64\) there"):
        meter.mean_divergence({LAST: torch.zeros(2, 2)})
    assert meter.mean_divergence({}).value == 0


def test_a_quantized_checkpoint_is_as_it_decodes(
    meter: DivergenceMeter, folder: Path, probe: WindowProbe, tmp_path: Path
) -> None:
    zp.quantize_checkpoint(folder, tmp_path / "w4", "int4:g32")
    with divergence_meter(open_source(tmp_path / "w4"), probe, limits=Limits.default()) as own:
        weight = own.weight(LAST)
    assert torch.equal(weight, zp.quantize(meter.weight(LAST), "int4:g32").dequantize())
