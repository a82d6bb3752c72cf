"""Report sentences about solved weights: losses, bounds and changes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping

from ...errors import count, printable
from ...methods import Loss, method_named
from ...methods.chain import start_of
from ...methods.channels import corrections_of
from ...models.block_rounding import of_block
from ...models.rescale import RescaledBlock
from ...models.solutions import WeightTask
from ..plan.checkpoint_plan import CheckpointPlan
from ..plan.rescaled import RESCALED


def of_losses(losses: Mapping[str, Loss]) -> Iterator[str]:
    """Yield sentences about the losses of all weights, by their names."""
    yield from _outputs(losses)
    yield from _bounded(losses)
    yield from _together(losses)


def of_rescaling(found: Iterable[RescaledBlock]) -> Iterator[str]:
    """Yield sentences about rescaled inputs, and blocks without any."""
    blocks = list(found)
    notes = [note for block in blocks for note in block.notes]
    if blocks:
        done = f"{sum(map(bool, notes))} of {len(notes)}"
        yield f"channels of {done} inputs whose channels can be rescaled are, as {RESCALED} says"
    refused = [block.refused for block in blocks if block.refused]
    if refused:
        more = f"; likewise in {count(len(refused) - 1, 'more block')}" if len(refused) > 1 else ""
        yield f"{refused[0]}{more}"


def of_corrections(plan: CheckpointPlan, corrected: Collection[str]) -> Iterator[str]:
    """Yield a sentence about corrected biases, and layers without one."""
    asked = [weight for weight in plan.weights if corrections_of(method_named(weight.method))]
    if not asked:
        return
    without = [weight.module for weight in asked if weight.module not in corrected]
    rest = f"; {len(without)} have none, such as {printable(without[0])}" if without else ""
    yield (
        f"the biases of {len(asked) - len(without)} of {count(len(asked), 'weight')} take up the mean error "
        f"of outputs, as {RESCALED} says{rest}"
    )


def outside_of_blocks(tasks: Iterable[WeightTask], losses: Mapping[str, Loss]) -> Iterator[str]:
    """Yield a sentence about weights outside blocks, for methods by block."""
    found: dict[str, list[str]] = {}
    for task in tasks:
        if of_block(task) and losses[task.name].together is None:
            found.setdefault(start_of(task.method).name, []).append(task.name)
    for method, names in found.items():
        yield (
            f"{count(len(names), 'weight')} outside of all blocks, such as {printable(names[0])}, "
            f"keep the codes of {method}"
        )


def _outputs(losses: Mapping[str, Loss]) -> Iterator[str]:
    """Yield sentences about the losses of all weights, relative squared errors."""
    known = {name: loss for name, loss in losses.items() if loss.seen is not None}
    if not known:
        return
    worst = max(known, key=lambda name: known[name].held_out or known[name].seen or 0.0)
    seen = math.fsum(loss.seen or 0.0 for loss in known.values()) / len(known)
    held = [loss.held_out for loss in known.values() if loss.held_out is not None]
    if not held:
        yield (
            f"loss of outputs {seen:.3%} of their squares where it was learned; no tokens were held out; the "
            f"most is {printable(worst)} with {known[worst].seen:.3%}"
        )
        return
    mean = math.fsum(held) / len(held)
    ratio = mean / seen if seen else 1.0
    enough = "enough data" if ratio < _ENOUGH else "more data would help"
    yield (
        f"loss of outputs {seen:.3%} of their squares where it was learned, {mean:.3%} on held-out tokens "
        f"({ratio:.2f} times: {enough}); the most is {printable(worst)} with {known[worst].held_out:.3%}"
    )


def _bounded(losses: Mapping[str, Loss]) -> Iterator[str]:
    """Yield a sentence about the bounds of errors of outputs."""
    known = [loss.outputs for loss in losses.values() if loss.outputs is not None]
    if not known:
        return
    loss = math.fsum(each.loss for each in known) / len(known)
    bound = math.fsum(each.bound for each in known) / len(known)
    over = sum(each.over for each in known)
    rows = f"; codes that clip take {count(over, 'row')} past it" if over else ""
    yield (
        f"outputs on all that was learned are off by {loss:.3%} of their squares from those of what was "
        f"rounded, for which error feedback proves at most {bound:.3%} where nothing clips{rows}"
    )


def _together(losses: Mapping[str, Loss]) -> Iterator[str]:
    """Yield a sentence about blocks whose weights were rounded together."""
    blocks = {loss.together for loss in losses.values() if loss.together is not None}
    if blocks:
        before, after = (math.fsum(pair[at] for pair in blocks) / len(blocks) for at in (0, 1))
        better = sum(then < first for first, then in blocks)
        yield (
            f"outputs of {count(len(blocks), 'block')} are off by {after:.3%} of their squares on held-out "
            f"windows, and by {before:.3%} before their weights were rounded together, which changed {better}"
        )


_ENOUGH = 1.5
"""Held-out loss over the other, below which more calibration data change little."""
