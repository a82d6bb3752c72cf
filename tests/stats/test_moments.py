"""Second moments: exact against float64, mergeable, and without what is not finite."""

from __future__ import annotations

import pytest
import torch

from zeropoint.errors import CalibrationError, RangeError, ShapeError, UnsupportedError
from zeropoint.stats import Accumulator, GramMatrix, MeanSquare, Observer

KINDS = (GramMatrix(features=6), MeanSquare(features=6))


def whole_numbers(count: int = 40, seed: int = 0) -> torch.Tensor:
    """Return vectors whose sums of products float64 holds exactly, in any order."""
    return torch.randint(-50, 50, (count, 6), generator=torch.Generator().manual_seed(seed)).float()


def test_the_gram_matrix_is_that_of_float64() -> None:
    x = torch.randn(2, 20, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    gram = KINDS[0]
    rows = x.double().reshape(-1, 6)
    state = gram.update(gram.start(), x)
    assert torch.allclose(state["gram"], rows.T @ rows, rtol=1e-15, atol=1e-14)
    assert (int(state["vectors"]), int(state["seen"]), int(state["left_out"])) == (40, 240, 0)


def test_the_mean_square_is_the_diagonal_of_the_gram_matrix() -> None:
    x, gram, square = whole_numbers(), *KINDS
    state = square.update(square.start(), x)
    assert torch.equal(state["squares"], gram.measure(x)["gram"].diagonal())
    assert torch.equal(square.mean(state), state["squares"] / 40)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_batches_and_processes_in_any_order_give_one_state(kind: Accumulator) -> None:
    x = whole_numbers()
    whole = kind.update(kind.start(), x)
    parts = [kind.update_all(kind.start(), list(part.split(3))) for part in x.split(17)]
    merged = kind.merge(parts[2], kind.merge(parts[0], parts[1]))
    assert merged.keys() == whole.keys() == kind.start().keys()
    for key in whole:
        assert torch.equal(merged[key], whole[key])
        assert (merged[key].dtype, merged[key].shape) == (kind.start()[key].dtype, kind.start()[key].shape)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_vector_that_is_not_finite_is_left_out_as_a_whole(kind: Accumulator) -> None:
    x = whole_numbers()
    broken = x.clone()
    broken[3, 2], broken[9, 0] = torch.nan, torch.inf
    state = kind.measure(broken)
    clean = kind.measure(torch.cat((x[:3], x[4:9], x[10:])))
    assert int(state.pop("left_out")) == 12
    assert int(clean.pop("left_out")) == 0
    assert all(torch.equal(state[key], clean[key]) for key in state)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_observer_holds_the_state_of_an_accumulator(kind: Accumulator) -> None:
    observer, x = Observer(kind, name="0.input"), whole_numbers()
    with pytest.raises(CalibrationError, match=r"0.input received no calibration data"):
        observer.statistics().require_data()
    assert observer(x) is x
    kept = observer.statistics()
    observer.update_all([x, x])
    assert all(torch.equal(kept[key], kind.measure(x)[key]) for key in kind.start())
    assert int(observer.statistics()["vectors"]) == 3 * int(kept["vectors"])
    with pytest.raises(UnsupportedError, match="gives no range; use statistics"):
        observer.range()
    observer.reset()
    assert int(observer.state()["seen"]) == 0


@pytest.mark.parametrize("kind", [GramMatrix, MeanSquare])
def test_features_are_those_of_the_last_axis(kind: type[GramMatrix | MeanSquare]) -> None:
    with pytest.raises(ShapeError, match=r"x \(shape \(2, 5\)\) must have 6 features along its last axis"):
        kind(features=6).measure(torch.ones(2, 5))
    with pytest.raises(RangeError, match=r"features .=0. must be a whole number, at least 1"):
        kind(features=0)
