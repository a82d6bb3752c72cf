"""Checkpoints whose biases take up the mean error of outputs: written, resumed, verified, loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint.model.test_solved_weights import Stopping, ids, stopping
from tests.checkpoint.written import digests, tensors_of
from tests.peers import transformers

import zeropoint as zp
from zeropoint.checkpoint.plan.config_and_index import MANIFEST
from zeropoint.checkpoint.plan.rescaled import RESCALED, folds_text, parsed_folds
from zeropoint.methods.channels import ChannelFold

pytestmark = pytest.mark.rotating

__all__ = ["stopping"]

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512,
    "initializer_range": 0.1,
}  # fmt: skip
Make = Callable[[], torch.nn.Module]
FAMILIES: dict[str, Make] = {
    "qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**SIZES, intermediate_size=128, num_key_value_heads=2)
    ),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(**SIZES, ffn_dim=128, word_embed_proj_dim=64, init_std=0.1)
    ),
    "neox": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**SIZES, intermediate_size=128)
    ),
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES, intermediate_size=128)),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SIZES, intermediate_size=128, num_key_value_heads=2, attention_bias=True, mlp_bias=True
        )
    ),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints of bfloat16 of families of models, whose biases are not zero."""
    root = tmp_path_factory.mktemp("sources")

    def source(name: str) -> Path:
        if not (root / name).exists():
            torch.manual_seed(0)
            model = FAMILIES[name]().eval()
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    if key.endswith("bias"):
                        parameter.normal_(0, 0.3)
            model.to(torch.bfloat16).save_pretrained(root / name)
        return root / name

    return source


Sources = Callable[[str], Path]


def quantize(source: Path, out: Path, to: str = "int3:g32", **options: Any) -> zp.RunResult:
    given = {"method": "nearest+bias", "calibration": ids(), "force": True, **options}
    return zp.quantize_checkpoint(source, out, to, **given)


@pytest.mark.parametrize(
    ("family", "biases", "weights"), [("qwen2", 6, 14), ("opt", 12, 12), ("neox", 8, 8), ("bert", 13, 13)]
)
@pytest.mark.parametrize("method", ["nearest+bias", "awq+shift+gptq+bias"])
def test_biases_of_a_family_are_corrected_and_verified(
    sources: Sources, tmp_path: Path, family: str, biases: int, weights: int, method: str
) -> None:
    result = quantize(sources(family), tmp_path / "out", method=method)
    said = f"the biases of {biases} of {weights} weights take up the mean error of outputs"
    (note,) = [note for note in result.notes if note.startswith(said)]
    assert (f"; {weights - biases} have none" in note) == (family == "qwen2")
    folds, *_ = parsed_folds((tmp_path / "out" / RESCALED).read_text())
    added = {name: fold for name, fold in folds.items() if fold.added is not None}
    assert len(added) == biases
    before, after = tensors_of(sources(family)), tensors_of(tmp_path / "out")
    for name, fold in added.items():
        assert torch.equal(after[name], fold.of(before[name]))
        assert not torch.equal(after[name], fold.rescaling.of(before[name]))
    proven = zp.verify_checkpoint(tmp_path / "out", sources(family))
    assert proven.ok
    assert any(f"{biases} biases differ from the original by what {RESCALED} says" in n for n in proven.notes)


def test_weights_that_are_rounded_together_keep_the_corrections_of_their_start(
    sources: Sources, tmp_path: Path
) -> None:
    for method in ("shift+gptq+bias", "shift+signround+bias"):
        quantize(sources("opt"), tmp_path / method, method=method)
    before = tensors_of(sources("opt"))
    start, after = (
        parsed_folds((tmp_path / name / RESCALED).read_text())[0]
        for name in ("shift+gptq+bias", "shift+signround+bias")
    )
    first = "model.decoder.layers.0.self_attn.q_proj.bias"
    assert len(start) == len(after) == 12
    assert start[first].added is not None
    assert torch.equal(start[first].added, after[first].added), "of the same codes, on the same inputs"
    written = tensors_of(tmp_path / "shift+signround+bias")
    assert torch.equal(written[first], after[first].of(before[first]))
    assert zp.verify_checkpoint(tmp_path / "shift+signround+bias", sources("opt")).ok


@pytest.mark.parametrize(("to", "layout"), [("q8_0", "gguf"), ("q4_0", "gguf"), ("int4:g32", None)])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_what_is_added_follows_from_the_files_in_the_order_of_the_original(
    sources: Sources, tmp_path: Path, family: str, to: str, layout: str | None
) -> None:
    """llama.cpp has the rows of queries and keys of a Llama in another order."""
    source, module = sources(family), "model.layers.0.self_attn.k_proj"
    quantize(source, tmp_path / "out", to, format=layout)
    assert zp.verify_checkpoint(tmp_path / "out", source).ok
    zp.dequantize_checkpoint(tmp_path / "out", tmp_path / "floats", dtype="float32")
    before, after = tensors_of(source), tensors_of(tmp_path / "floats")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    seen: list[torch.Tensor] = []
    model.get_submodule(module).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        model(ids()[:7])  # the last window of eight is held out
    mean = seen[0].flatten(0, 1).double().mean(0)
    lost = (before[f"{module}.weight"].double() - after[f"{module}.weight"].double()) @ mean
    fold = parsed_folds((tmp_path / "out" / RESCALED).read_text())[0][f"{module}.bias"]
    assert fold.added is not None
    assert float((fold.added - lost).norm() / lost.norm()) < 0.01
    changed = after[f"{module}.bias"].double() - before[f"{module}.bias"].double()
    assert float((changed - lost).abs().max()) < 2.0**-8  # biases are of bfloat16


def test_a_corrected_model_is_closer_to_the_original_on_tokens_that_were_not_learned(
    sources: Sources, tmp_path: Path
) -> None:
    states = []
    fresh = torch.randint(0, 512, (16, 24), generator=torch.Generator().manual_seed(5))
    folders = {"float": sources("opt")}
    for method in ("nearest", "nearest+bias"):
        given = None if method == "nearest" else ids()
        quantize(sources("opt"), tmp_path / method, method=method, calibration=given)
        folders[method] = tmp_path / f"{method}-floats"
        zp.dequantize_checkpoint(tmp_path / method, folders[method], dtype="float32")
    for folder in folders.values():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            states.append(model(fresh).logits)
    plain, corrected = (float((found - states[0]).square().sum()) for found in states[1:])
    assert corrected < 0.95 * plain


def test_a_run_that_is_interrupted_resumes_to_the_same_biases(
    sources: Sources, tmp_path: Path, stopping: Stopping
) -> None:
    given = {"method": "shift+gptq+bias"}
    quantize(sources("opt"), tmp_path / "whole", **given)
    with stopping(5):
        quantize(sources("opt"), tmp_path / "out", **given)
    quantize(sources("opt"), tmp_path / "out", **given, workers=1)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_a_bias_that_is_not_what_the_file_says_is_found(sources: Sources, tmp_path: Path) -> None:
    quantize(sources("opt"), tmp_path / "out")
    path = tmp_path / "out" / RESCALED
    document = json.loads(path.read_text())
    name = next(iter(document["tensors"]))
    (tmp_path / "out" / MANIFEST).unlink()
    (file,) = (tmp_path / "out").glob("*.safetensors")
    whole = load_file(file)
    save_file({**whole, name: whole[name] + 1}, file, metadata={"format": "pt"})
    found = zp.verify_checkpoint(tmp_path / "out", sources("opt"))
    assert [problem.where for problem in found.problems] == [name]
    save_file(whole, file, metadata={"format": "pt"})
    assert zp.verify_checkpoint(tmp_path / "out", sources("opt")).ok
    document["tensors"][name]["added"] = "AAA="
    path.write_text(json.dumps(document))
    with pytest.raises(zp.CheckpointError, match=r"damaged|another size"):
        zp.verify_checkpoint(tmp_path / "out", sources("opt"))


def test_what_is_added_is_kept_in_texts_to_the_bit() -> None:
    added = torch.randn(7, generator=torch.Generator().manual_seed(0))
    (fold,) = parsed_folds(folds_text({"a": ChannelFold(rows=torch.arange(7), added=added)}))[0].values()
    assert fold.added is not None
    assert torch.equal(fold.added, added)
    assert fold.of(torch.ones(7))[0] == 1 + added[0]
    with pytest.raises(ValueError, match="not finite"):
        parsed_folds(folds_text({"a": ChannelFold(added=torch.tensor([torch.nan]))}))


def test_what_has_no_bias_or_no_second_stream_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(zp.UnsupportedError, match=r"corrects biases, and no layer .*; use nearest$"):
        quantize(source, tmp_path / "out", ignore="lm_head")
    with pytest.raises(zp.CalibrationError, match="corrects a bias by the inputs of the float and of the"):
        quantize(source, tmp_path / "out", calibration=None)
    assert not list(tmp_path.iterdir())


def test_the_model_in_memory_has_the_biases_of_the_files(tmp_path: Path) -> None:
    model = FAMILIES["opt"]().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(0, 0.3)
    model.save_pretrained(tmp_path / "source")
    zp.quantize_checkpoint(
        tmp_path / "source", tmp_path / "out", "int4:g32", method="gptq+bias", calibration=ids()
    )
    batches = [{"input_ids": row[None]} for row in ids()]
    made = zp.quantize_model(
        model, "int4:g32", method="gptq+bias", calibration=batches, ignore="*head*"
    ).model
    found = dict(made.named_parameters())
    files = tensors_of(tmp_path / "out")
    assert torch.equal(found["model.decoder.layers.1.fc2.bias"], files["model.decoder.layers.1.fc2.bias"])
