"""Grids of least squared error for pairs of normal numbers: `python -m tests.oracles.normal_grids 64 40`.

The error of a grid, and its gradient, are exact: a Voronoi cell is a polygon, whose first moment under the
normal density is the sum of normal probabilities along its edges (by Gauss, as the gradient of the density is
-x times it), and whose mass is that of the triangles from the origin to its edges, Owen's T function. A
minimum is found by Lloyd's iterations and L-BFGS from as many starts as are asked for; printed are the errors
for each number, in thousandths, and the best grid, its rows in lexicographic order.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray
from tests.peers import Peer

optimize = Peer("scipy.optimize")
spatial = Peer("scipy.spatial")
special = Peer("scipy.special")

Floats = NDArray[np.float64]
_RING = 64
_ANGLES = np.arange(_RING) * (2 * np.pi / _RING)
_FAR = 60.0 * np.stack((np.cos(_ANGLES), np.sin(_ANGLES)), 1)
"""Points that close the outer cells, where no normal number lies."""
_FARTHEST = 7.0


def moments(points: Floats) -> tuple[Floats, Floats]:
    """Return the mass (n,) and the first moment (n, 2) of each point's cell."""
    cells = spatial.Voronoi(np.concatenate((points, _FAR)))
    ends = np.array([edge if len(edge) == 2 else (-1, -1) for edge in cells.ridge_vertices])
    kept = (cells.ridge_points < len(points)).any(1) & (ends >= 0).all(1)
    (first, second), ends = cells.ridge_points[kept].T, ends[kept]
    outward = cells.points[second] - cells.points[first]
    outward /= np.linalg.norm(outward, axis=1, keepdims=True)
    along = np.stack((-outward[:, 1], outward[:, 0]), 1)
    distance = (cells.vertices[ends[:, 0]] * outward).sum(1)
    places = np.sort([(cells.vertices[ends[:, k]] * along).sum(1) for k in (0, 1)], axis=0)
    flow = (
        np.exp(-distance * distance / 2)
        / np.sqrt(2 * np.pi)
        * (special.ndtr(places[1]) - special.ndtr(places[0]))
    )
    moment, mass = np.zeros((len(cells.points), 2)), np.zeros(len(cells.points))
    triangle = _triangle(distance, places[1]) - _triangle(distance, places[0])
    for owner, sign in ((first, 1.0), (second, -1.0)):
        np.add.at(moment, owner, -sign * flow[:, None] * outward)
        np.add.at(mass, owner, sign * triangle)
    return mass[: len(points)], moment[: len(points)]


def _triangle(distance: Floats, place: Floats) -> Floats:
    """Return the mass between the origin and an edge at ``distance``, up to ``place`` along it, signed."""
    ratio = np.divide(place, distance, out=np.zeros_like(place), where=distance != 0)
    found: Floats = np.arctan(ratio) / (2 * np.pi) - special.owens_t(np.abs(distance), ratio)
    return found


def error(points: Floats) -> tuple[float, Floats]:
    """Return the mean squared distance of a normal pair from its nearest point, and the gradient."""
    mass, moment = moments(points)
    total = 2.0 - 2.0 * (points * moment).sum() + (mass * (points**2).sum(1)).sum()
    return float(total), 2.0 * (mass[:, None] * points - moment)


def start(count: int, seed: int) -> Floats:
    """Return a spiral of twice the normal distribution's variance, or numbers drawn from that."""
    rng = np.random.default_rng(seed)
    if seed % 2:
        return rng.standard_normal((count, 2)) * 2**0.5
    place = np.arange(count) + 0.5
    radius = np.sqrt(-4 * np.log(1 - 0.999 * place / count))
    angle = place * np.pi * (3 - 5**0.5) + rng.random() * 6
    return np.stack((radius * np.cos(angle), radius * np.sin(angle)), 1)


def minimum(count: int, seed: int) -> tuple[float, Floats]:
    """Return the error of the minimum that a start leads to, and its grid."""
    points = start(count, seed)
    for _ in range(60):
        mass, moment = moments(points)
        points = moment / mass[:, None]

    def objective(flat: Floats) -> tuple[float, Floats]:
        if not np.isfinite(flat).all() or np.abs(flat).max() > _FARTHEST:
            return 10.0, np.zeros_like(flat)
        value, gradient = error(flat.reshape(-1, 2))
        return value, gradient.ravel()

    options = {"maxiter": 4000, "maxfun": 6000, "ftol": 1e-16, "gtol": 1e-11, "maxcor": 30}
    found = optimize.minimize(objective, points.ravel(), jac=True, method="L-BFGS-B", options=options)
    return float(found.fun), found.x.reshape(-1, 2)


def main() -> None:
    """Print the errors of all starts, and the best grid."""
    count, starts = int(sys.argv[1]), int(sys.argv[2])
    best = None
    for seed in range(starts):
        found = minimum(count, seed)
        best = found if best is None or found[0] < best[0] else best
        sys.stdout.write(f"{count} {seed} {500 * found[0]} {500 * best[0]}\n")
    if best is not None:
        rows = np.round(best[1], 6) + 0.0
        sys.stdout.write(f"{rows[np.lexsort((rows[:, 1], rows[:, 0]))].tolist()}\n")


if __name__ == "__main__":
    main()
