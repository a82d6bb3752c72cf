"""The commands on the pages of model families, run on tiny models, whose results transformers loads."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.architectures.trial import problem_of, save
from tests.architectures.zoo import ZOO
from tests.docs.page_commands import DOCS, commands, run_command
from tests.oracles import tiny_models
from tests.peers import transformers as tf

import zeropoint as zp

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of its own deprecations
FOLDER = DOCS / "models"
BY_NAME = {animal.name: animal for animal in ZOO}
ANIMALS = {
    "llama": "Llama", "qwen": "Qwen3", "mistral": "Mistral", "gemma": "Gemma 3 (text)", "gpt-oss": "gpt-oss",
    "deepseek": "DeepSeek-V3", "bert": "BERT", "vit": "ViT", "whisper": "Whisper",
}  # fmt: skip
TINY = {"llama": "llama3", "qwen": "qwen3", "mistral": "mistral", "gemma": "gemma3", "bert": "bert"}
"""Models with tokenizers, for files of llama.cpp."""
QUICK = ("flux 1", "flux 2", "flux 3")
"""What needs no transformers."""
BFLOAT16 = 2.0**-8
"""Most that rounding to bfloat16 changes."""


def marked(case: str) -> object:
    return case if case in QUICK else pytest.param(case, marks=pytest.mark.slow)


CASES = [f"{path.stem} {n}" for path in sorted(FOLDER.glob("*.md")) for n, _ in enumerate(commands(path), 1)]


def test_each_family_has_a_page_with_commands() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == {*ANIMALS, "flux"}
    assert {case.partition(" ")[0] for case in CASES} == {*ANIMALS, "flux"}
    assert set(QUICK) <= set(CASES)


def flux(folder: Path) -> None:
    """Write tensors with the names of a transformer of diffusers, which is not installed."""
    names = [
        f"single_transformer_blocks.0.{part}" for part in ("attn.to_q", "attn.to_k", "proj_mlp", "proj_out")
    ]
    torch.manual_seed(0)
    tensors = {f"{name}.weight": torch.randn(128, 128).bfloat16() for name in names}
    folder.mkdir()
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(
        '{"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.42.1"}'
    )


def source_for(page: str, words: list[str], folder: Path) -> None:
    """Write MODEL for a command of a page."""
    if page == "flux":
        flux(folder)
    elif any(word in words for word in ("q4_k_m", "gguf")):
        tiny_models.write(folder, TINY[page])
    elif page == "deepseek":
        save(BY_NAME["DeepSeek-V3"], folder.with_name("before"), torch.bfloat16)
        zp.quantize_checkpoint(
            folder.with_name("before"), folder, "fp8_block", format="fp8-block", force=True
        )
    else:
        save(BY_NAME[ANIMALS[page]], folder, torch.bfloat16)


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_a_command_writes_what_loads(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, _, number = case.partition(" ")
    lines = commands(FOLDER / f"{page}.md")
    words = lines[int(number) - 1]
    monkeypatch.chdir(tmp_path)
    source_for(page, words, tmp_path / "MODEL")
    run_command(lines, int(number))
    out = tmp_path / words[2]
    if words[0] in ("dequantize", "convert"):
        found = zp.compare_checkpoints(tmp_path / words[1], out)
        assert found.equality.of_bits or (words[0] == "dequantize" and found.error.relative < BFLOAT16)
        return
    assert zp.verify_checkpoint(out, tmp_path / "MODEL").ok
    if (out / "model.gguf").is_file() or page == "flux":
        return
    out.rename(tmp_path / "codes")
    scheme = "fp8_dynamic" if "fp8_dynamic" in words else {"gpt-oss": "mxfp4a16"}.get(page, "w8a16")
    assert problem_of(BY_NAME[ANIMALS[page]], tmp_path, scheme) is None


@pytest.mark.parametrize("page", sorted(ANIMALS))
def test_the_class_that_a_page_loads_with_is_one_of_transformers(page: str) -> None:
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    (names,) = re.findall(r"^from transformers import (.*)$", text, flags=re.MULTILINE)
    assert all(hasattr(tf, name) for name in names.split(", "))
