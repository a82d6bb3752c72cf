"""Vision files against llama.cpp: its converter's tensors and metadata, and its encoder's image."""

import ctypes
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.oracle.test_llama_cpp_families import tensors, written
from tests.oracles import converted, tiny_families, tiny_vision

from zeropoint.checkpoint.plan.checkpoint_plan import conversion_plan, make_plan
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.registry import get_codec

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
MMPROJ = get_codec("mmproj")
OF_CONVERTER = {"GGUF.kv_count", "general.name", "general.size_label", "general.alignment"}
"""Metadata that no engine reads."""
TEXT = {"gemma3": "gemma3", "smolvlm": "llama", "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "llama4": "llama"}
"""Tiny models of text with the width of each."""
SIDES = {"qwen2_vl": 112, "qwen2_5_vl": 224}
"""Sides of images that llama.cpp takes as they are; the second has several windows."""
MISNAMED = {"llama4": ("attn_post_norm", "ln2")}
"""Names of the converter that llama.cpp does not look for, and those that it does."""


@pytest.fixture(scope="module", params=list(tiny_vision.MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """Return the name of a family, a folder with its checkpoint and vision file, and its model."""
    folder = tmp_path_factory.mktemp(request.param)
    made = tiny_vision.write(folder / "in", request.param)
    run(conversion_plan(open_source(folder / "in"), "float16", codec=MMPROJ), folder / "out")
    return request.param, folder, made


def fields(path: Path) -> dict[str, Any]:
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


def test_tensors_and_metadata_are_those_of_the_converter(
    model: tuple[str, Path, Any], tmp_path: Path
) -> None:
    name, folder, _ = model
    if not converted.CONVERTER.exists():
        pytest.skip("the converter is made by benchmarks/llama_cpp.sh")
    converted.convert_vision(folder / "in", tmp_path / "theirs.gguf")
    path = folder / "out/mmproj-model.gguf"
    wrong, right = MISNAMED.get(name, ("", ""))
    ours = tensors(path)
    theirs = {k.replace(wrong, right): v for k, v in tensors(tmp_path / "theirs.gguf").items()}
    assert {k: v[:2] for k, v in ours.items()} == {k: v[:2] for k, v in theirs.items()}
    assert [key for key in ours if ours[key][2].tobytes() != theirs[key][2].tobytes()] == []
    mine, yours = fields(path), fields(tmp_path / "theirs.gguf")
    assert {k: v for k, v in mine.items() if k not in OF_CONVERTER} == {
        k: v for k, v in yours.items() if k not in OF_CONVERTER
    }


def embedded(path: Path, text: Path, image: np.ndarray) -> torch.Tensor:
    """Return what llama.cpp's encoder makes of an image, (tokens, width)."""
    import llama_cpp
    from llama_cpp import mtmd_cpp

    engine = llama_cpp.Llama(str(text), n_ctx=64, n_threads=1, verbose=False)
    parameters = mtmd_cpp.mtmd_context_params_default()
    parameters.use_gpu, parameters.n_threads, parameters.warmup = False, 1, False
    context = mtmd_cpp.mtmd_init_from_file(str(path).encode(), engine.model, parameters)
    assert context is not None
    assert mtmd_cpp.mtmd_support_vision(context)
    data = (ctypes.c_uint8 * image.size).from_buffer_copy(image.tobytes())
    bitmaps = (mtmd_cpp.mtmd_bitmap_p_ctypes * 1)(mtmd_cpp.mtmd_bitmap_init(*image.shape[1::-1], data))
    said = mtmd_cpp.mtmd_default_marker()
    prompt = mtmd_cpp.mtmd_input_text()
    prompt.text, prompt.text_len, prompt.add_special, prompt.parse_special = said, len(said), False, True
    chunks = mtmd_cpp.mtmd_input_chunks_init()
    assert mtmd_cpp.mtmd_tokenize(context, chunks, ctypes.byref(prompt), bitmaps, 1) == 0
    found = []
    for number in range(mtmd_cpp.mtmd_input_chunks_size(chunks)):
        chunk = mtmd_cpp.mtmd_input_chunks_get(chunks, number)
        if mtmd_cpp.mtmd_input_chunk_get_type(chunk) == mtmd_cpp.MTMD_INPUT_CHUNK_TYPE_IMAGE:
            assert mtmd_cpp.mtmd_encode_chunk(context, chunk) == 0
            count = mtmd_cpp.mtmd_input_chunk_get_n_tokens(chunk)
            values = mtmd_cpp.mtmd_get_output_embd(context)
            found.append(np.ctypeslib.as_array(values, shape=(count, engine.n_embd())).copy())
    mtmd_cpp.mtmd_free(context)
    return torch.from_numpy(np.concatenate(found))


def features_of(name: str, made: Any, pixels: torch.Tensor) -> Any:
    """Return what transformers makes of an image, (1, 3, height, width)."""
    if name == "llama4":  # llama.cpp has the tokens of an image column by column
        found = made.multi_modal_projector(made.get_image_features(pixel_values=pixels).last_hidden_state)
        side = math.isqrt(found.shape[-2])
        return found.reshape(side, side, -1).transpose(0, 1)
    if not name.startswith("qwen"):
        return made.get_image_features(pixel_values=pixels[None] if name == "smolvlm" else pixels)
    size, merged = 14, 2
    high, wide = (each // size for each in pixels.shape[2:])
    cut = pixels.expand(2, -1, -1, -1).reshape(
        2, 3, high // merged, merged, size, wide // merged, merged, size
    )
    patches = cut.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(high * wide, -1)
    return made.get_image_features(pixel_values=patches, image_grid_thw=torch.tensor([[1, high, wide]]))


def test_an_image_becomes_what_transformers_makes_of_it(model: tuple[str, Path, Any], tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="made by benchmarks/llama_cpp.sh")
    name, folder, made = model
    tiny_families.write(tmp_path / "text", TEXT[name])
    side = SIDES.get(name, tiny_vision.SIDE)
    image = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    theirs = embedded(folder / "out/mmproj-model.gguf", written(tmp_path / "text", tmp_path / "gguf"), image)
    mean, std = (torch.tensor(tiny_vision.PROCESSOR[key]) for key in ("image_mean", "image_std"))
    pixels = ((torch.from_numpy(image).float() / 255 - mean) / std).permute(2, 0, 1)[None]
    with torch.no_grad():
        features = features_of(name, made, pixels)
    features = getattr(features, "pooler_output", features)
    ours = torch.cat([each.reshape(-1, each.shape[-1]) for each in features])
    # SmolVLM sees the whole image, and then its one slice. ggml's GELU is a table in float16.
    for each in theirs.reshape(-1, *ours.shape):
        assert float((each - ours).norm() / ours.norm()) < 5e-3


def test_a_quantized_vision_file_loads(model: tuple[str, Path, Any], tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="made by benchmarks/llama_cpp.sh")
    name, folder, _ = model
    run(make_plan(open_source(folder / "in"), "q8_0", codec=MMPROJ), tmp_path / "q8_0")
    tiny_families.write(tmp_path / "text", TEXT[name])
    side = tiny_vision.SIDE
    image = np.zeros((side, side, 3), dtype=np.uint8)
    text = written(tmp_path / "text", tmp_path / "gguf")
    ours, theirs = (
        embedded(path / "mmproj-model.gguf", text, image) for path in (tmp_path / "q8_0", folder / "out")
    )
    assert 0 < float((theirs - ours).norm() / ours.norm()) < 5e-2
