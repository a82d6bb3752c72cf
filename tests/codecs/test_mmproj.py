"""Vision files for llama.cpp's --mmproj; tests/oracle/test_llama_cpp_vision.py has llama.cpp itself."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tests.checkpoint.written import ONE, quantize, tensors_of, weight
from tests.checkpoint.written import save as written
from tests.oracles import tiny_vision

import zeropoint as zp
from zeropoint.checkpoint.plan.checkpoint_plan import conversion_plan
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.checkpoint.verify.verification import verify
from zeropoint.codecs.llama_cpp.vision_families import FAMILIES, vision_form, vision_pieces
from zeropoint.codecs.registry import get_codec
from zeropoint.codecs.stored_forms import OMITTED
from zeropoint.errors import CheckpointError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of its own deprecations
MMPROJ = get_codec("mmproj")
GEMMA3 = FAMILIES[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    tiny_vision.write(folder, "gemma3")
    return folder


def test_a_file_has_the_vision_part_alone_under_names_that_gguf_py_knows(
    checkpoint: Path, tmp_path: Path
) -> None:
    plan = conversion_plan(open_source(checkpoint), "float16", codec=MMPROJ, limits=ONE)
    run(plan, tmp_path)
    found = gguf.GGUFReader(tmp_path / "mmproj-model.gguf")
    types = {t.name: t.tensor_type.name for t in found.tensors}
    assert all(name.startswith(("v.", "mm.")) for name in types)
    assert (types["v.patch_embd.weight"], types["mm.input_projection.weight"]) == ("F32", "F16")
    assert found.fields["general.architecture"].contents() == "clip"
    assert found.fields["clip.vision.projector.scale_factor"].contents() == 2
    assert any("of the text model, which the layout gguf writes" in note for note in plan.notes)


def test_a_quantized_vision_part_is_verified_with_its_original(checkpoint: Path, tmp_path: Path) -> None:
    quantize(checkpoint, tmp_path, "q8_0", codec=MMPROJ)
    assert verify(tmp_path, checkpoint, limits=ONE).problems == ()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.projector)
def test_names_with_and_without_the_model_before_them_are_the_same(family: Any) -> None:
    for prefix in family.prefixes:
        own = prefix.removeprefix("model.")
        up = next(old for old, new in family.layers.items() if new == "ffn_up")
        forms = {
            vision_form(family, f"{before}{own}{family.block}.3.{up}.weight", (8, 4))
            for before in ("", "model.")
        }
        assert {form.name for form in forms} == {"v.blk.3.ffn_up.weight"}
    assert vision_form(family, "lm_head.weight", (8, 4)) is OMITTED


def test_what_is_not_known_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no name in vision files of gemma3"):
        vision_form(GEMMA3, "vision_tower.vision_model.encoder.layers.0.gate.weight", (4, 4))
    llama = written(tmp_path / "llama", {"model.layers.0.mlp.up_proj.weight": weight(32, 32)})
    with pytest.raises(UnsupportedError, match="no model whose vision part is known here; known are gemma3"):
        quantize(llama, tmp_path / "out", "q8_0", codec=MMPROJ)
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = {"vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight": weight(32, 32)}
    with pytest.raises(UnsupportedError, match="says image_mean and image_std"):
        quantize(written(tmp_path / "bare", tensors, config), tmp_path / "none", "q8_0", codec=MMPROJ)
    del config["vision_config"]["image_size"]
    with pytest.raises(CheckpointError, match=r"does not say image_size in config\.json"):
        quantize(written(tmp_path / "sizes", tensors, config), tmp_path / "none", "q8_0", codec=MMPROJ)


def saved(checkpoint: Path, folder: Path) -> Path:
    """Write a checkpoint with the names that transformers saves Gemma 3 with."""
    tensors = {
        key.replace("vision_tower.vision_model.", "model.vision_tower.").replace(
            "language_model.model.", "model.language_model."
        ): value
        for key, value in tensors_of(checkpoint).items()
    }
    written(folder, tensors, json.loads((checkpoint / "config.json").read_text()))
    for name in ("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / name, folder)
    return folder


@pytest.mark.parametrize("layout", ["mmproj", "gguf"])
def test_a_file_is_verified_with_the_names_of_a_saved_checkpoint(
    layout: str, checkpoint: Path, tmp_path: Path
) -> None:
    source = saved(checkpoint, tmp_path / "in")
    quantize(source, tmp_path / "out", "q8_0", codec=get_codec(layout))
    assert verify(tmp_path / "out", source, limits=ONE).problems == ()
    (problem,) = verify(tmp_path / "out", checkpoint, limits=ONE).problems
    assert problem.where == "generation_config.json"  # which is no part of what the other has
    name = "model.vision_tower.encoder.layers.0.mlp.fc1.weight"
    other = dict(tensors_of(source)) | {name: torch.zeros(96, 64, dtype=torch.bfloat16)}
    written(source, other, json.loads((source / "config.json").read_text()))
    problems = verify(tmp_path / "out", source, limits=ONE).problems
    assert any("bound" in problem.what for problem in problems) == (layout == "mmproj"), problems


def test_queries_keys_and_values_lie_one_after_the_other() -> None:
    family = next(family for family in FAMILIES if "qwen2_vl" in family.types)
    pieces = vision_pieces(family, "model.visual.blocks.3.attn.qkv.bias", (9,), {})
    assert {piece.name.rpartition("attn.")[2]: piece.rows[0].at().tolist() for piece in pieces} == {
        "q.bias": [0, 1, 2], "k.bias": [3, 4, 5], "v.bias": [6, 7, 8],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "llama4"])
def test_divided_tensors_are_verified_and_come_back_whole(name: str, tmp_path: Path) -> None:
    tiny_vision.write(tmp_path / "in", name)
    quantize(tmp_path / "in", tmp_path / "out", "q8_0", codec=MMPROJ)
    assert verify(tmp_path / "out", tmp_path / "in", limits=ONE).problems == ()
    zp.dequantize_checkpoint(tmp_path / "out", tmp_path / "back")
    there, back = tensors_of(tmp_path / "in"), tensors_of(tmp_path / "back")
    assert {name: tensor.shape for name, tensor in back.items()} == {
        name: tensor.shape
        for name, tensor in there.items()
        if not name.startswith(("model.", "lm_head", "language_model"))
    }
    plain = [name for name, tensor in back.items() if tensor.dim() < 2 or "patch_embed." in name]
    assert all(torch.equal(back[name].to(there[name].dtype), there[name]) for name in plain)


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("qwen2_5_vl", "fullatt_block_indexes", [1, 2], "has every nth layer so"),
        ("qwen2_5_vl", "window_size", 56, "computes models of this family with 112"),
        ("gemma3", "hidden_act", "relu", "but llama.cpp has gelu"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(
    name: str, key: str, value: object, said: str, tmp_path: Path
) -> None:
    tiny_vision.write(tmp_path / "in", name)
    config = json.loads((tmp_path / "in/config.json").read_text())
    config["vision_config"][key] = value
    (tmp_path / "in/config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=said):
        quantize(tmp_path / "in", tmp_path / "out", "q8_0", codec=MMPROJ)
