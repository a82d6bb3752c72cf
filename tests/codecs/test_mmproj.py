"""Vision files for llama.cpp's --mmproj; tests/oracle/test_llama_cpp_vision.py has llama.cpp itself."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tests.checkpoint.written import ONE, quantize, weight
from tests.checkpoint.written import save as written
from tests.oracles import tiny_vision

from zeropoint.checkpoint.plan.checkpoint_plan import conversion_plan
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.checkpoint.verify.verification import verify
from zeropoint.codecs.llama_cpp.vision_families import FAMILIES, vision_form
from zeropoint.codecs.registry import get_codec
from zeropoint.codecs.stored_forms import OMITTED
from zeropoint.errors import CheckpointError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of its own deprecations
MMPROJ = get_codec("mmproj")
GEMMA3, SMOLVLM = FAMILIES


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
        forms = {
            vision_form(family, f"{before}{own}encoder.layers.3.mlp.fc1.weight", (8, 4))
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
