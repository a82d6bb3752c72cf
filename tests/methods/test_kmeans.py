"""Tables of least error: all partitions, scikit-learn's k-means, and the normal distribution as oracles."""

import math
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.peers import Peer

import zeropoint as zp
from zeropoint.errors import SchemeError, UnsupportedError
from zeropoint.formats import CATALOG, CodebookFormat
from zeropoint.methods import method_named
from zeropoint.ops import clusters
from zeropoint.schemes import Scheme

cluster = Peer("sklearn.cluster")

FIT = method_named("kmeans")


def error_of(numbers: np.ndarray, weights: np.ndarray, table: np.ndarray) -> float:
    """Return the weighted squared error of the nearest values."""
    return float((weights * ((numbers[:, None] - table) ** 2).min(1)).sum())


def least_error(numbers: np.ndarray, weights: np.ndarray, count: int) -> float:
    """Return the least error of all ways to cut the sorted numbers into runs."""
    order = np.argsort(numbers)
    u, w = numbers[order], weights[order]
    least = math.inf
    for cuts in combinations(range(1, len(u)), min(count, len(u)) - 1):
        total = 0.0
        for first, last in pairwise((0, *cuts, len(u))):
            part, mass = u[first:last], w[first:last]
            total += float((mass * (part - (mass * part).sum() / mass.sum()) ** 2).sum())
        least = min(least, total)
    return least


@pytest.mark.parametrize("seed", range(40))
def test_no_partition_has_less_error_than_the_table(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, count = int(rng.integers(5, 13)), int(rng.integers(2, 6))
    numbers = rng.standard_normal(size) ** 3
    if seed % 2:
        numbers = np.round(4 * numbers) / 4  # with equal ones
    weights = rng.random(size) + 0.01
    table = clusters.fitted(numbers, weights, count)
    if len(np.unique(numbers)) <= count:
        assert np.array_equal(table, np.unique(numbers))
    else:
        found, least = error_of(numbers, weights, table), least_error(numbers, weights, count)
        assert found == pytest.approx(least, rel=1e-9, abs=1e-12)


def test_numbers_without_weight_do_not_count() -> None:
    numbers, weights = np.array([0.0, 1.0, 2.0, 50.0, 9.0, 60.0]), np.array([1.0, 1.0, 1.0, 0.0, 2.0, 0.0])
    table = clusters.fitted(numbers, weights, 2)
    assert error_of(numbers, weights, table) == pytest.approx(2.0)


def test_the_best_of_many_starts_of_scikit_learn_is_not_better() -> None:
    numbers = np.random.default_rng(1).standard_t(4, 3000)
    table = clusters.fitted(numbers, np.ones(3000), 8)
    theirs = cluster.KMeans(8, n_init=20, random_state=0, tol=0.0).fit(numbers[:, None])
    assert error_of(numbers, np.ones(3000), table) <= theirs.inertia_ * (1 + 1e-9)
    assert theirs.inertia_ <= error_of(numbers, np.ones(3000), table) * 1.01  # the same problem


def test_more_numbers_than_are_searched_exactly_lose_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    numbers, weights = rng.standard_t(5, 12_000), rng.random(12_000) + 0.1
    exact = error_of(numbers, weights, clusters.fitted(numbers, weights, 8))
    monkeypatch.setattr(clusters, "EXACT", 1000)
    merged = error_of(numbers, weights, clusters.fitted(numbers, weights, 8))
    assert exact <= merged <= exact * (1 + 1e-4)


def test_a_fitted_table_is_no_worse_than_that_of_the_scheme_and_survives_saving(tmp_path: Path) -> None:
    x = torch.distributions.StudentT(5.0).sample((32, 128))
    for text in (
        "nf4:g32",
        "normal3:g64:scale=search",
        "nf4:cast",
        "ternary:channel",
        "nf4:g16:scale=float16",
    ):
        scheme = Scheme.parse(text)
        q = FIT.quantize(x, scheme).q
        plain = zp.quantize(x, scheme)
        assert isinstance(q.scheme.element, CodebookFormat)
        assert q.scheme.element.code_count == scheme.element.code_count
        found, before = ((each.dequantize() - x).double().square().sum() for each in (q, plain))
        assert found < before, text
        q.save(tmp_path / "q.safetensors")
        loaded = zp.QuantizedTensor.load(tmp_path / "q.safetensors")
        assert torch.equal(loaded.dequantize(), q.dequantize())


def test_the_table_is_the_best_for_numbers_over_their_scales() -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))
    q = FIT.quantize(x, Scheme.parse("ternary:channel")).q
    scale = q.scales[0].double()
    assert torch.equal(q.scales[0], zp.quantize(x, "ternary:channel").scales[0])
    numbers, weights = (x.double() / scale).numpy().ravel(), scale.square().expand(4, 16).numpy().ravel()
    found = float((q.dequantize() - x).double().square().sum())
    assert found == pytest.approx(least_error(numbers, weights, 3), rel=1e-5)  # the table is in float32


def test_weights_with_fewer_numbers_than_the_table_are_kept_exactly() -> None:
    x = torch.tensor([[0.5, -3.0, 7.0, 0.5]])
    assert torch.equal(FIT.quantize(x, Scheme.parse("nf4:cast")).q.dequantize(), x)
    for same in (torch.zeros(2, 8), torch.ones(2, 8), torch.zeros(0, 8)):
        plain = zp.quantize(same, "nf4:g8")
        assert torch.equal(FIT.quantize(same, Scheme.parse("nf4:g8")).q.dequantize(), plain.dequantize())


def test_a_model_is_quantized_and_a_checkpoint_refused(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Linear(16, 8))
    plain = zp.quantize_model(model, "nf4:g16")
    fitted = zp.quantize_model(model, "nf4:g16", method="kmeans")
    for layer, other in zip(fitted.layers, plain.layers, strict=True):
        assert layer.error < other.error
    assert fitted.model(torch.randn(3, 64)).shape == (3, 8)
    from safetensors.torch import save_file

    (tmp_path / "in").mkdir()
    save_file({"a.weight": torch.randn(64, 64)}, tmp_path / "in/model.safetensors")
    with pytest.raises(
        UnsupportedError, match=r"kmeans gives each weight a table of its own.*quantize_model"
    ):
        zp.plan_checkpoint(tmp_path / "in", "nf4:g64", format="bitsandbytes", method="kmeans")


def test_what_is_no_codebook_or_has_offsets_is_refused() -> None:
    for text, words in (
        ("int4:g32", "fits tables of codebooks, unlike int4:g32"),
        ("vector2[higgs16]:g32", "fits tables of codebooks"),
        ("nf4_double", "needs plain scales"),
        ("iq4_nl", "needs plain scales"),
    ):
        with pytest.raises(UnsupportedError, match=words.replace("[", r"\[")):
            FIT.quantize(torch.ones(2, 32), Scheme.parse(text))


def mass(low: float, high: float) -> float:
    """Return the probability of a normal number between two."""
    return (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2


def density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


@pytest.mark.parametrize(("bits", "published"), [(1, 363.4), (2, 117.5), (3, 34.55), (4, 9.50)])
def test_tables_for_normal_numbers_are_those_of_lloyd_and_max(bits: int, published: float) -> None:
    table = CATALOG[f"normal{bits}"].values  # type: ignore[attr-defined]
    edges = [-math.inf, *((a + b) / 2 for a, b in pairwise(table)), math.inf]
    error = 1.0
    for value, (low, high) in zip(table, pairwise(edges), strict=True):
        first = density(low) - density(high)
        assert value == pytest.approx(first / mass(low, high), abs=1e-6)  # each the mean of its numbers
        error += value * value * mass(low, high) - 2 * value * first
    assert 1000 * error == pytest.approx(published, rel=1e-3)
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(bits))
    measured = (zp.quantize(x, f"normal{bits}:cast").dequantize() - x).square().mean()
    assert 1000 * float(measured) == pytest.approx(published, rel=0.03)


def test_pairs_of_normal_numbers_have_less_error_in_the_grid_of_higgs_than_one_by_one() -> None:
    x = torch.randn(4096, 16, generator=torch.Generator().manual_seed(7))
    pairs, single = (zp.quantize(x, f"{name}:cast").dequantize() for name in ("vector2[higgs16]", "normal2"))
    errors = [1000 * float((found - x).square().mean()) for found in (pairs, single)]
    assert errors[0] == pytest.approx(107, rel=0.02)
    assert errors[0] < errors[1]


def test_rows_of_a_model_have_tables_that_are_saved_loaded_and_compared(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    scheme, x = "table4:channel:scale=float16", torch.randn(3, 256)
    plain, fitted = zp.quantize_model(model, scheme), zp.quantize_model(model, scheme, method="kmeans")
    one = zp.quantize_model(model, "table4:tensor:scale=float16", method="kmeans")
    for layer, other, of_all in zip(fitted.layers, plain.layers, one.layers, strict=True):
        assert layer.error < of_all.error < other.error
    weights = zp.dequantize_model(fitted.model)
    assert torch.allclose(weights(x), fitted.model(x), atol=1e-5)
    weight = model[0].weight.detach().double()
    off = weights[0].weight.detach().double() - weight
    relative = float(off.square().sum() / weight.square().sum()) ** 0.5
    assert fitted.layers[0].error == pytest.approx(relative, rel=1e-4)
    plain.model.load_state_dict(fitted.model.state_dict())
    assert torch.equal(plain.model(x), fitted.model(x))
    torch.save(fitted.model, tmp_path / "model.pt")
    assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=False)(x), fitted.model(x))
    state = fitted.model.state_dict()
    state["0.weight.scale1"] = state["0.weight.scale1"].flip(-1)
    with pytest.raises(RuntimeError, match="must rise in every block"):
        plain.model.load_state_dict(state)


def test_mean_squares_of_inputs_weigh_the_tables_of_a_model() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(128, 32))
    data = [torch.randn(64, 128) * torch.logspace(-1, 1, 128) for _ in range(2)]
    errors = []
    for method in ("kmeans", "mse_weighted"):
        gives = zp.recipes.Assignment.of(weight="table3:channel:scale=float16", method=method)
        recipe = zp.recipes.Recipe(default=zp.recipes.Rule(gives=gives))
        known = zp.calibrate(model, recipe, data) if method == "mse_weighted" else None
        found = zp.quantize_model(model, recipe, calibration=known).model
        with torch.no_grad():
            errors.append(float((found(data[0]) - model(data[0])).square().sum()))
    assert errors[1] < 0.8 * errors[0]


def test_tables_of_blocks_train_and_are_refused_by_checkpoints(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Linear(16, 8))
    scheme = "table4:channel:scale=float16"
    for qat in ("minmax", "fixed"):
        prepared = zp.prepare(model, scheme, qat=qat)
        prepared(torch.randn(4, 64)).square().sum().backward()
        grads = [p.grad for p in prepared.parameters()]
        assert all(grad is not None and float(grad.abs().sum()) > 0 for grad in grads)
    with pytest.raises(SchemeError, match="FakeQuantize, which learns nothing, takes every scheme"):
        zp.prepare(model, scheme, qat="lsq")
    with pytest.raises(UnsupportedError, match="has tables of blocks, which no layout stores"):
        zp.save_checkpoint(zp.quantize_model(model, scheme).model, tmp_path / "out")
    from safetensors.torch import save_file

    (tmp_path / "in").mkdir()
    save_file({"a.weight": torch.randn(64, 64)}, tmp_path / "in/model.safetensors")
    for layout, words in (
        ("gptq", "GPTQ does not store"),
        ("onnx", "ONNX has no type"),
        ("gguf", "no type in GGUF"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            zp.plan_checkpoint(tmp_path / "in", scheme, format=layout)
