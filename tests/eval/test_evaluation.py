"""Evaluations of tiny models against what transformers and numpy make of the same weights."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.oracles import llama_cpp_perplexity, tiny_models
from tests.oracles.tiny_tokenizers import TEXT
from tests.peers import transformers

import zeropoint as zp
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.read.source import open_source
from zeropoint.errors import CalibrationError, CheckpointError, UnsupportedError
from zeropoint.eval import Estimate, Evaluation, EvaluationSettings, TextTokenizer, evaluate
from zeropoint.eval.cloze import cloze_items

pytestmark = pytest.mark.rotating

CONTEXT = 32
PLAIN: dict[str, Any] = {"continuations": 0, "noise_floor": False, "context": CONTEXT}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama, what becomes of it in several layouts, and a text."""
    root = tmp_path_factory.mktemp("eval")
    tiny_models.write(root / "llama", "llama", dtype=torch.float32)
    for name, to, options in (
        ("w4", "int4:g32", {}), ("w8a8", "w8a8", {}), ("q8_0", "q8_0", {"format": "gguf"}),
    ):  # fmt: skip
        zp.quantize_checkpoint(root / "llama", root / name, to, **options)
    words = TEXT.split()
    (root / "text.txt").write_text(" ".join(words[(7 * n * n) % len(words)] for n in range(400)))
    return root


def logits_of(model: torch.nn.Module, given: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat(
            [model(window[None]).logits[:, CONTEXT // 2 : -1].float() for window in given]
        ).flatten(0, 1)


def by_others(
    own: torch.nn.Module, base: torch.nn.Module, folder: Path, windows: int
) -> dict[str, tuple[float, float | None]]:
    """Return the statistics of two models in memory, by numpy."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "llama")
    ids = torch.tensor(tokenizer((folder / "text.txt").read_text())["input_ids"])
    given = ids[: windows * CONTEXT].reshape(windows, CONTEXT)
    tokens = given[:, CONTEXT // 2 + 1 :].flatten()
    a, b = logits_of(own, given).numpy(), logits_of(base, given).numpy()
    return llama_cpp_perplexity.statistics(a, b, tokens.numpy(), exact=True)


def assert_same(
    found: Mapping[str, Estimate], expected: dict[str, tuple[float, float | None]], *, tolerance: float
) -> None:
    for name, (value, error) in expected.items():
        assert found[name].value == pytest.approx(value, rel=tolerance, abs=tolerance), name
        if error is not None:
            assert found[name].error == pytest.approx(error, rel=20 * tolerance, abs=tolerance), name


def assert_means(found: Evaluation, expected: set[str]) -> None:
    """Samples are numbers whose means the statistics are."""
    for model in found.models:
        assert model.samples.keys() == expected
        for name, values in model.samples.items():
            assert model.statistics[name].value == pytest.approx(values.mean()), name


def float_model(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_a_checkpoint_has_the_numbers_of_its_decoded_model(folder: Path, tmp_path: Path) -> None:
    found = zp.evaluate_checkpoint(
        folder / "w4", folder / "llama", folder / "text.txt", windows=5, continuations=0, context=CONTEXT
    )
    floor, own = found.models
    model = zp.dequantize_model(zp.load_checkpoint(float_model(folder / "llama"), folder / "w4").model)
    expected = by_others(model, float_model(folder / "llama"), folder, 5)
    # float32 products, summed in another order where blocks run alone.
    assert_same(own.statistics, expected, tolerance=1e-4)
    assert own.statistics["Mean KLD"].value > 0.001
    bfloat = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.bfloat16)
    assert_same(floor.statistics, by_others(bfloat, float_model(folder / "llama"), folder, 5), tolerance=0.01)
    assert 0 < floor.statistics["Mean KLD"].value < own.statistics["Mean KLD"].value
    assert found.noise_floor is floor
    assert (own.notes, found.encoder, found.notes) == ((), False, ())
    assert found.data[0].startswith("5 windows of 32 tokens, 75 of them scored (")


def test_a_model_that_reads_images_too_is_evaluated_on_text(folder: Path, tmp_path: Path) -> None:
    text = transformers.AutoConfig.from_pretrained(folder / "llama")
    tiny_models.llava(text, layers=1).save_pretrained(tmp_path / "llava")
    transformers.AutoTokenizer.from_pretrained(folder / "llama").save_pretrained(tmp_path / "llava")
    zp.quantize_checkpoint(tmp_path / "llava", tmp_path / "w4", "int4:g32")
    zp.dequantize_checkpoint(tmp_path / "w4", tmp_path / "floats", dtype="float32")
    own, base = (
        transformers.LlavaForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
        for path in (tmp_path / "floats", tmp_path / "llava")
    )
    found = zp.evaluate_checkpoint(
        tmp_path / "w4", tmp_path / "llava", folder / "text.txt", windows=3, **PLAIN
    )
    assert_same(found.models[0].statistics, by_others(own, base, folder, 3), tolerance=1e-5)


def test_the_reference_is_at_no_distance_from_itself(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "llama", tmp_path / "same")
    found = zp.evaluate_checkpoint(
        tmp_path / "same", folder / "llama", folder / "text.txt", **PLAIN | {"continuations": 4}
    )
    (own,) = found.models
    assert own.statistics["Mean KLD"] == Estimate(value=0.0, error=0.0)
    assert own.statistics["Mean PPL(Q)/PPL(base)"].value == 1
    assert own.statistics["Same top p"].value == 1
    assert own.statistics["Same continuations"].value == 1
    assert own.statistics["Median divergence length"].value == 16


def test_a_gguf_file_is_evaluated_with_its_own_tokenizer(folder: Path) -> None:
    (path,) = (folder / "q8_0").glob("*.gguf")
    found = zp.evaluate_checkpoint(path, folder / "llama", folder / "text.txt", **PLAIN, windows=3)
    zp_floats = folder / "q8_0_floats"
    zp.convert_checkpoint(path, zp_floats, to="float32")
    expected = by_others(float_model(zp_floats), float_model(folder / "llama"), folder, 3)
    assert_same(found.models[0].statistics, expected, tolerance=1e-4)
    # Its own tokenizer gives the same tokens of the text.
    text = (folder / "text.txt").read_text()
    own, base = (TextTokenizer(open_source(place))(text).ids for place in (path, folder / "llama"))
    assert torch.equal(own, base)
    # As the reference, too.
    other_way = zp.evaluate_checkpoint(folder / "llama", path, folder / "text.txt", **PLAIN, windows=3)
    own_ppl, base_ppl = (found.models[0].statistics[name] for name in ("Mean PPL(Q)", "Mean PPL(base)"))
    assert other_way.models[0].statistics["Mean PPL(base)"].value == pytest.approx(own_ppl.value, rel=1e-9)
    assert other_way.models[0].statistics["Mean PPL(Q)"].value == pytest.approx(base_ppl.value, rel=1e-9)


def test_inputs_are_quantized_where_the_checkpoint_says_so(folder: Path) -> None:
    found = zp.evaluate_checkpoint(folder / "w8a8", folder / "llama", folder / "text.txt", **PLAIN, windows=3)
    (own,) = found.models
    assert own.notes == (
        "inputs of 14 layers are quantized to int8:token:dialect=compressed-tensors dynamic",
    )
    loaded = zp.load_checkpoint(float_model(folder / "llama"), folder / "w8a8").model
    expected = by_others(loaded, float_model(folder / "llama"), folder, 3)
    # A value that lies between two codes may fall to either when sums are rounded otherwise.
    assert_same({k: own.statistics[k] for k in ("Mean PPL(Q)", "Mean KLD")}, {
        k: expected[k] for k in ("Mean PPL(Q)", "Mean KLD")
    }, tolerance=2e-3)  # fmt: skip
    weights_alone = zp.dequantize_model(
        zp.load_checkpoint(float_model(folder / "llama"), folder / "w8a8").model
    )
    floats = by_others(weights_alone, float_model(folder / "llama"), folder, 3)
    assert own.statistics["Mean KLD"].value > 1.5 * floats["Mean KLD"][0]


def test_a_cache_gives_the_same_numbers_and_is_refused_for_anything_else(
    folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "reference.safetensors"
    options = PLAIN | {"cache": cache, "windows": 3, "continuations": 3}
    given = folder / "w4", folder / "llama", folder / "text.txt"
    first = zp.evaluate_checkpoint(*given, **options)
    size = cache.stat().st_size
    assert zp.evaluate_checkpoint(*given, **options) == first
    assert zp.evaluate_checkpoint(*given, **options | {"cache": None}) == first
    assert (cache.stat().st_size, list(tmp_path.iterdir())) == (size, [cache])
    (tmp_path / "other.txt").write_text((folder / "text.txt").read_text()[::-1])
    for changed, message in (
        ({"windows": 4}, "number of windows or device; delete it, or name another file"),
        ({"context": 16}, "another text, context, number of windows or device"),
        ({"continuations": 2}, "another text"),
    ):
        with pytest.raises(CheckpointError, match=message):
            zp.evaluate_checkpoint(*given, **options | changed)
    with pytest.raises(CheckpointError, match="was made of another text"):
        zp.evaluate_checkpoint(given[0], given[1], tmp_path / "other.txt", **options)
    with pytest.raises(CheckpointError, match="was made of another reference"):
        zp.evaluate_checkpoint(folder / "llama", folder / "w4", given[2], **options | {"continuations": 0})
    cache.write_text("no cache")
    with pytest.raises(CheckpointError, match="exists and is no cache of zeropoint; move it away, or name"):
        zp.evaluate_checkpoint(*given, **options)


def test_several_models_share_the_pass_of_the_reference(folder: Path) -> None:
    names = [folder / "w4", folder / "w8a8"]
    found = zp.evaluate_checkpoint(names, folder / "llama", folder / "text.txt", **PLAIN, windows=2)
    assert [model.name for model in found.models] == [str(name) for name in names]
    for name, model in zip(names, found.models, strict=True):
        alone = zp.evaluate_checkpoint(name, folder / "llama", folder / "text.txt", **PLAIN, windows=2)
        assert alone.models[0] == model


def test_differences_of_models_are_paired_token_by_token(folder: Path) -> None:
    names = [folder / "w4", folder / "w8a8"]
    found = zp.evaluate_checkpoint(names, folder / "llama", folder / "text.txt", **PLAIN, windows=5)
    w4, w8 = found.models
    pair, key = w4.difference(w8), "Mean KLD"
    a, b = w4.statistics[key], w8.statistics[key]
    assert pair[key].value == pytest.approx(a.value - b.value)
    differences = w4.samples[key] - w8.samples[key]
    assert len(differences) == 75
    assert pair[key].error == pytest.approx(np.std(differences, ddof=1) / np.sqrt(75))
    likely = "Mean ln(PPL(Q)/PPL(base))"
    assert pair[likely].value == pytest.approx(w4.statistics[likely].value - w8.statistics[likely].value)
    assert pair["Same top p"].value == -w8.difference(w4)["Same top p"].value
    assert w4.difference(w4)[key] == Estimate(value=0.0, error=0.0)
    other = zp.evaluate_checkpoint(names[1], folder / "llama", folder / "text.txt", **PLAIN, windows=2)
    with pytest.raises(CalibrationError, match="other data; compare models of one evaluation"):
        w4.difference(other.models[0])


def test_continuations_are_those_of_the_reference_and_end_where_a_model_says_otherwise(folder: Path) -> None:
    found = zp.evaluate_checkpoint(
        folder / "w4", folder / "llama", folder / "text.txt", **PLAIN | {"continuations": 6, "windows": 2}
    )
    models = [float_model(folder / "llama"), zp.dequantize_model(
        zp.load_checkpoint(float_model(folder / "llama"), folder / "w4").model
    )]  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "llama")
    ids = torch.tensor(tokenizer((folder / "text.txt").read_text())["input_ids"])
    lengths = []
    for start in torch.linspace(0, len(ids) - 16, 6).long():
        prompt = ids[None, start : start + 16]
        base, own = (
            m.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, min_new_tokens=16,
                       do_sample=False, eos_token_id=None, pad_token_id=0)[0, 16:]
            for m in models
        )  # fmt: skip
        lengths.append(next((n for n in range(16) if base[n] != own[n]), 16))
    assert min(lengths) < 16
    assert found.models[0].statistics["Median divergence length"].value == np.median(lengths)
    share = sum(length == 16 for length in lengths) / 6
    assert found.models[0].statistics["Same continuations"].value == pytest.approx(share)
    assert_means(found, {"Mean KLD", "Mean ln(PPL(Q)/PPL(base))", "Same top p", "Same continuations"})


def test_choices_between_sentences_are_by_likelihood(folder: Path, tmp_path: Path) -> None:
    lines = [
        "The/at quick/jj brown/jj fox/nn jumps/vbz over/in the/at lazy/jj dog/nn ./.",
        "Then/rb all/abn the/at foxes/nns watch/vb until/in the/at morning/nn ./.",
        "Nobody/pn knows/vbz why/wrb the/at watch/nn sleeps/vbz or/cc matters/vbz ./.",
    ]
    (tmp_path / "tagged.txt").write_text("\n".join(lines))
    found = zp.evaluate_checkpoint(
        folder / "w4",
        folder / "llama",
        folder / "text.txt",
        **PLAIN,
        windows=2,
        cloze=tmp_path / "tagged.txt",
    )
    items = cloze_items(tmp_path / "tagged.txt", 500)
    assert len(items) == 3
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "llama")
    base = float_model(folder / "llama")
    right = 0
    for item in items:
        likely = []
        for text in (item.right, item.wrong):
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            with torch.no_grad():
                found_logits = base(ids).logits[0, :-1].double().log_softmax(-1)
            likely.append(float(found_logits.gather(-1, ids[0, 1:, None]).sum()))
        right += likely[0] > likely[1]
    assert found.models[0].statistics["Cloze accuracy (base)"].value == pytest.approx(right / 3)
    assert 0 < found.models[0].statistics["Cloze McNemar p"].value <= 1
    assert found.data[-1].startswith("3 choices between two sentences of ")
    assert_means(found, {"Mean KLD", "Mean ln(PPL(Q)/PPL(base))", "Same top p", "Cloze accuracy"})


def test_an_encoder_is_compared_by_its_embeddings(tmp_path: Path) -> None:
    tiny_models.write(tmp_path / "bert", "bert", dtype=torch.float32)
    zp.quantize_checkpoint(tmp_path / "bert", tmp_path / "w4", "int4:g32")
    words = TEXT.replace(".", "").replace("!", "").split()
    sentences = [" ".join(words[n : n + 3 + n % 5]) + " ." for n in range(30)]
    (tmp_path / "text.txt").write_text("\n".join(sentences))
    found = zp.evaluate_checkpoint(tmp_path / "w4", tmp_path / "bert", tmp_path / "text.txt", windows=20)
    assert found.encoder
    assert found.data == ("20 sentences, each embedded as the mean of all tokens' vectors",)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "bert")
    base = transformers.BertModel.from_pretrained(tmp_path / "bert").eval()
    own = transformers.BertModel.from_pretrained(tmp_path / "bert").eval()
    own = zp.dequantize_model(zp.load_checkpoint(own, tmp_path / "w4").model)
    chosen = [sentences[n * 30 // 20] for n in range(20)]
    cosines = []
    for text in chosen:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            a, b = (m(ids).last_hidden_state[0].mean(0) for m in (own, base))
        cosines.append(float(torch.cosine_similarity(a, b, dim=0)))
    assert found.models[1].statistics["Mean cosine"].value == pytest.approx(np.mean(cosines), abs=1e-5)
    assert found.models[1].statistics["Minimum cosine"].value == pytest.approx(min(cosines), abs=1e-5)
    assert 0.999 < found.models[0].statistics["Mean cosine"].value < 1
    assert_means(found, {"Mean cosine", "Top-10 neighbor overlap"})
    with pytest.raises(CalibrationError, match="is an encoder, and the reference a causal language model"):
        evaluate([tmp_path / "bert"], _llama(tmp_path), tmp_path / "text.txt")
    # A GGUF file has no pooler; its embeddings are those of the floats that it decodes to.
    zp.quantize_checkpoint(tmp_path / "bert", tmp_path / "q8_0", "q8_0", format="gguf")
    (path,) = (tmp_path / "q8_0").glob("*.gguf")
    zp.convert_checkpoint(path, tmp_path / "floats", to="float32")
    found = zp.evaluate_checkpoint(path, tmp_path / "floats", tmp_path / "text.txt", windows=20)
    assert found.models[1].statistics["Minimum cosine"].value == pytest.approx(1, abs=1e-6)


def _llama(folder: Path) -> Path:
    tiny_models.write(folder / "other", "llama", dtype=torch.float32)
    return folder / "other"


def test_other_tokens_than_those_of_the_reference_are_refused(folder: Path, tmp_path: Path) -> None:
    tiny_models.write(tmp_path / "mistral", "mistral", dtype=torch.float32)
    given = tmp_path / "mistral", folder / "llama"
    with pytest.raises(CalibrationError, match=r"tokenizers of .*mistral' and .*llama' differ on the text"):
        zp.evaluate_checkpoint(*given, folder / "text.txt", **PLAIN)
    save_file({"ids": torch.full((400,), 380)}, tmp_path / "ids.safetensors")
    with pytest.raises(
        CalibrationError, match=r"knows tokens 0\.\.\d+, and the text has token 380: vocabularies"
    ):
        zp.evaluate_checkpoint(*given, tmp_path / "ids.safetensors", **PLAIN)
    save_file({"ids": torch.full((400,), 7)}, tmp_path / "few.safetensors")
    with pytest.raises(CalibrationError, match=r"knows .* tokens, and the reference"):
        zp.evaluate_checkpoint(*given, tmp_path / "few.safetensors", **PLAIN)


def test_what_cannot_be_evaluated_says_why(folder: Path, tmp_path: Path) -> None:
    given = folder / "w4", folder / "llama"
    (tmp_path / "short.txt").write_text("a few words")
    with pytest.raises(CalibrationError, match="tokens, and two windows of 32 are needed"):
        zp.evaluate_checkpoint(*given, tmp_path / "short.txt", **PLAIN)
    with pytest.raises(
        CalibrationError, match="takes 256 tokens at most, and a window has 300; use context=256"
    ):
        zp.evaluate_checkpoint(*given, folder / "text.txt", **PLAIN | {"context": 300})
    with pytest.raises(CalibrationError, match=r"windows \(=0\) must be at least 1"):
        EvaluationSettings(windows=0)
    with pytest.raises(CheckpointError, match="more than the process may take"):
        evaluate(
            [given[0]],
            given[1],
            folder / "text.txt",
            settings=EvaluationSettings(**PLAIN),
            limits=Limits(workers=1, max_memory=1 << 14, base_memory=0),
        )
    config = (folder / "llama/config.json").read_text()
    shutil.copytree(folder / "llama", tmp_path / "odd")
    (tmp_path / "odd/config.json").write_text(
        config.replace("LlamaForCausalLM", "LlamaForTokenClassification")
    )
    with pytest.raises(UnsupportedError, match="is a LlamaForTokenClassification, and evaluated are causal"):
        evaluate([tmp_path / "odd"], given[1], folder / "text.txt")


def test_code_of_a_checkpoint_is_not_executed(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "llama", tmp_path / "code")
    config = (folder / "llama/config.json").read_text().rstrip().removesuffix("}")
    (tmp_path / "code/config.json").write_text(
        f'{config}, "auto_map": {{"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}}}'
    )
    marker = tmp_path / "executed"
    (tmp_path / "code/evil.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    found: Evaluation = zp.evaluate_checkpoint(
        tmp_path / "code", folder / "llama", folder / "text.txt", **PLAIN, windows=2
    )
    assert found.models[0].statistics["Mean KLD"].value == 0
    assert not marker.exists()
