"""A head that a checkpoint holds beside the embedding that it is tied to."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.checkpoint.written import CONFIG, LINEAR, ONE, quantize, same_bytes, save, tensors_of, weight

from zeropoint.checkpoint.plan import make_plan
from zeropoint.checkpoint.selection import Selection
from zeropoint.checkpoint.source import open_source
from zeropoint.checkpoint.verify import verify

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
TIED = CONFIG | {"tie_word_embeddings": True}


def both(head: torch.Tensor, table: torch.Tensor) -> dict[str, torch.Tensor]:
    return {LINEAR: weight(8, 32), TABLE: table, HEAD: head}


def test_a_tied_head_with_the_bytes_of_the_embedding_is_stored_once(tmp_path: Path) -> None:
    table = weight(24, 32, seed=1)
    source = save(tmp_path / "in", both(table.clone(), table), TIED)
    result = quantize(source, tmp_path / "out")
    written = tensors_of(tmp_path / "out")
    assert HEAD not in written
    assert same_bytes(written[TABLE], table)
    note = f"'{HEAD}' is left out: config.json ties it to '{TABLE}', which is the same"
    assert note in result.plan.notes
    config = result.plan.texts["config.json"]
    assert '"lm_head"' in config, "loaders must not take the head for a quantized layer"
    verification = verify(tmp_path / "out", source, limits=ONE)
    assert verification.ok, verification.problems


@pytest.mark.parametrize(
    ("config", "change"),
    [(CONFIG, "nothing"), (TIED, "last bit"), (TIED, "sign of zero"), (TIED, "dtype"), (TIED, "shape")],
)
def test_every_other_head_stays(config: dict[str, object], change: str, tmp_path: Path) -> None:
    table = weight(24, 32, seed=1)
    table[3, 4] = 0.0
    head = table.clone()
    if change == "last bit":
        head.view(torch.int32)[-1, -1] ^= 1
    elif change == "sign of zero":
        head[3, 4] = -0.0
    elif change == "dtype":
        head = head.to(torch.bfloat16)
    elif change == "shape":
        head = head[:-1].clone()
    quantize(save(tmp_path / "in", both(head, table), config), tmp_path / "out")
    written = tensors_of(tmp_path / "out")
    assert same_bytes(written[HEAD], head)
    assert same_bytes(written[TABLE], table)


def test_a_head_in_another_shard_is_compared_too(tmp_path: Path) -> None:
    table = weight(24, 32, seed=1)
    shards = {f"model-0000{n}-of-00002.safetensors": t for n, t in ((1, {TABLE: table}), (2, {HEAD: table}))}
    source = save(tmp_path / "in", {LINEAR: weight(8, 32)}, TIED)
    (source / "model.safetensors").unlink()
    shards["model-00001-of-00002.safetensors"][LINEAR] = weight(8, 32)
    for name, tensors in shards.items():
        save_file(tensors, source / name)
    weight_map = {t: name for name, tensors in shards.items() for t in tensors}
    index = f'{{"metadata": {{}}, "weight_map": {str(weight_map).replace(chr(39), chr(34))}}}'
    (source / "model.safetensors.index.json").write_text(index)
    quantize(source, tmp_path / "out")
    assert HEAD not in tensors_of(tmp_path / "out")


def test_a_head_that_is_quantized_by_name_is_written(tmp_path: Path) -> None:
    table = weight(24, 32, seed=1)
    source = open_source(save(tmp_path, both(table.clone(), table), TIED))
    made = make_plan(source, "w8a8", selection=Selection(include=("lm_head",)), limits=ONE)
    assert [w.module for w in made.weights if w.module == "lm_head"] == ["lm_head"]


def test_transformers_ties_the_head_that_was_left_out(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="extra `hf`")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, vocab_size=32,
        tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    tensors = {name: t.detach().clone() for name, t in model.state_dict().items()}
    tensors[HEAD] = tensors[TABLE].clone()
    save(tmp_path / "in", tensors, config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    quantize(tmp_path / "in", tmp_path / "out", "w8a16")
    assert HEAD not in tensors_of(tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", output_loading_info=True
        )
    assert not any(info.values())
    assert same_bytes(loaded.lm_head.weight.detach(), tensors[TABLE])
