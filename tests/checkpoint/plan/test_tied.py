"""A head that a checkpoint holds next to the embedding that it is tied to."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.checkpoint.written import CONFIG, LINEAR, ONE, quantize, save, tensors_of, weight
from tests.oracles import tiny_models
from tests.tensors import same_bytes

from zeropoint.architectures import heads_of
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.selection import Selection
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.verify.verification import verify

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
    config = str(result.plan.texts["config.json"])
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
    model = tiny_models.llama(tie_word_embeddings=True)
    tensors = {name: t.detach().clone() for name, t in model.state_dict().items()}
    tensors[HEAD] = tensors[TABLE].clone()
    save(
        tmp_path / "in",
        tensors,
        model.config.to_dict() | {"dtype": "float32", "architectures": ["LlamaForCausalLM"]},
    )
    quantize(tmp_path / "in", tmp_path / "out", "w8a16")
    assert HEAD not in tensors_of(tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", output_loading_info=True
        )
    assert not any(info.values())
    assert same_bytes(loaded.lm_head.weight.detach(), tensors[TABLE])


_CLASS = re.compile(r"^class (\w+)\(.*?(?=^class |\Z)", re.DOTALL | re.MULTILINE)
_KEYS = re.compile(r"_tied_weights_keys\s*=\s*\{(.*?)\}", re.DOTALL)


def tied_in_transformers() -> dict[str, set[str]]:
    """Return, by the name of an architecture, the linear layers whose weights transformers ties."""
    transformers = pytest.importorskip("transformers", reason="extra `hf`")
    found: dict[str, set[str]] = {}
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        for text in _CLASS.finditer(path.read_text()):
            keys = _KEYS.search(text[0])
            # What is read by number is an embedding, which no engine takes for a linear layer.
            names = re.findall(r'"([\w.]+)\.weight":', keys[1]) if keys else []
            heads = {
                name for name in names if not re.search(r"(?<!un)embed(?!_out)|shared|relative|norm$", name)
            }
            if heads and re.search("For|LMHead", text[1]):
                found[text[1]] = heads
    return found


def test_the_heads_that_transformers_ties_are_known() -> None:
    ties = tied_in_transformers()
    assert len(ties) > 200
    unknown = {
        name: heads - set(heads_of({"architectures": [name], "tie_word_embeddings": True}))
        for name, heads in ties.items()
    }
    assert {name: heads for name, heads in unknown.items() if heads} == {}


def test_whisper_is_loaded_with_its_tied_head(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="extra `hf`")
    config = transformers.WhisperConfig(
        vocab_size=90, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16,
        max_source_positions=50, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "source")
    quantize(tmp_path / "source", tmp_path / "out", "fp8_dynamic")
    loaded = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
    assert loaded.proj_out.weight is loaded.model.decoder.embed_tokens.weight
    sound, ids = torch.randn(2, 16, 100), torch.randint(0, 90, (2, 8))
    with torch.no_grad():
        ours, theirs = (m(input_features=sound, decoder_input_ids=ids).logits for m in (loaded, model))
    assert torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), 0) > 0.99


@pytest.mark.parametrize(
    ("architecture", "head"),
    [("WhisperForConditionalGeneration", "proj_out"), ("DistilBertForMaskedLM", "vocab_projector")],
)
def test_a_head_of_its_own_is_kept_whatever_its_name(architecture: str, head: str, tmp_path: Path) -> None:
    tensors = {LINEAR: weight(8, 32), f"{head}.weight": weight(24, 32)}
    for config, kept in ((CONFIG | {"architectures": [architecture]}, True), (CONFIG, False)):
        made = make_plan(open_source(save(tmp_path, tensors, config)), "w8a8", limits=ONE)
        assert (head not in {w.module for w in made.weights}) == kept
