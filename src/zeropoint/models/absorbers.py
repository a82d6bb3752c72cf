"""Absorbers of channel rescaling, found by probing a block's function.

A norm, or a linear layer, absorbs a rescaling when its rows, each times a number, give the same input with
each channel times the number of one row, and when the block's output is unchanged once all readers of these
channels divide by it. No name and no class decides. So a norm that adds one to its weight is one whose weight
has to change otherwise; keys behind a softmax absorb nothing; a value that several heads read is the row of
several channels; and a router, a gate or an expert that reads the same channels is a reader.

Numbers are powers of two, which change no bit of a sum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .layer import on_inputs
from .site_inputs import kin_of
from .sites import Site

_DIGITS = 4
"""Rows are numbered in this base, from 1 on: a row is halved as often as its digit says."""
_CLOSE = 1e-3
"""Largest difference of an input from a multiple of what it was, over its size."""
_LEFT, _ROUNDED = 1e-4, 0.05
"""Share of the change of outputs that may be left once readers make up for it: powers of two leave none, and
a weight of 16 bits to which a norm adds one is rounded."""
_MOST = 16
"""Most channels that one row gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Absorber:
    """A module that gives the channels of a site.

    name: of the module. first: the first of its rows that do. place: (channels,), the number of the row of
    each channel, counted from ``first``. one: what it adds to its weight; for norms alone. readers: names of
    the modules with weights whose columns are these channels.
    """

    name: str
    first: int
    place: torch.Tensor
    one: float
    readers: tuple[str, ...]

    def scale_rows(self, module: nn.Module, numbers: torch.Tensor) -> None:
        """Multiply the rows of the module with ``numbers``, one for each."""
        weight = module.get_parameter("weight").detach()[self.first :]
        numbers = numbers.to(torch.promote_types(weight.dtype, torch.float32))
        weight.copy_((weight + self.one) * numbers.reshape(-1, *[1] * (weight.ndim - 1)) - self.one)
        bias = module._parameters.get("bias")
        if bias is not None:
            bias.detach()[self.first :].mul_(numbers.to(bias.dtype))


def scale_columns(module: nn.Module, numbers: torch.Tensor) -> None:
    """Multiply the columns of the weight of a module with ``numbers``."""
    weight = module.get_parameter("weight").detach()
    weight.copy_(weight * numbers.to(torch.promote_types(weight.dtype, torch.float32)))


class BlockProbe:
    """Runs a block on one batch, recording outputs and module inputs.

    run: runs the block and returns its output. modules: the modules of the block with weights, by name.
    """

    def __init__(self, run: Callable[[], Any], modules: Mapping[str, nn.Module]) -> None:
        self._run, self.modules = run, modules
        self.order: list[str] = []
        """Modules in the order in which they ran."""
        self.outputs, self.inputs = self.seen()

    def seen(self) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Return the block's outputs, and first module inputs, (vectors, channels)."""
        inputs: dict[str, torch.Tensor] = {}
        self.order = []

        def keep(name: str, x: torch.Tensor) -> torch.Tensor:
            if name not in inputs:
                inputs[name] = x.detach().reshape(-1, x.shape[-1]).clone()
                self.order.append(name)
            return x

        with on_inputs((module, functools.partial(keep, name)) for name, module in self.modules.items()):
            result = self._run()
        return [x.detach().clone() for x in tree_leaves(result) if isinstance(x, torch.Tensor)], inputs

    @contextmanager
    def unchanged(self, names: Iterable[str]) -> Iterator[None]:
        """Return a context that restores the modules' current parameters."""
        before = [
            (parameter, parameter.detach().clone())
            for name in names
            for parameter in self.modules[name]._parameters.values()
            if parameter is not None
        ]
        try:
            yield
        finally:
            for parameter, value in before:
                parameter.detach().copy_(value)


def absorber_of(site: Site, probe: BlockProbe) -> Absorber | None:
    """Return the absorber of a site's channels, or None.

    None where nothing can absorb a rescaling of all channels. site: its readers are modules of the probe.
    """
    reader = site.readers[0]
    if reader not in probe.inputs:
        return None
    channels = probe.inputs[reader].shape[1]
    before = probe.order[: probe.order.index(reader)]
    for name in reversed(before):
        for first in _windows(probe.modules[name], channels):
            for one in (0.0, 1.0) if probe.modules[name].get_parameter("weight").ndim == 1 else (0.0,):
                place = _place(probe, (name, first, one), reader)
                found = None if place is None else _confirmed(probe, (name, first, one), place, site.readers)
                if found is not None:
                    return found
    return None


def _windows(module: nn.Module, channels: int) -> Iterator[int]:
    """Yield first rows of candidate windows of ``channels`` rows."""
    weight = module.get_parameter("weight")
    rows = len(weight)
    if weight.ndim == 1:
        if rows == channels:
            yield 0
    elif weight.ndim == 2 and isinstance(module, nn.Linear):
        if rows <= channels:
            if channels % rows == 0 and channels <= rows * _MOST:
                yield 0
        else:
            for share in range(1, _MOST + 1):
                if channels % share == 0 and channels // share > 1:
                    yield rows - channels // share


_Rows = tuple[str, int, float]
"""A module, the first of its rows, and what it adds to its weight."""


def _place(probe: BlockProbe, rows: _Rows, reader: str) -> torch.Tensor | None:
    """Return each input channel's source row, or None if some lack one."""
    name, first, one = rows
    module, x = probe.modules[name], probe.inputs[reader].double()
    count = len(module.get_parameter("weight")) - first
    live = x.square().sum(0) > 0
    place = torch.zeros(x.shape[1], dtype=torch.int64, device=x.device)
    number = torch.arange(1, count + 1, device=x.device)
    for position in range(math.ceil(math.log(count + 1, _DIGITS))):
        digits = number // _DIGITS**position % _DIGITS
        with probe.unchanged([name]):
            own = Absorber(name=name, first=first, place=place, one=one, readers=())
            own.scale_rows(module, 0.5 ** digits.double())
            y = probe.seen()[1].get(reader)
        found = None if y is None or y.shape != x.shape else _halvings(x, y.double(), live)
        if found is None:
            return None
        place += found * _DIGITS**position
    place -= 1  # what no row changes is number 0
    if not live.all():
        # A channel that is always zero says nothing: its row follows where all others have their own number.
        own_number = torch.arange(len(place), device=place.device)
        if count != len(place) or not torch.equal(place[live], own_number[live]):
            return None
        place = own_number
    return place if int(place.min()) >= 0 and len(set(place.tolist())) == count else None


def _halvings(x: torch.Tensor, y: torch.Tensor, live: torch.Tensor) -> torch.Tensor | None:
    """Return the halvings from ``x`` to ``y`` by channel, or None."""
    size = x.square().sum(0).clamp_min(1e-300)
    ratio = (x * y).sum(0) / size
    missed = (y - ratio * x).square().sum(0) / size
    times = torch.where(live, -ratio.clamp_min(1e-300).log2(), torch.zeros_like(ratio))
    near = times.round()
    close = (missed < _CLOSE) & ((times - near).abs() < 0.1) & (near >= 0) & (near < _DIGITS)
    return near.long() if bool((close | ~live).all()) else None


def _confirmed(
    probe: BlockProbe, rows: _Rows, place: torch.Tensor, readers: Sequence[str]
) -> Absorber | None:
    """Return the absorber with all its readers, if the block agrees."""
    name, first, one = rows
    digits = _digits(place)
    every = list(readers)
    while True:
        found = Absorber(name=name, first=first, place=place, one=one, readers=tuple(every))
        if name in every or any(probe.modules[each].get_parameter("weight").ndim != 2 for each in every):
            return None
        with probe.unchanged([name, *every]):
            found.scale_rows(probe.modules[name], 0.5 ** digits.double())
            for each in every:
                scale_columns(probe.modules[each], 2.0 ** digits[place].double())
            outputs, inputs = probe.seen()
        more = [each for each in _halved(probe, inputs, digits[place]) if each not in every]
        if not more:
            unreached = _unreached(probe, every)
            if unreached is None or not _makes_up(probe, [found], outputs):
                return None
            return replace(found, readers=(*every, *unreached))
        every += more


def _digits(place: torch.Tensor) -> torch.Tensor:
    """Return each row's number of halvings; neighbors differ."""
    return torch.arange(int(place.max()) + 1, device=place.device) % (_DIGITS - 1) + 1


def are_absorbers(probe: BlockProbe, found: Sequence[Absorber]) -> bool:
    """Return whether absorbers of a similar block hold for this one."""
    outputs = _halved_outputs(probe, found, made_up=True)
    return _makes_up(probe, found, outputs)


def _makes_up(probe: BlockProbe, found: Sequence[Absorber], outputs: Sequence[torch.Tensor]) -> bool:
    """Return whether compensated outputs equal the block's own.

    The remaining difference is compared with the difference that halved rows make alone, since a block may
    add little to its input.
    """
    rounded = any(
        each.one and probe.modules[each.name].get_parameter("weight").dtype.itemsize < 4 for each in found
    )
    alone = _halved_outputs(probe, found, made_up=False)
    left, moved = _distance(probe.outputs, outputs), _distance(probe.outputs, alone)
    return left <= (_ROUNDED if rounded else _LEFT) ** 2 * moved


def _halved_outputs(probe: BlockProbe, found: Sequence[Absorber], *, made_up: bool) -> list[torch.Tensor]:
    """Return the block's outputs under halved rows, with or without compensation."""
    with probe.unchanged({each.name for each in found} | {name for each in found for name in each.readers}):
        for each in found:
            digits = _digits(each.place)
            each.scale_rows(probe.modules[each.name], 0.5 ** digits.double())
            for name in each.readers if made_up else ():
                scale_columns(probe.modules[name], 2.0 ** digits[each.place].double())
        return probe.seen()[0]


def _halved(probe: BlockProbe, inputs: Mapping[str, torch.Tensor], digits: torch.Tensor) -> Iterator[str]:
    """Yield the modules whose inputs are halved by ``digits``."""
    for name, y in inputs.items():
        x, weight = probe.inputs.get(name), probe.modules[name].get_parameter("weight")
        if x is None or x.shape != y.shape or x.shape[1] != len(digits) or weight.ndim != 2 or not x.any():
            continue
        live = x.square().sum(0) > 0
        found = _halvings(x.double(), y.double(), live)
        if found is not None and torch.equal(found[live], digits[live]):
            yield name


def _unreached(probe: BlockProbe, readers: Sequence[str]) -> list[str] | None:
    """Return the unreached experts that read like their kin, or None.

    None where too few experts were reached to tell.
    """
    found = []
    for kind in {kin_of(name) for name in readers}:
        kin = [name for name in probe.modules if kin_of(name) == kind]
        reached = [name for name in kin if name in probe.inputs]
        unknown = [name for name in kin if name not in probe.inputs]
        if unknown and len(reached) < 2:
            return None
        if all(name in readers for name in reached):
            found += unknown
    return found


def _distance(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """Return the squared distance of outputs; infinite for NaN or other shapes."""
    if [x.shape for x in a] != [x.shape for x in b]:
        return math.inf
    found = math.fsum(float((x.double() - y.double()).square().sum()) for x, y in zip(a, b, strict=True))
    return found if math.isfinite(found) else math.inf


def outputs_differ(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], most: float) -> bool:
    """Return whether outputs differ by more than a share of their size."""
    size = math.fsum(float(x.double().square().sum()) for x in a)
    return not _distance(a, b) <= most**2 * size
