"""How much layers matter: noise in the model, importance of inputs, and the evolution of a choice."""

import itertools
import json
import math
import random
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.oracles import tiny_llama
from tests.peers import transformers

import zeropoint as zp
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.plan.selection import Selection
from zeropoint.checkpoint.read.source import open_source
from zeropoint.codecs.registry import get_codec
from zeropoint.errors import CalibrationError, RecipeError, UnsupportedError
from zeropoint.own_files import OwnFile
from zeropoint.search import evolution, weighing
from zeropoint.search.evolution import Evolved, Terms, evolved, mutated
from zeropoint.search.inputs import of_imatrix
from zeropoint.search.search_result import SearchResult
from zeropoint.search.search_state import FORMAT, STATE, SearchState
from zeropoint.search.searching import search, search_request
from zeropoint.search.weighing import NOISE, by_noise, noisy, windows_of

pytestmark = pytest.mark.rotating

ONE = Limits(workers=1)
CANDIDATES = "int4:g32,int8:g32"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    tiny_llama.save(folder, torch.float32)
    return folder


def searched(source: Path, budget: str = "6bpw", **options: object) -> SearchResult:
    wanted = search_request(budget, CANDIDATES, get_codec("compressed-tensors"), limits=ONE)
    return search(open_source(source), wanted, **options)  # type: ignore[arg-type]


def divergence(source: Path, weights: dict[str, torch.Tensor]) -> float:
    """Return the mean KL divergence on random tokens, by transformers and torch alone."""
    base = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    own = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    given = windows_of(open_source(source), None).given
    with torch.no_grad():
        for name, weight in weights.items():
            own.get_submodule(name).weight.copy_(weight)
        half = given.shape[1] // 2
        p, q = (m(given).logits[:, half:-1].double().log_softmax(-1) for m in (base, own))
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_a_layer_counts_by_the_divergence_that_noise_in_it_makes(source: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    result = searched(source, state=state, weigh=partial(by_noise, None, ONE))
    assert result.importance == "linearity"
    held = load_file(source / "model.safetensors")
    for choice in result.chosen[:3]:
        modules = [weight.module for weight in choice.layer.weights]
        weights = {m: noisy(held[f"{m}.weight"], NOISE, zlib.crc32(m.encode())) for m in modules}
        slope = divergence(source, weights) / NOISE**2
        assert choice.loss == pytest.approx(slope * choice.relative**2, rel=1e-3)  # float32 sums differ
    again = searched(source, "7bpw", state=state, weigh=partial(by_noise, None, ONE))
    fresh = searched(source, "7bpw", weigh=partial(by_noise, None, ONE))
    assert again.allocation == fresh.allocation


def test_where_columns_count_by_their_inputs_so_does_the_noise(source: Path, tmp_path: Path) -> None:
    held = load_file(source / "model.safetensors")
    modules = [name.removesuffix(".weight") for name, w in held.items() if "_proj" in name and w.ndim == 2]
    squares = {m: torch.arange(1.0, held[f"{m}.weight"].shape[1] + 1).double() ** 2 for m in modules}
    path = tmp_path / "imatrix.dat"
    with path.open("wb") as file:
        file.write(struct.pack("<i", len(squares)))
        for module, values in squares.items():
            file.write(struct.pack("<i", len(module)) + module.encode() + struct.pack("<ii", 1, len(values)))
            file.write(values.float().numpy().tobytes())
    wanted = search_request("6bpw", CANDIDATES, get_codec("compressed-tensors"), limits=ONE)
    weigh, state = partial(by_noise, None, ONE), tmp_path / "state"
    searched(source, state=state, weigh=weigh)  # what is kept without inputs is not taken for these
    result = search(
        open_source(source), replace(wanted, inputs=partial(of_imatrix, path)), state=state, weigh=weigh
    )
    for choice in result.chosen[:3]:
        weights, sizes = {}, []
        for module in (weight.module for weight in choice.layer.weights):
            weight = held[f"{module}.weight"]
            weights[module] = noisy(weight, NOISE, zlib.crc32(module.encode()))
            noise = ((weights[module] - weight).double().square() * squares[module]).sum()
            sizes.append(float(noise / (weight.double().square() * squares[module]).sum()))
        slope = divergence(source, weights) / (sum(sizes) / len(sizes))
        assert choice.loss == pytest.approx(slope * choice.relative**2, rel=1e-3)


def test_a_layer_may_lose_what_the_model_diverges_with_each_candidate_in_it_alone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, candidates, tries = tmp_path / "state", "int4:g32,nvfp4a16,keep", weighing.decoded
    calls: list[str] = []

    def counted(*given: object) -> object:
        if len(calls) == 13 and "resumed" not in calls:
            raise KeyboardInterrupt
        calls.append(given[2])  # type: ignore[arg-type]
        return tries(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(weighing, "decoded", counted)
    with pytest.raises(KeyboardInterrupt):
        zp.search_checkpoint(source, "6bpw", candidates, state=state, importance="divergence")
    calls.append("resumed")
    result = zp.search_checkpoint(source, "6bpw", candidates, state=state, importance="divergence")
    weights = sum(len(choice.layer.weights) for choice in result.chosen)
    assert 2 * weights <= len(calls) - 1 <= 2 * weights + 6, "at most one layer is tried again"
    assert result.importance == "divergence"
    tried = {choice.candidate for choice in result.chosen}
    assert len(tried) > 1
    for text in tried - {"keep"}:
        zp.quantize_checkpoint(source, tmp_path / "out", text, overwrite=True)
        zp.convert_checkpoint(tmp_path / "out", tmp_path / "floats", to="float32", overwrite=True)
        held = load_file(next((tmp_path / "floats").glob("*.safetensors")))
        choice = next(choice for choice in result.chosen if choice.candidate == text)
        modules = [weight.module for weight in choice.layer.weights]
        said = divergence(source, {module: held[f"{module}.weight"] for module in modules})
        assert choice.loss == pytest.approx(said, rel=1e-3)
    calls[:] = ["resumed"]
    again = zp.search_checkpoint(source, "7bpw", candidates, state=state, importance="divergence")
    assert calls == ["resumed"], "all that is asked for is known"
    assert again.allocation.loss < result.allocation.loss
    more, text = f"{candidates},int6:g32", tmp_path / "text.txt"
    zp.search_checkpoint(source, "6bpw", more, state=state, importance="divergence")
    assert set(calls) == {"resumed", "int6:g32"}
    text.write_text(" ".join(f"w{n % 200}" for n in range(300)))
    calls[:] = ["resumed"]
    zp.search_checkpoint(source, "6bpw", "nvfp4a16,keep", state=state, importance="divergence", text=text)
    assert set(calls) == {"resumed", "nvfp4a16"}, "other tokens are tried"


def test_noise_has_the_norm_that_is_asked_for_and_is_the_same_each_time() -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    found = noisy(weight, 0.1, 7)
    assert float((found - weight).norm() / weight.norm()) == pytest.approx(0.1, rel=0.02)
    assert torch.equal(found, noisy(weight, 0.1, 7))
    assert not torch.equal(found, noisy(weight, 0.1, 8))


def test_text_and_token_ids_are_windows_of_the_model(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{n % 200}" for n in range(300)))
    assert windows_of(open_source(source), text).given.shape == (2, 128)
    text.write_text("w1")
    with pytest.raises(CalibrationError, match="two windows of 128 are needed"):
        windows_of(open_source(source), text)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    with pytest.raises(UnsupportedError, match=r"no vocab_size for random tokens; pass text=FILE"):
        windows_of(open_source(tmp_path / "bare"), None)
    for part, size in ((5, 7), ([1], 7), ({"vocab_size": 9}, 9)):
        (tmp_path / "bare" / "config.json").write_text(json.dumps({"vocab_size": 7, "text_config": part}))
        assert windows_of(open_source(tmp_path / "bare"), None).given.max() < size


def test_an_embedding_is_not_tried_with_noise_and_says_so(source: Path) -> None:
    wanted = search_request(
        "6bpw", CANDIDATES, get_codec("compressed-tensors"), limits=ONE,
        selection=Selection(include=("*embed_tokens",)),
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"embed_tokens' is no linear layer of the model"):
        search(open_source(source), wanted, weigh=partial(by_noise, None, ONE))


def test_another_word_for_importance_is_refused(source: Path) -> None:
    with pytest.raises(RecipeError, match="importance 'much' must be equal, linearity or divergence"):
        zp.search_checkpoint(source, "6bpw", CANDIDATES, importance="much")


TERMS = Terms(options=[[("a", 1), ("b", 2), ("c", 4)]] * 6, budget=14)


def test_mutations_keep_the_budget_and_change_the_choice() -> None:
    seen = set()
    chosen = ("a", "b", "c", "a", "b", "c")
    for seed in range(200):
        child = mutated(chosen, TERMS, random.Random(seed))
        assert child is not None
        assert child != chosen
        assert sum({"a": 1, "b": 2, "c": 4}[text] for text in child) <= 14
        seen.add(child)
    assert len(seen) > 20
    assert mutated(("a",), Terms(options=[[("a", 1)]], budget=1), random.Random(0)) is None


def fitness(chosen: Sequence[str]) -> float:
    return sum(abs(ord(text) - ord("a") - n % 3) for n, text in enumerate(chosen)) + 0.5


def evolve(path: Path | None, generations: int) -> Evolved:
    with SearchState(None if path is None else OwnFile(path, STATE), {"search": FORMAT}) as state:
        return evolved(fitness, ("c",) * 3 + ("a",) * 3, TERMS, generations=generations, known=(state, "k"))


def test_an_evolution_gets_better_and_resumes_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evolve(None, 30)
    assert whole.divergence < whole.first
    assert whole.divergence == min(
        fitness(choice)
        for choice in itertools.product("abc", repeat=6)
        if sum({"a": 1, "b": 2, "c": 4}[text] for text in choice) <= 14
    )  # fmt: skip
    evolve(tmp_path / "state", 3)
    calls: list[int] = []

    def counted(*given: object) -> object:
        calls.append(1)
        return mutated(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(evolution, "mutated", counted)
    assert evolve(tmp_path / "state", 30) == whole
    assert len(calls) == 27 * evolution.OFFSPRING


def test_an_evolution_begins_with_one_option_for_all_layers_where_that_is_better(tmp_path: Path) -> None:
    def by_unlikeness(chosen: Sequence[str]) -> float:
        return float(len(set(chosen)))

    with SearchState(OwnFile(tmp_path / "state", STATE), {"search": FORMAT}) as state:
        first = ("c",) * 2 + ("a",) * 4
        found = evolved(by_unlikeness, first, TERMS, generations=0, known=(state, "k"))
        assert (found.first, found.divergence) == (2.0, 1.0)
        assert found.chosen in {("a",) * 6, ("b",) * 6}, "all c are too large"
        again = evolved(fitness, first, TERMS, generations=0, known=(state, "k"))
    assert again == found


def test_divergence_of_a_refined_choice_is_that_of_its_decoded_weights(source: Path, tmp_path: Path) -> None:
    result = zp.search_checkpoint(source, "6bpw", CANDIDATES, refine=1)
    (note,) = (note for note in result.notes if note.startswith("refined"))
    out = tmp_path / "out"
    zp.quantize_checkpoint(source, out, result.recipe)
    zp.convert_checkpoint(out, tmp_path / "floats", to="float32")
    held = load_file(next((tmp_path / "floats").glob("*.safetensors")))
    weights = {
        weight.module: held[f"{weight.module}.weight"].bfloat16().float()
        for choice in result.chosen
        for weight in choice.layer.weights
    }
    said = float(note.split(" -> ")[1].split(" ")[0])
    assert said == pytest.approx(divergence(source, weights), rel=1e-3)
    assert math.isfinite(said)
