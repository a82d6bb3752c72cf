"""Second moments: exact against float64, mergeable, and without what is not finite."""

import pytest
import torch

from zeropoint.errors import CalibrationError, RangeError, ShapeError, UnsupportedError
from zeropoint.stats import Accumulator, CrossGram, GramMatrix, MeanSquare, Observer

KINDS = (GramMatrix(features=6), MeanSquare(features=6))


def whole_numbers(count: int = 40, seed: int = 0) -> torch.Tensor:
    """Return vectors whose sums of products float64 holds exactly, in any order."""
    return torch.randint(-50, 50, (count, 6), generator=torch.Generator().manual_seed(seed)).float()


def test_the_gram_matrix_is_that_of_float64() -> None:
    """Numbers of 8 significant bits are not rounded, nor sums of 40 products of them as large as these."""
    x = (torch.randint(-128, 129, (2, 20, 6), generator=torch.Generator().manual_seed(0)) / 64).float()
    gram = KINDS[0]
    rows = x.double().reshape(-1, 6)
    state = gram.update(gram.start(), x)
    assert torch.equal(state["gram"], rows.T @ rows)
    assert (int(state["vectors"]), int(state["seen"]), int(state["left_out"])) == (40, 240, 0)


def normal(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_updates_with_multiples_of_64_vectors_are_those_with_all(kind: Accumulator) -> None:
    x = normal(300)
    whole = kind.update(kind.start(), x)
    parts = kind.update_all(kind.start(), list(x.split([64, 128, 108])))
    assert all(torch.equal(parts[key], whole[key]) for key in whole)


def test_a_state_that_is_updated_stays_as_it_is() -> None:
    for kind in KINDS:
        state = kind.update(kind.start(), normal(8))
        kept = {key: value.clone() for key, value in state.items()}
        kind.update(state, normal(8, seed=1))
        assert all(torch.equal(state[key], kept[key]) for key in kept)


def test_the_mean_square_adds_squares_of_every_dtype_in_order() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x, expected = normal(100).to(dtype), torch.zeros(6, dtype=torch.float64)
        for row in x.double():
            expected += row * row
        assert torch.equal(KINDS[1].measure(x)["squares"], expected)


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


CROSS = CrossGram(features=6)


def test_the_cross_gram_matrix_is_that_of_differences() -> None:
    x, near = whole_numbers(), whole_numbers(seed=1)
    state = CROSS.measure_pair(x.reshape(2, 20, 6), near.reshape(2, 20, 6))
    assert torch.equal(state["cross"], (x - near).double().T @ near.double())
    assert (int(state["vectors"]), int(state["seen"]), int(state["left_out"])) == (40, 240, 0)


def test_pairs_merge_and_come_in_parts() -> None:
    x, near = normal(256).bfloat16(), normal(256, seed=1).bfloat16()
    whole, state = CROSS.measure_pair(x, near), CROSS.start()
    for part in range(0, 256, 64):
        state = CROSS.update_pair(state, x[part : part + 64], near[part : part + 64])
    assert state.keys() == whole.keys() == CROSS.start().keys()
    assert all(torch.equal(state[key], whole[key]) for key in whole)
    twice = CROSS.merge(whole, whole)
    assert torch.equal(twice["cross"], 2 * whole["cross"])
    assert int(twice["vectors"]) == 512


def test_a_pair_with_a_value_that_is_not_finite_is_left_out() -> None:
    x, near = whole_numbers(), whole_numbers(seed=1)
    keep = torch.ones(40, dtype=torch.bool)
    keep[[3, 7, 9]] = False
    x[3, 1], near[7, 0], x[9, 5], near[9, 5] = torch.inf, torch.nan, torch.inf, torch.inf
    state = CROSS.measure_pair(x, near)
    assert torch.equal(state["cross"], CROSS.measure_pair(x[keep], near[keep])["cross"])
    assert (int(state["vectors"]), int(state["left_out"])) == (37, 18)


def test_the_cross_gram_matrix_takes_pairs_alone() -> None:
    with pytest.raises(UnsupportedError, match=r"measures pairs of inputs, .* use measure_pair"):
        CROSS.measure(torch.ones(2, 6))
    with pytest.raises(ShapeError, match=r"float_inputs \(shape \(3, 6\)\) must be of the same vectors"):
        CROSS.measure_pair(torch.ones(3, 6), torch.ones(2, 6))
