"""Output errors of solved weights, checked on their statistics.

The manifest says by how much the outputs of a weight are off on a Gram matrix, the bound of that, and what
the matrix hashes to. Where the same matrix is at hand, both are computed again from the codes in the file,
and the bound is proven (:mod:`zeropoint.methods.output_bound`). After steps both are of a target that no file
holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ...errors import RecipeError, count
from ...methods import Bound, method_named
from ...methods.chain import has_own_target
from ...methods.method import OutputError
from ...methods.output_bound import proven, statistics_digest
from ...stats import Statistics
from ..plan.limits import Limits
from ..read.decoding import read_rows
from ..read.problems import Problem
from ..read.quantized_layers import StoredLayer, StoredLayers
from ..read.storage import OpenFiles
from .integrity import Manifest
from .source_weights import Original

_CLOSE = 1e-9
"""Share by which two results may differ: torch adds the errors of rows in an order of the processor."""


class Grams(Protocol):
    """Gram matrices of the inputs of layers."""

    def of(self, module: str) -> Statistics | None:
        """Return the Gram matrix of a module, or None."""

    def site(self, module: str) -> str | None:
        """Return the site of a module's Gram matrix, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputChecks:
    """Numbers of weights whose stated output errors were checked, or not.

    stated: all of these. checked: what is said was computed again, and compared. others: solved on another
    Gram matrix. absent: without one in the statistics. moved: of a target that steps made, which no file
    holds, or by a method of another version.
    """

    stated: int = 0
    checked: int = 0
    others: int = 0
    absent: int = 0
    moved: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the counts by name."""
        return asdict(self)

    @property
    def notes(self) -> Iterator[str]:
        """Sentences about the counts."""
        if not self.stated:
            yield "the manifest says of no weight how far its outputs are off, so that none was checked"
            return
        of = f"of {count(self.stated, 'weight')}"
        yield f"outputs of {self.checked} {of} were computed on the statistics, as a check of the manifest"
        if self.others:
            yield f"{self.others} {of} were solved on another Gram matrix than that of the statistics"
        if self.absent:
            yield f"{self.absent} {of} have no Gram matrix in the statistics"
        if self.moved:
            yield f"{self.moved} {of} were solved for what steps made of them, which no file holds"


def check_outputs(
    stored: StoredLayers,
    original: Original,
    manifest: Manifest | None,
    files: OpenFiles,
    limits: Limits,
    *,
    grams: Grams,
) -> tuple[OutputChecks, list[Problem]]:
    """Return the checks of outputs on Gram matrices, and the problems.

    Raises CheckpointError where ``limits`` are too small for the widest layer.
    """
    said = {} if manifest is None else manifest.outputs
    found = dict.fromkeys(("checked", "others", "absent", "moved"), 0)
    problems: list[Problem] = []
    for module, stated in sorted(said.items(), key=lambda item: grams.site(item[0]) or ""):
        number = stored.modules.number(module)
        layer = None if number is None else stored.layers[number]
        gram = None if layer is None or layer.experts is not None else grams.of(module)
        assert manifest is not None
        if layer is None or gram is None:
            found["absent"] += 1
        elif statistics_digest(gram) != stated.statistics:
            found["others"] += 1
        elif _is_of_target(str(manifest.method(module))):
            found["moved"] += 1
        else:
            limits.require_gram(layer.shape)
            found["checked"] += 1
            problems += [
                Problem(where=module, what=what)
                for what in _wrong(layer, original, manifest, (stated, gram), files)
            ]
    return OutputChecks(stated=len(said), **found), problems


def _is_of_target(name: str) -> bool:
    """Return whether a method rounds the result of steps, or may."""
    try:
        return has_own_target(method_named(name))
    except RecipeError:
        return True


def _wrong(
    layer: StoredLayer,
    original: Original,
    manifest: Manifest,
    known: tuple[OutputError, Statistics],
    files: OpenFiles,
) -> Iterator[str]:
    """Yield the wrong output errors of a layer, given its ``known`` ones."""
    (stated, gram), weight = known, original.weight_of(layer)
    if weight is None:
        return  # which is a problem already
    rows, columns = layer.shape
    q = read_rows(layer, {entry.file: files[entry.file] for entry in layer.tensors.values()}, 0, rows)
    buffer = bytearray(rows * weight.row_bytes)
    x = weight.read({file: files[file] for file in weight.files}, 0, rows, buffer).to(q.dtype)
    assert x.shape == (rows, columns)
    error, over = proven(x, q, gram)
    for name, ours, theirs in (
        ("are off by", error.loss, stated.loss),
        ("have a bound of", error.bound, stated.bound),
    ):
        if not math.isclose(ours, theirs, rel_tol=_CLOSE):
            yield f"outputs {name} {ours:.4%} of their squares, but {theirs:.4%} in the manifest"
    if over and method_named(str(manifest.method(layer.module))).bound(layer.weight) is Bound.OUTPUT:
        yield (
            f"outputs are off by more than their bound in {count(len(over), 'row')}, and by more than those "
            f"of error feedback: row {over[0]} the first"
        )
