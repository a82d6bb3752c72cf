"""Recipes of families: models of each, quantized, loaded by transformers and compared with their floats."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.architectures.trial import problem_of, save
from tests.architectures.zoo import ZOO
from tests.checkpoint.written import ONE

from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.recipe import RecipeText
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.registry import get_codec
from zeropoint.errors import RecipeError
from zeropoint.recipes import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of its own deprecations
BY_NAME = {animal.name: animal for animal in ZOO}
QUICK = (("llama", "Llama"), ("mixtral", "Mixtral"), ("deepseek", "DeepSeek-V3"), ("bert", "BERT"))
SLOW = (
    ("mistral", "Mistral"), ("qwen", "Qwen2"), ("qwen", "Qwen3"), ("gemma", "Gemma 2"),
    ("gemma", "Gemma 3 (text)"), ("qwen2-moe", "Qwen2-MoE"), ("qwen3-moe", "Qwen3-MoE"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "name"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)]
)
def test_a_recipe_gives_what_transformers_loads(family: str, name: str, tmp_path: Path) -> None:
    animal = BY_NAME[name]
    source = open_source(save(animal, tmp_path / "in", torch.bfloat16))
    plan = make_plan(source, RecipeText.named(family), limits=ONE)
    run(plan, tmp_path / "codes")
    assert problem_of(animal, tmp_path, "w8a16") is None
    assert not plan.unfit
    schemes = Counter(weight.layer.name for weight in plan.weights)
    assert schemes.keys() == ({"w8a16"} if family == "bert" else {"w4a16", "w8a16"})
    assert {weight.method for weight in plan.weights} == {"mse"}
    attention = {w.layer.name for w in plan.weights if ".self_attn." in w.module}
    assert attention == (set() if family == "bert" else {"w8a16"})


def test_experts_of_gpt_oss_get_the_layout_of_its_own_checkpoints(tmp_path: Path) -> None:
    source = open_source(save(BY_NAME["gpt-oss"], tmp_path / "in", torch.bfloat16))
    plan = make_plan(source, RecipeText.named("gpt-oss"), limits=ONE, codec=get_codec("gpt-oss"))
    run(plan, tmp_path / "codes")
    assert {weight.module.rpartition(".")[2] for weight in plan.weights} == {"gate_up_proj", "down_proj"}
    assert problem_of(BY_NAME["gpt-oss"], tmp_path, "mxfp4a16") is None


def test_every_family_is_tried() -> None:
    assert {family for family, _ in (*QUICK, *SLOW)} | {"gpt-oss"} == FAMILIES.keys()


def test_a_file_comes_before_a_family_and_a_slip_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"'lama' cannot be read.*; check the file, or name a family"):
        RecipeText.named("lama")
    with pytest.raises(RecipeError, match=r"'lama.yaml' cannot be read: [^;]*; check the file$"):
        RecipeText.named("lama.yaml")
    (tmp_path / "llama").write_text("default: w8a16")
    assert RecipeText.named("llama").text == "default: w8a16"
