"""Searches over checkpoints: errors of the pass, layers decided together, budgets, and resumed searches."""

import itertools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.checkpoint import written
from tests.checkpoint.written import save, tensors_of
from tests.cli.checkpoints import write_llama
from tests.oracles import synthetic_llama

import zeropoint as zp
from zeropoint.checkpoint.measure.tensor_error import exact_sum
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.limits import BASE_MEMORY, Limits
from zeropoint.checkpoint.plan.selection import Selection
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.checkpoint.verify.verification import verify
from zeropoint.codecs.layer_schemes import layer_scheme
from zeropoint.codecs.registry import get_codec
from zeropoint.errors import CheckpointError, NonFiniteError, RangeError, RecipeError, UnsupportedError
from zeropoint.functional import row_errors
from zeropoint.own_files import OwnFile
from zeropoint.progress import Progress
from zeropoint.search import Budget, measuring
from zeropoint.search.measuring import measure_all, weighted
from zeropoint.search.offers import KEEP, choices
from zeropoint.search.search_result import SearchResult
from zeropoint.search.search_state import STATE, SearchState, source_fields
from zeropoint.search.searching import search, search_request
from zeropoint.tensor import QuantizedTensor

pytestmark = pytest.mark.rotating

TEXTS = ("w4a16", "nvfp4a16", "mxfp8a16", "float8_e4m3fn:block128x128", "int8:channel", KEEP)
ONE = Limits(workers=1)
WAYS = (
    Limits(workers=2, tile_values=3000),
    pytest.param(Limits(workers=7, tile_values=77_777), marks=pytest.mark.slow),
    pytest.param(Limits(workers=2, max_memory=BASE_MEMORY + (64 << 20)), marks=pytest.mark.slow),
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards, with sets of weights that share a scale across them."""
    return synthetic_llama.write(tmp_path_factory.mktemp("source") / "in")


def searched(
    source: Path, budget: str, candidates: str = "w4a16,mxfp8a16,w8a16", format: str = "compressed-tensors",  # noqa: A002
    state: Path | None = None, **options: object,
) -> SearchResult:  # fmt: skip
    wanted = search_request(budget, candidates, get_codec(format), limits=ONE, **options)  # type: ignore[arg-type]
    return search(open_source(source), wanted, state=state)


def in_memory(source: Path, module: str, text: str) -> tuple[torch.Tensor, QuantizedTensor]:
    """Return a whole weight, quantized under the extremes of the set that it shares a scale with."""
    held = tensors_of(source)
    scheme = layer_scheme(text, get_codec("compressed-tensors")).weight
    x = held[f"{module}.weight"]
    parent, _, last = module.rpartition(".")
    sets = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), (last,))
    members = next(names for names in sets if last in names)
    every = torch.cat([held[f"{parent}.{name}.weight"].reshape(-1) for name in members])
    if not any(str(level.granularity) == "tensor" for level in scheme.scales):
        return x, zp.quantize(x, scheme)
    # A row more with the largest magnitude of the set gives the scale of all.
    filled = torch.zeros(1, x.shape[1], dtype=x.dtype)
    filled[0, 0] = every[every.abs().argmax()]
    whole = torch.cat([x, filled])
    return whole, zp.quantize(whole, scheme)


@pytest.mark.parametrize("limits", WAYS, ids=lambda limits: f"{limits.workers}-{limits.tile_values}")
def test_errors_of_the_pass_are_those_of_weights_in_memory_bit_for_bit(source: Path, limits: Limits) -> None:
    found = choices(open_source(source), TEXTS, get_codec("compressed-tensors"), limits=limits)
    state = SearchState(None, {})
    measure_all(found, state, limits)
    held, compared = tensors_of(source), 0
    for layer in found.layers:
        for weight in layer.weights:
            x = held[f"{weight.module}.weight"]
            for text in weight.numbers:
                error = state.errors(weight.module)[found.candidates[text].key(found.output(weight, text))]
                own = row_errors(*in_memory(source, weight.module, text))
                assert error.errors == exact_sum(own.errors[: len(x)].tolist())
                assert error.squares == exact_sum(own.squares[: len(x)].tolist())
                # The kernels subtract in float32.
                off = in_memory(source, weight.module, text)[1].dequantize(torch.float64)[: len(x)]
                assert math.fsum(error.errors) == pytest.approx(float((x - off).square().sum()), rel=1e-6)
                compared += 1
    assert compared == 14 * 5


def test_a_search_writes_a_recipe_of_the_size_and_errors_that_it_said(source: Path, tmp_path: Path) -> None:
    result = searched(source, "5bpw", "w4a16,mxfp8a16,w8a16,keep")
    assert result.bits <= 5
    assert f" bits for each of {result.choices.values:,} weights, budget " in repr(result)
    assert result.plan.outputs.weight_bytes == result.allocation.size - sum(
        c.nbytes for c in result.chosen if c.candidate == KEEP
    )
    written = run(result.plan, tmp_path / "out")
    assert verify(tmp_path / "out", source).ok
    errors = {outcome.weight.module: outcome.error.relative for outcome in written.outcomes}
    for choice in result.chosen:
        own = [errors.get(weight.module, 0.0) ** 2 for weight in choice.layer.weights]
        assert choice.relative == pytest.approx(math.sqrt(sum(own) / len(own)), abs=0)
    assert len({choice.candidate for choice in result.chosen}) > 1


def test_no_other_choice_within_the_budget_loses_less(source: Path) -> None:
    result = searched(source, "5.5bpw", "w4a16,w8a16")
    uniform = [searched(source, "16bpw", text).chosen for text in ("w4a16", "w8a16")]
    options = [
        [next((c.nbytes, c.loss) for c in one if c.layer.name == choice.layer.name) for one in uniform]
        for choice in result.chosen
    ]
    allowed = math.floor(5.5 * result.choices.values / 8)
    best = min(
        math.fsum(loss for _, loss in picked)
        for picked in itertools.product(*options)
        if sum(size for size, _ in picked) <= allowed
    )
    assert result.allocation.loss == pytest.approx(best, rel=1e-14)
    assert result.allocation.optimal


def test_layers_that_engines_run_as_one_get_one_scheme_and_others_need_not(source: Path) -> None:
    result = searched(source, "5bpw", "w4a16,w8a16,mxfp8a16,nvfp4a16")
    assert not any("engines run them as one layer" in note for note in result.plan.notes)
    sets = {frozenset(w.module.rpartition(".")[2] for w in c.layer.weights) for c in result.chosen}
    assert sets == {
        frozenset(names.split())
        for names in ("q_proj k_proj v_proj", "gate_proj up_proj", "o_proj", "down_proj")
    }  # fmt: skip
    apart = searched(source, "5bpw", "q4_0,q5_0,q8_0", "gguf", selection=Selection(strict=True))
    assert not any("engines run them as one layer" in note for note in apart.plan.notes)
    assert all(len(choice.layer.weights) == 1 for choice in apart.chosen)


def test_query_key_and_value_of_an_encoder_get_one_scheme(tmp_path: Path) -> None:
    layers = [f"encoder.layer.{n}.attention.self" for n in range(3)]
    # Alone, the largest of the three would get more bits than the smallest.
    scales = {"query": 1.0, "key": 100.0, "value": 0.01}
    tensors = {
        f"{layer}.{name}.weight": written.weight(32, 128) * scale
        for layer in layers
        for name, scale in scales.items()
    }
    result = searched(save(tmp_path, tensors), "6bpw", "w4a16,w8a16")
    sets = [[weight.module for weight in choice.layer.weights] for choice in result.chosen]
    assert sets == [[f"{layer}.{name}" for name in sorted(scales)] for layer in layers]


def test_rules_name_layers_as_files_have_them_where_transformers_cuts_or_renames_them(tmp_path: Path) -> None:
    blocks = [f"nomic_bert.encoder.layers.{n}" for n in range(2)]
    scales = {"attn.Wqkv": 1.0, "mlp.fc11": 100.0, "mlp.fc12": 0.01}
    tensors = {
        f"{block}.{name}.weight": written.weight(384, 128) * scale
        for block in blocks
        for name, scale in scales.items()
    }
    asked = {"model_type": "nomic_bert", "architectures": ["NomicBertForMaskedLM"], "hidden_size": 128}
    source = save(tmp_path / "in", tensors, asked | {"num_hidden_layers": 2, "num_attention_heads": 2})
    result = searched(source, "6bpw", "w4a16,w8a16")
    sets = {tuple(weight.module for weight in choice.layer.weights) for choice in result.chosen}
    joined = {(f"{block}.mlp.fc11", f"{block}.mlp.fc12") for block in blocks}
    assert sets == {(f"{block}.attn.Wqkv",) for block in blocks} | joined
    made = make_plan(open_source(source), result.recipe, limits=ONE)
    assert tensors.keys() <= {name for weight in made.weights for name in weight.reader.names}


def test_experts_of_a_layer_get_one_scheme_by_one_rule(tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in", moe=True)
    result = searched(source, "6bpw", "w4a16,w8a16")
    experts = [c for c in result.chosen if ".experts." in c.layer.name]
    assert [len(c.layer.weights) for c in experts] == [12, 12]
    run(result.plan, tmp_path / "out")
    assert verify(tmp_path / "out", source).ok


def test_a_candidate_that_does_not_fit_a_layer_is_no_option_of_it(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "in")  # 128 inputs, but 256 of down_proj: one block of a K-quant
    result = searched(source, "6bpw", "q4_k,q4_0,q8_0", "gguf")
    sizes = {choice.layer.name.rpartition(".")[2]: set(choice.layer.sizes) for choice in result.chosen}
    assert sizes["down_proj"] == {"q4_k", "q4_0", "q8_0"}
    assert sizes["up_proj"] == {"q4_0", "q8_0"}
    assert "q4_k" not in {point.name for point in result.uniform}


def test_a_layout_of_one_scheme_gets_the_best_one(source: Path) -> None:
    result = searched(source, "4.4bpw", "int4:g128:asym,int4:g32:asym", "awq")
    assert {c.candidate for c in result.chosen} == {"int4:g128:asym"}
    assert any("has one scheme in a checkpoint" in note for note in result.notes)


def test_heads_that_are_tied_to_the_embedding_are_decided_with_it(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "in")
    held = tensors_of(source)
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    save_file(held, source / "model.safetensors", metadata={"format": "pt"})
    config = (source / "config.json").read_text().replace("false", "true")
    (source / "config.json").write_text(config)
    both = Selection(include=("*embed_tokens", "lm_head"))
    result = searched(source, "6bpw", "w4a16,w8a16", selection=both)
    sets = [{w.module for w in c.layer.weights} for c in result.chosen]
    assert {"model.embed_tokens", "lm_head"} in sets


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("3bpw", r"budget 3bpw is less than the smallest choice of these candidates takes, 4\.127bpw; raise"),
        ("1M", r"budget 1 MiB is less than the smallest choice of these candidates takes, \d+K; raise it"),
    ],
)
def test_a_budget_that_no_choice_meets_is_an_error_with_the_least_one(
    source: Path, budget: str, message: str
) -> None:
    with pytest.raises(RangeError, match=message):
        searched(source, budget, "w4a16,w8a16")
    with pytest.raises(CheckpointError, match="holds all weights as they are"):
        searched(source, "16bpw", "w4a16,keep")


def test_the_least_budget_that_the_error_names_is_met(source: Path) -> None:
    assert {c.candidate for c in searched(source, "4.127bpw").chosen} == {"w4a16"}


def test_a_budget_of_bytes_is_kept_by_all_files(source: Path, tmp_path: Path) -> None:
    result = searched(source, "2200K")
    assert result.plan.output_bytes <= 2200 << 10
    run(result.plan, tmp_path / "out")
    files = [p for p in (tmp_path / "out").iterdir() if "manifest" not in p.name]
    assert sum(path.stat().st_size for path in files) == result.plan.output_bytes


def test_another_budget_is_decided_from_the_state_without_reading_weights(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    searched(source, "5bpw", state=state)
    fresh = searched(source, "6bpw")

    def fail(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(measuring._Reading, "tiles", fail)
    again = searched(source, "6bpw", state=state)
    assert again.recipe == fresh.recipe
    assert again.allocation == fresh.allocation
    with pytest.raises(AssertionError, match="a weight was read"):
        searched(source, "6bpw", "w4a16,mxfp4a16", state=state)


def test_a_search_that_was_killed_measures_only_what_was_left(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_BATCH", 1)
    golden = searched(source, "5bpw", "w4a16,nvfp4a16,w8a16")
    wanted = search_request("5bpw", "w4a16,nvfp4a16,w8a16", get_codec("compressed-tensors"), limits=ONE)
    for count in (3, 16, 25):
        state, seen = tmp_path / str(count), iter(range(count))

        def stop(done: int, total: int, name: str, seen: Iterator[int] = seen) -> None:
            if next(seen, None) is None:
                raise KeyboardInterrupt

        def stopping(verb: str, amount: object, stop: Progress = stop) -> AbstractContextManager[Progress]:
            return nullcontext(stop)

        with pytest.raises(KeyboardInterrupt):
            search(open_source(source), wanted, state=state, bar=stopping)
        with state.open("ab") as file:
            file.write(b"0000 torn")
        measured: list[str] = []

        def noting(
            verb: str, amount: object, names: list[str] = measured
        ) -> AbstractContextManager[Progress]:
            return nullcontext(lambda *moved: names.append(moved[2]))

        search(open_source(source), wanted, state=state, bar=noting)
        assert searched(source, "5bpw", "w4a16,nvfp4a16,w8a16", state=state).allocation == golden.allocation
        assert len(measured) <= 28 - max(0, count - 14)


def test_a_state_of_another_source_and_a_file_that_is_none_are_refused(source: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    searched(source, "5bpw", state=state)
    other = synthetic_llama.write(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"differs in .*; pass another state=, or remove it"):
        searched(other, "5bpw", state=state)
    text = tmp_path / "text"
    text.write_text("something of the user's")
    with pytest.raises(CheckpointError, match="exists and is no state of zeropoint; move it away, or name"):
        searched(source, "5bpw", state=text)
    assert text.read_text() == "something of the user's"
    fields = source_fields(choices(open_source(source), ["w4a16"], get_codec("compressed-tensors")).plans[0])
    with (
        SearchState(OwnFile(state, STATE), fields),
        pytest.raises(CheckpointError, match="is in use by another search"),
    ):
        searched(source, "5bpw", state=state)
    searched(source, "5bpw", state=state)


@pytest.mark.parametrize(
    ("candidates", "kind", "message"),
    [
        ("", RecipeError, r"candidates \(none\) must name at least one preset or scheme"),
        ("keep", RecipeError, r"candidates \(keep\) must name at least one"),
        ("w4a16,w4a16", RecipeError, "candidate 'w4a16' is named twice; name it once"),
        ("q4_0", UnsupportedError, "candidate 'q4_0'"),
    ],
)
def test_candidates_that_make_no_sense_are_refused_by_name(
    source: Path, candidates: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        searched(source, "5bpw", candidates)


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "in")
    held = tensors_of(source)
    held["model.layers.1.mlp.up_proj.weight"][3, 7] = math.inf
    save_file(held, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"1\.mlp\.up_proj.* holds inf, first at row 3, column 7"):
        searched(source, "5bpw")


def test_weighted_errors_count_columns_by_their_importance() -> None:
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    q = zp.quantize(x, "int4:g32")
    weights = np.linspace(0.0, 3.0, 64)
    plain = measuring.measure(x, q)
    off = (x.double() - q.dequantize(torch.float64)).square() * torch.from_numpy(weights)
    found = weighted(plain, x, q, weights)
    assert math.fsum(found.errors) == pytest.approx(float(off.sum()), rel=1e-14)
    same = weighted(plain, x, q, np.ones(64))
    assert math.fsum(same.errors) == pytest.approx(plain.errors[0], rel=1e-6)  # kernels subtract in float32


def test_budgets_are_bits_or_bytes() -> None:
    assert str(Budget.parse("4.5 bpw")) == "4.5bpw"
    assert Budget.parse("1.5K").nbytes == 1536
    for text in ("", "0bpw", "0", "-1G", "4.5bps", "1e3", "x"):
        with pytest.raises(RangeError, match="must be bits for each weight or bytes of all files"):
            Budget.parse(text)
    with pytest.raises(RangeError, match="has bits or nbytes, one of them"):
        Budget()


def test_a_pattern_to_include_may_name_what_only_some_candidates_fit(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "in")  # embeddings of 128: no block of a K-quant
    wanted = Selection(include=("*embed_tokens",))
    result = searched(source, "6bpw", "q4_k,q4_0,q8_0", "gguf", selection=wanted)
    sizes = {choice.layer.name: set(choice.layer.sizes) for choice in result.chosen}
    assert sizes["model.embed_tokens"] == {"q4_0", "q8_0"}
    assert "model.embed_tokens" in {weight.module for weight in result.plan.weights}


def test_a_note_says_that_errors_of_inputs_are_not_counted(source: Path) -> None:
    notes = searched(source, "6bpw", "w4a16,fp8_dynamic").notes
    assert "errors are those of weights; what fp8_dynamic lose of inputs is not counted" in notes
    assert not searched(source, "6bpw").notes
