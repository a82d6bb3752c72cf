"""Mean squares of inputs in a search: of a file, or of the model on data; errors, bytes and mistakes."""

import struct
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.written import OF_RUNS, digests, tensors_of
from tests.oracles import tiny_llama, tiny_models
from tests.peers import transformers

import zeropoint as zp
from zeropoint.checkpoint.model.calibration import StatisticsOfModules
from zeropoint.checkpoint.model.importance import name_in_llama_cpp
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.read.source import open_source
from zeropoint.codecs.registry import get_codec
from zeropoint.errors import CalibrationError
from zeropoint.methods import LayerData, method_named
from zeropoint.search import deferred, measuring
from zeropoint.search.inputs import Inputs, of_calibration, of_imatrix
from zeropoint.search.search_result import SearchResult
from zeropoint.search.searching import search, search_request

pytestmark = pytest.mark.rotating

ONE = Limits(workers=1)
CANDIDATES = "int4:g32,int8:g32"
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    tiny_llama.save(folder, torch.float32)
    for path in folder.glob("tokenizer*"):  # llama.cpp has none like it
        path.unlink()
    return folder


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, tiny_llama.VOCABULARY, (3, 64), generator=torch.Generator().manual_seed(5))


def write(path: Path, found: Mapping[str, np.ndarray]) -> Path:
    """Write an importance matrix of llama.cpp, .dat."""
    data = struct.pack("<i", len(found))
    for name, values in found.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 1, len(values))
        data += values.astype("<f4").tobytes()
    path.write_bytes(data)
    return path


def imatrix(path: Path, widths: dict[str, int]) -> dict[str, np.ndarray]:
    stream = np.random.RandomState(0)
    found = {name: (stream.standard_normal(width) ** 2).astype(np.float32) for name, width in widths.items()}
    write(path, found)
    return found


def searched(source: Path, inputs: object, method: str | None = None, budget: str = "6bpw") -> SearchResult:
    wanted = search_request(budget, CANDIDATES, get_codec("compressed-tensors"), method=method, limits=ONE)
    return search(open_source(source), replace(wanted, inputs=inputs))  # type: ignore[arg-type]


def squares_by_transformers(source: Path, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the mean squares of the inputs of linear layers, by transformers and torch alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, args, name=name: found.update(
                    {name: args[0].double().reshape(-1, args[0].shape[-1]).square().mean(0)}
                )
            )
    with torch.no_grad():
        model(ids)
    return found


def test_errors_count_by_the_importance_of_their_columns(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "imatrix.dat"
    values = imatrix(file, {"blk.0.attn_q.weight": 128, "blk.1.ffn_down.weight": 256})
    result = searched(source, partial(of_imatrix, file))
    assert result.importance == "imatrix"
    assert any("12 weights without importance" in note for note in result.notes)
    held = load_file(source / "model.safetensors")
    (choice,) = (c for c in result.chosen if c.layer.name == DOWN)
    w = held[f"{DOWN}.weight"]
    scheme = result.choices.output(choice.layer.weights[0], choice.candidate).layer.weight
    off = (w.double() - zp.quantize(w, scheme).dequantize(torch.float64)).square()
    a = torch.from_numpy(values["blk.1.ffn_down.weight"]).double()
    expected = float((off * a).sum() / (w.double().square() * a).sum())
    assert choice.relative**2 == pytest.approx(expected, rel=1e-12)
    other = tmp_path / "other.dat"
    imatrix(other, {"blk.7.attn_q.weight": 128})
    with pytest.raises(CalibrationError, match="names no weight of this checkpoint"):
        searched(source, partial(of_imatrix, other))


@pytest.mark.parametrize("method", [None, "mse_weighted"])
def test_calibration_weighs_errors_by_what_transformers_gives_layers(
    method: str | None, source: Path, ids: torch.Tensor
) -> None:
    result = searched(source, partial(of_calibration, ids, ONE), method)
    assert result.importance == "calibration"
    assert not result.notes
    squares, held = squares_by_transformers(source, ids), load_file(source / "model.safetensors")
    for choice in result.chosen:
        errors = []
        for weight in choice.layer.weights:
            w, mean = held[f"{weight.module}.weight"], squares[weight.module]
            output = result.choices.output(weight, choice.candidate)
            data = LayerData(statistics=result.plan.statistics.get(weight.module, {}))
            q = method_named(output.method).quantize(w, output.layer.weight, data).q
            off = (w.double() - q.dequantize(torch.float64)).square()
            errors.append(float((off * mean).sum() / (w.double().square() * mean).sum()))
        assert choice.relative**2 == pytest.approx(sum(errors) / len(errors), rel=1e-5)  # float32 sums differ
    assert set(result.plan.statistics) == (
        set() if method is None else {w.module for w in result.plan.weights}
    )


def rounded(found: StatisticsOfModules) -> StatisticsOfModules:
    """Return statistics with means that float32 holds, as importance matrices have them."""
    every = {}
    for module, needs in found.items():
        own = needs["mean_square"]
        means = own.accumulator.mean(own.state).float().double()  # type: ignore[attr-defined]
        state = own.state | {"squares": means, "vectors": torch.tensor(1)}
        every[module] = {"mean_square": replace(own, state=state)}
    return every


@pytest.mark.parametrize(
    ("format", "method", "candidates", "budget"),
    [
        ("compressed-tensors", "mse_weighted", CANDIDATES, "6bpw"),
        ("compressed-tensors", "mse", CANDIDATES, "6bpw"),
        ("gguf", "ggml", "q4_0,q5_1,q8_0", "6.5bpw"),
    ],
)
def test_calibration_gives_the_bytes_and_errors_of_an_imatrix_of_the_same_numbers(
    format: str, method: str, candidates: str, budget: str, source: Path, ids: torch.Tensor, tmp_path: Path,  # noqa: A002
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    take, kept = deferred.mean_squares, {}

    def noted(*given: object, **named: object) -> StatisticsOfModules:
        kept.update(rounded(take(*given, **named)))  # type: ignore[arg-type]
        return kept

    monkeypatch.setattr(deferred, "mean_squares", noted)
    options = {"candidates": candidates, "format": format, "method": method}
    own = zp.search_checkpoint(source, budget, calibration=ids, **options)  # type: ignore[arg-type]
    written = zp.quantize_checkpoint(source, tmp_path / "own", budget=budget, calibration=ids, **options)  # type: ignore[arg-type]
    numbers = {
        str(name_in_llama_cpp(name)): needs["mean_square"]["squares"].numpy() for name, needs in kept.items()
    }
    path = write(tmp_path / "imatrix.dat", numbers)
    other = zp.search_checkpoint(source, budget, imatrix=path, **options)  # type: ignore[arg-type]
    again = zp.quantize_checkpoint(source, tmp_path / "file", budget=budget, imatrix=path, **options)  # type: ignore[arg-type]
    assert own.chosen == other.chosen
    assert own.allocation == other.allocation
    files = [digests(tmp_path / name).items() for name in ("own", "file")]
    own_files, other_files = ({n: d for n, d in each if n not in OF_RUNS} for each in files)
    assert own_files == other_files, "others say where importance is from"
    errors = [{o.weight.module: o.error.relative for o in run.outcomes} for run in (written, again)]
    assert errors[0] == errors[1]
    assert len({str(weight.layer.weight) for weight in written.plan.weights}) > 1
    assert zp.verify_checkpoint(tmp_path / "own", source).ok


def test_a_budget_writes_what_its_recipe_writes_on_the_same_calibration(
    source: Path, ids: torch.Tensor, tmp_path: Path
) -> None:
    options = {"method": "mse_weighted", "candidates": CANDIDATES, "budget": "6bpw"}
    result = zp.quantize_checkpoint(source, tmp_path / "own", calibration=ids, **options)  # type: ignore[arg-type]
    zp.quantize_checkpoint(source, tmp_path / "recipe", result.plan.recipe, calibration=ids)
    zp.quantize_checkpoint(source, tmp_path / "mse", budget="6bpw", candidates=CANDIDATES, method="mse")
    own, recipe, mse = (digests(tmp_path / name)["model.safetensors"] for name in ("own", "recipe", "mse"))
    assert own == recipe != mse


def test_statistics_are_taken_once_and_another_calibration_measures_again(
    source: Path, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    measured: list[str] = []
    take, own = deferred.mean_squares, measuring._Measure.run

    def counted(*given: object, **named: object) -> object:
        runs.append(1)
        return take(*given, **named)  # type: ignore[arg-type]

    def noted(task: measuring._Measure, *given: object) -> None:
        measured.append(task.name)
        own(task, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(deferred, "mean_squares", counted)
    monkeypatch.setattr(measuring._Measure, "run", noted)
    state, options = tmp_path / "state", {"method": "mse_weighted", "candidates": CANDIDATES}
    first = zp.search_checkpoint(source, "6bpw", state=state, calibration=ids, **options)  # type: ignore[arg-type]
    assert len(runs) == 1
    assert len(measured) == 14
    again = zp.search_checkpoint(source, "5.2bpw", state=state, calibration=ids, **options)  # type: ignore[arg-type]
    assert len(measured) == 14
    assert again.allocation.loss > first.allocation.loss
    zp.search_checkpoint(source, "6bpw", state=state, calibration=ids[:1], **options)  # type: ignore[arg-type]
    assert len(measured) == 28
    runs.clear()
    zp.quantize_checkpoint(source, tmp_path / "out", budget="6bpw", calibration=ids, **options)  # type: ignore[arg-type]
    assert len(runs) == 1


def test_importance_by_noise_goes_with_calibration_and_with_an_evolution(
    source: Path, ids: torch.Tensor
) -> None:
    options = {"method": "mse_weighted", "candidates": CANDIDATES, "calibration": ids}
    result = zp.search_checkpoint(source, "6bpw", importance="linearity", refine=1, **options)  # type: ignore[arg-type]
    plain = zp.search_checkpoint(source, "6bpw", **options)  # type: ignore[arg-type]
    assert result.importance == "linearity, calibration"
    assert set(result.plan.statistics) == set(plain.plan.statistics)
    (note,) = (note for note in result.notes if note.startswith("refined"))
    before, after = note.split("KL divergence ")[1].split(" on ")[0].split(" -> ")
    assert 0 < float(after) <= float(before)


def test_static_inputs_take_their_ranges_from_the_same_text(
    source: Path, ids: torch.Tensor, tmp_path: Path
) -> None:
    options = {"candidates": "fp8", "budget": "9bpw"}
    zp.quantize_checkpoint(source, tmp_path / "own", calibration=ids, **options)  # type: ignore[arg-type]
    zp.quantize_checkpoint(source, tmp_path / "to", "fp8", calibration=ids)
    own, to = (load_file(tmp_path / name / "model.safetensors") for name in ("own", "to"))
    assert own.keys() == to.keys()
    assert all(torch.equal(own[name].view(torch.uint8), to[name].view(torch.uint8)) for name in own)
    with pytest.raises(CalibrationError, match="random tokens are not what the model will see"):
        zp.quantize_checkpoint(source, tmp_path / "x", calibration="random", **options)  # type: ignore[arg-type]


def test_what_methods_need_and_have_not_is_one_sentence_before_anything_is_measured(
    source: Path, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring._Measure, "run", None)
    file = tmp_path / "imatrix.dat"
    imatrix(file, {"blk.0.attn_q.weight": 128})
    options = {"method": "mse_weighted", "candidates": CANDIDATES}
    with pytest.raises(CalibrationError, match="needs the mean_square of its inputs; pass calibration=FILE"):
        zp.search_checkpoint(source, "6bpw", importance="linearity", **options)  # type: ignore[arg-type]
    with pytest.raises(
        CalibrationError, match=r"of its inputs, which the data do not have; .* or name it in ignore="
    ):
        zp.search_checkpoint(source, "6bpw", imatrix=file, **options)  # type: ignore[arg-type]
    with pytest.raises(zp.OptionError, match="calibration= and imatrix= both say what inputs are"):
        zp.search_checkpoint(source, "6bpw", imatrix=file, calibration=ids, **options)  # type: ignore[arg-type]


def test_an_embedding_is_searched_by_a_method_without_data(
    source: Path, ids: torch.Tensor, tmp_path: Path
) -> None:
    options = {"method": "mse_weighted", "candidates": CANDIDATES, "include": ["*embed_tokens"]}
    zp.search_checkpoint(source, "6bpw", calibration=ids, out=tmp_path / "r.yaml", **options)  # type: ignore[arg-type]
    given = {"recipe": tmp_path / "r.yaml", "calibration": ids, "force": True}
    result = zp.quantize_checkpoint(source, tmp_path / "out", **given)
    methods = {weight.module: weight.method for weight in result.plan.weights}
    assert methods.pop("model.embed_tokens") == "mse"
    assert set(methods.values()) == {"mse_weighted"}


def test_a_mark_tells_numbers_apart(source: Path, ids: torch.Tensor) -> None:
    marks: list[Inputs] = []
    for given in (ids, ids, ids + 1 - 2 * (ids == ids.max())):
        take = partial(of_calibration, given, ONE)

        def noted(found: object, take: object = take) -> Inputs:
            marks.append(take(found))  # type: ignore[operator]
            return marks[-1]

        searched(source, noted)
    assert marks[0].mark == marks[1].mark != marks[2].mark
    assert marks[0].without == ()


def test_an_evolution_is_that_of_its_method_and_inputs(
    source: Path, ids: torch.Tensor, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    ways: tuple[dict[str, object], ...] = (
        {"method": "mse"}, {"method": "mse_weighted", "calibration": ids},
        {"method": "mse_weighted", "calibration": ids[:1]},
    )  # fmt: skip
    for way in ways:
        # One candidate: all ways begin with the same choice.
        options = {"candidates": "int4:g32", "refine": 1, **way}
        kept = zp.search_checkpoint(source, "8bpw", state=state, **options)  # type: ignore[arg-type]
    fresh = zp.search_checkpoint(source, "8bpw", **options)  # type: ignore[arg-type]
    assert kept.notes == fresh.notes


def test_a_file_of_statistics_gives_the_choice_and_the_bytes_of_the_same_calibration(
    source: Path, ids: torch.Tensor, tmp_path: Path
) -> None:
    file = tmp_path / "statistics.safetensors"
    zp.gather_statistics(source, file, ids)
    options: dict[str, Any] = {"candidates": CANDIDATES, "method": "mse_weighted"}
    found = [
        zp.search_checkpoint(source, "6bpw", **given, **options)
        for given in ({"calibration": ids}, {"statistics": file})
    ]
    texts = [result.recipe.text.partition("\n")[2] for result in found]  # the first line has the importance
    assert texts[0] == texts[1]
    assert found[0].chosen == found[1].chosen
    assert found[1].importance == "statistics"
    for name, given in (("run", {"calibration": ids}), ("file", {"statistics": [file]})):
        zp.quantize_checkpoint(source, tmp_path / name, budget="6bpw", **given, **options)
    assert tensors_of(tmp_path / "run").keys() == tensors_of(tmp_path / "file").keys()
    for name, tensor in tensors_of(tmp_path / "run").items():
        assert torch.equal(tensor, tensors_of(tmp_path / "file")[name])


def test_two_sources_of_inputs_are_refused_and_statistics_of_another_checkpoint(
    source: Path, ids: torch.Tensor, tmp_path: Path
) -> None:
    file = tmp_path / "statistics.safetensors"
    zp.gather_statistics(source, file, ids)
    with pytest.raises(zp.OptionError, match="calibration= and statistics= both say what inputs are"):
        zp.search_checkpoint(source, "6bpw", calibration=ids, statistics=file)
    other = tmp_path / "other"
    tiny_models.llama(layers=1).save_pretrained(other)
    with pytest.raises(zp.CalibrationError, match="has statistics of another checkpoint"):
        zp.search_checkpoint(other, "6bpw", statistics=file)
