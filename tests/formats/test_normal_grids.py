"""Grids for pairs of normal numbers: exact integrals, numbers that are drawn, and transformers' grids."""

import numpy as np
import pytest
import torch
from tests.oracles import normal_grids
from tests.peers import Peer

import zeropoint as zp
from zeropoint.formats import VectorFormat, get_format
from zeropoint.methods import method_named
from zeropoint.schemes import Scheme

higgs = Peer("transformers.integrations.higgs")

ERRORS = {"normal64": 29.533588, "normal256": 7.727725}
"""Of each number, in thousandths."""


def grid_of(name: str) -> np.ndarray:
    grid = get_format(f"vector2[{name}]")
    assert isinstance(grid, VectorFormat)
    return np.array(grid.rows, dtype=np.float64)


def test_integrals_over_cells_are_those_that_are_known() -> None:
    assert normal_grids.error(np.zeros((1, 2)))[0] == pytest.approx(2.0, rel=1e-12)
    end = np.sqrt(2 / np.pi)
    value, gradient = normal_grids.error(np.array([[end, 0.0], [-end, 0.0]]))
    assert value == pytest.approx(2 - 2 / np.pi, rel=1e-12)  # Max, 1960
    assert np.abs(gradient).max() < 1e-12
    four = np.array([[x, y] for x in (-1.5104176, -0.4527800, 0.4527800, 1.5104176) for y in (-0.5, 0.5)])
    points = np.random.default_rng(0).standard_normal((400_000, 2))
    drawn = ((points[:, None] - four) ** 2).sum(2).min(1).mean()
    assert normal_grids.error(four)[0] == pytest.approx(drawn, rel=5e-3)
    mass, _ = normal_grids.moments(four)
    assert mass.sum() == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("name", ERRORS)
def test_every_vector_is_the_mean_of_its_cell(name: str) -> None:
    value, gradient = normal_grids.error(grid_of(name))
    assert 500 * value == pytest.approx(ERRORS[name], rel=1e-7)
    assert np.abs(gradient).max() < 1e-6


@pytest.mark.parametrize("size", [16, 64, 256])
def test_the_grids_of_transformers_have_a_bit_more_error(size: int) -> None:
    theirs, _ = normal_grids.error(higgs.get_higgs_grid(2, size).double().numpy())
    ours, _ = normal_grids.error(grid_of("higgs16" if size == 16 else f"normal{size}"))
    if size == 16:
        assert ours == pytest.approx(theirs, rel=1e-9)
    else:
        assert ours < theirs < 1.004 * ours


def test_the_least_error_of_16_vectors_is_found_again() -> None:
    found, grid = normal_grids.minimum(16, 4)
    assert 500 * found == pytest.approx(107.5983027, rel=1e-9)
    assert normal_grids.error(grid_of("higgs16"))[0] == pytest.approx(found, rel=2e-5)
    assert grid.shape == (16, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), [("normal64", 7), ("normal256", 0)])
def test_the_generator_finds_the_grid_again(name: str, seed: int) -> None:
    found, _ = normal_grids.minimum(len(grid_of(name)), seed)
    assert 500 * found == pytest.approx(ERRORS[name], rel=1e-7)


@pytest.mark.parametrize("name", ERRORS)
def test_normal_numbers_lose_as_much(name: str) -> None:
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    off = (zp.quantize(x, f"vector2[{name}]:cast").dequantize() - x).square().mean()
    assert 1000 * float(off) == pytest.approx(ERRORS[name], rel=0.03)
    assert str(Scheme.parse(f"vector2[{name}]:cast")) == f"vector2[{name}]:cast"


def test_rotated_numbers_of_any_distribution_lose_as_much() -> None:
    torch.manual_seed(2)
    x = torch.distributions.StudentT(3.0).sample((4, 2048))
    scheme = Scheme.parse("vector2[normal64]:g1024:scale=float16")
    rotated, plain = (
        1000 * method_named(name).quantize(x, scheme).report(x).relative ** 2
        for name in ("hadamard1024+mse", "mse")
    )
    assert rotated == pytest.approx(ERRORS["normal64"], rel=0.06)
    assert plain > 1.5 * rotated
