"""Channel rescaling of a block's sites, and the resulting folds.

The block computes what it did before, but for rounding. A parameter may be on the far side of one site and on
the near side of another, as values of attention are, so that both vectors are kept for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..errors import CalibrationError, count
from ..methods.channels import ChannelFold, numbers_of
from ..methods.rescaling import ChannelReader, Channels, Rescaling, rescaled
from .absorbers import Absorber, BlockProbe, absorber_of, are_absorbers, outputs_differ
from .sites import Site
from .unfuse import unfused


@dataclass(frozen=True, slots=True, kw_only=True)
class RescaledBlock:
    """How the channels of a block are rescaled.

    folds: what is folded into its parameters, by name. notes: what each step found for each input, empty
    where it changes nothing. refused: why inputs that could be rescaled are not.
    """

    folds: Mapping[str, ChannelFold]
    notes: tuple[str, ...] = ()
    refused: str = ""


class Absorbers:
    """Absorbers of sites by block; blocks of one structure are probed once."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[Absorber, ...]] = {}

    def of(self, prefix: str, probe: BlockProbe, sites: Sequence[Site]) -> tuple[Absorber, ...]:
        """Return the absorbers of sites of a block, named by ``prefix``."""
        cut = len(prefix)
        key = (
            tuple(
                (name[cut:], type(m), tuple(m.get_parameter("weight").shape))
                for name, m in probe.modules.items()
            ),
            tuple(tuple(name[cut:] for name in site.readers) for site in sites),
        )
        known = self._known.get(key)
        if known is not None:
            found = tuple(_renamed(each, lambda name: prefix + name) for each in known)
            if are_absorbers(probe, found):
                return found
        found = tuple(_absorbers(probe, sites))
        self._known[key] = tuple(_renamed(each, lambda name: name[cut:]) for each in found)
        return found


def _renamed(found: Absorber, name: Callable[[str], str]) -> Absorber:
    return replace(found, name=name(found.name), readers=tuple(map(name, found.readers)))


def _absorbers(probe: BlockProbe, sites: Sequence[Site]) -> Iterator[Absorber]:
    """Yield each site's absorber; a layer is a reader of one site."""
    taken: set[str] = set()
    for site in sites:
        found = None if taken.intersection(site.readers) else absorber_of(site, probe)
        if found is not None and taken.isdisjoint(found.readers):
            taken |= set(found.readers)
            yield found


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedReader:
    """A quantized reader: its rows, rescaling steps and rounding.

    layer: its name. rows: their numbers; all if None. steps: that rescale. reader: without its weight.
    """

    layer: str
    rows: torch.Tensor | None
    steps: tuple[Rescaling, ...]
    reader: Callable[..., ChannelReader]


def rescale(
    probe: BlockProbe,
    absorbers: Sequence[Absorber],
    quantized: Sequence[QuantizedReader],
    inputs: Mapping[str, torch.Tensor],
) -> RescaledBlock:
    """Return the channel folds of a block's parameters.

    probe: has the modules of the block. absorbers: of its sites. quantized: the layers that are quantized.
    inputs: some input vectors of each site, (vectors, channels) float32, by its first reader.
    """
    folds: dict[str, ChannelFold] = {}
    notes = []

    def now(name: str) -> torch.Tensor:
        weight = probe.modules[name].get_parameter("weight").detach().float()
        fold = folds.get(f"{name}.weight")
        return weight if fold is None else fold.of(weight)

    for found in absorbers:
        own = [each for each in quantized if each.layer in found.readers]
        steps = {step.name: step for each in own for step in each.steps}
        x = inputs.get(found.readers[0])
        if x is None or not len(x) or not steps:
            continue
        for step in sorted(steps.values(), key=lambda step: step.rank):
            readers = [
                each.reader(weight=now(each.layer) if each.rows is None else now(each.layer)[each.rows])
                if step in each.steps
                else ChannelReader(weight=now(each.layer))
                for each in own
            ]
            given = now(found.name)[found.first :]
            channels = Channels(
                inputs=x,
                readers=tuple(readers),
                place=found.place,
                given=given.abs().amax(1)[found.place] if given.ndim > 1 else None,
            )
            best = rescaled(step, channels)
            notes.append(f"{found.readers[0]}: {step.name} {best.note}" if bool(best.steps.any()) else "")
            x = x / numbers_of(best.steps).float()
            if bool(best.steps.any()):
                _add(folds, folds_of(probe, found, best.steps))
    return RescaledBlock(folds=folds, notes=tuple(notes))


def folds_of(probe: BlockProbe, found: Absorber, steps: torch.Tensor) -> dict[str, ChannelFold]:
    """Return the folds of parameters on both sides of a site.

    steps: (channels,), by which each channel is divided; see :func:`numbers_of`.
    """
    module = probe.modules[found.name]
    rows = steps.new_zeros(len(module.get_parameter("weight")))
    rows[found.first + found.place] = -steps
    folds = {f"{found.name}.weight": ChannelFold(rows=rows, one=found.one)}
    if module._parameters.get("bias") is not None:
        folds[f"{found.name}.bias"] = ChannelFold(rows=rows)
    return folds | {f"{name}.weight": ChannelFold(columns=steps) for name in found.readers}


def _add(folds: dict[str, ChannelFold], more: Mapping[str, ChannelFold]) -> None:
    for name, fold in more.items():
        folds[name] = folds[name].then(fold) if name in folds else fold


def stored(
    probe: BlockProbe,
    absorbers: Sequence[Absorber],
    storable: Callable[[Mapping[str, ChannelFold]], bool] | None,
) -> tuple[Sequence[Absorber], str]:
    """Return the absorbers that files can hold, and why others are left.

    storable: see :class:`~.block_chain.Steps`.
    """

    def fits(some: Iterable[Absorber]) -> bool:
        folds: dict[str, ChannelFold] = {}
        for found in some:
            _add(folds, folds_of(probe, found, torch.ones_like(found.place)))
        return storable is None or storable(folds)

    if fits(absorbers):
        return absorbers, ""
    known = [found for found in absorbers if fits([found])]
    left = [found.readers[0] for found in absorbers if found not in known]
    more = f" and {count(len(left) - 1, 'more input')} of its block" if len(left) > 1 else ""
    return known, f"channels of {left[0]}{more} are not rescaled: the files have these weights otherwise"


@contextmanager
def folded(root: nn.Module, folds: Mapping[str, ChannelFold], *, kept: bool = False) -> Iterator[None]:
    """Return a context with folded parameters; ``kept`` makes them permanent.

    After an error they are restored all the same. Raises CalibrationError for a parameter that overflows its
    dtype.
    """
    parameters = {name: root.get_parameter(name).detach() for name in folds}
    before = {name: parameter.clone() for name, parameter in parameters.items()}
    done = False
    try:
        for name, fold in folds.items():
            parameter = parameters[name]
            parameter.copy_(fold.on(parameter.device).of(parameter))
            if not bool(torch.isfinite(parameter).all()):
                raise CalibrationError(
                    f"{name} overflows {parameter.dtype} when its channels are rescaled; leave the step out, "
                    "or use a checkpoint of bfloat16 or float32"
                )
        yield
        done = kept
    finally:
        for name, value in before.items() if not done else ():
            parameters[name].copy_(value)


@contextmanager
def rescaled_channels(
    model: nn.Module, folds: Mapping[str, ChannelFold], *, kept: bool = False
) -> Iterator[None]:
    """Return :func:`folded` of a model, under its unfused parameter names."""
    with ExitStack() as stack:
        with unfused(model) if folds else nullcontext(model) as root:
            stack.enter_context(folded(root, folds, kept=kept))
        yield


def require_same_outputs(probe: BlockProbe, found: RescaledBlock, root: nn.Module) -> RescaledBlock:
    """Return ``found`` if the block's outputs stay, else the reason."""
    with folded(root, found.folds):
        outputs, _ = probe.seen()
    if not outputs_differ(probe.outputs, outputs, _ROUNDING):
        return found
    block = next(iter(found.folds), "")
    return RescaledBlock(
        folds={},
        notes=("",) * len(found.notes),
        refused=f"{block} and the rest of its block are not rescaled: outputs would be others",
    )


_ROUNDING = 0.03
"""Largest difference of outputs over their size, which rounding parameters to 16 bits may cause."""


def rescalable(root: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Return a block's modules with unshared weights.

    root: the model. prefix: how the names of the block's modules begin.
    """
    found = [(name, m) for name, m in root.named_modules() if m._parameters.get("weight") is not None]
    shared = Counter(id(module._parameters["weight"]) for _, module in found)
    return {
        name: module
        for name, module in found
        if name.startswith(prefix) and shared[id(module._parameters["weight"])] == 1
    }


def two_sided(modules: Mapping[str, nn.Module]) -> Collection[str]:
    """Return the names of the modules whose weight is a matrix."""
    return [name for name, module in modules.items() if module.get_parameter("weight").ndim == 2]
