"""What a user should hear before trusting an output: weights that a scheme does not fit, or keeps little of.

This module decides nothing. It compares what was asked for with other schemes that could have been.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..codecs.compressed_tensors_config import LayerScheme, layer_scheme
from ..errors import ZeropointError, count, printable, size_of
from ..schemes import LAYER_PRESETS
from .decisions import misfit
from .plan import Plan
from .run import RunResult

ROUGH = 0.5
"""Relative error from which an output is hardly the model any more: of published schemes of 4 bits, the worst
have 0.2."""


def partly(plan: Plan) -> list[str]:
    """Return a sentence where a scheme fits some shapes only: what stays as it is, and which fits all."""
    for layer in plan.layers:
        left = [d.entry for d in plan.unfit if misfit(d.entry, layer) is not None]
        if not left:
            continue
        taken = [d.entry for d in plan.decisions if d.layer == layer]
        kept, all_ = (sum(e.nbytes for e in entries) for entries in (left, [*left, *taken]))
        fitting = (
            other.name for other in _others(layer) if not any(misfit(e, other) for e in (*left, *taken))
        )
        found = next(fitting, None)
        remedy = "no scheme like it fits all" if found is None else f"--to {found} fits all of them"
        first, why = left[0], misfit(left[0], layer)
        said = (
            f"{size_of(kept)} of {size_of(all_)} of linear weights stay in {first.dtype}: {layer} does not "
            f"fit {count(len(left), 'weight')}, such as {printable(first.name)} ({why}); {remedy}"
        )
        return [said]
    return []


def rough(result: RunResult) -> list[str]:
    """Return a sentence where the measured error leaves little of a weight, with a scheme that keeps more."""
    lost = [outcome for outcome in result.outcomes if outcome.error.relative > ROUGH]
    if not lost:
        return []
    worst = max(lost, key=lambda outcome: outcome.error.relative)
    whose = "all weights" if len(lost) == len(result.outcomes) else count(len(lost), "weight")
    said = (
        f"the relative error of {whose} is above {ROUGH}, that of {printable(worst.weight.module)} is "
        f"{worst.error.relative:.2f}; --to {_finer(worst.weight.layer).name} keeps more of them"
    )
    return [said]


def _others(layer: LayerScheme) -> Iterator[LayerScheme]:
    """Yield schemes like ``layer`` that fit more shapes, the closest first."""
    element = str(layer.weight).partition(":")[0]
    for blocks in ("g64", "g32", "g16", "channel") if layer.input is None else ():
        with contextlib.suppress(ZeropointError):  # not every element has a layout for every block
            found = layer_scheme(f"{element}:{blocks}")
            assert found.layout is not None  # asking for it raises where there is none
            yield LayerScheme(name=f"{element}:{blocks}", weight=found.weight, input=None)
    yield from sorted(
        _presets(), key=lambda other: (abs(other.weight.bits - layer.weight.bits), other.input != layer.input)
    )


def _finer(layer: LayerScheme) -> LayerScheme:
    """Return the preset for weights alone that is closest to ``layer`` from above."""
    own = layer.weight
    alone = [other for other in _presets() if other.input is None and other.weight.bits >= own.bits]
    return min(alone, key=lambda other: (other.weight.bits, other.weight.element != own.element))


def _presets() -> list[LayerScheme]:
    return [layer_scheme(name) for name, preset in LAYER_PRESETS.items() if not preset.needs_calibration]
