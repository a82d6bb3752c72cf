"""Sequential calibration: activations of one block at a time.

Each block of a chain is run over all batches before the next one is. Its outputs are kept, one a batch, in
memory or on disk, and the model is started again for the next block, so that masks, positions and whatever
else it computes on the way are computed as ever. The previous block returns its cached output, earlier ones
return NaN, which shows where a model is no chain. The run ends as soon as the block has.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..errors import CalibrationError, UnsupportedError
from ..libraries import reading
from ..progress import counted
from ..recipes import Recipe, Rule
from ..stats import StatisticFor
from .block_chain import BlockChain, BlockStage, InMemory, Steps, Watching, holds_nan, keeping
from .calibrate import Calibration, Watch, evaluating, require_batches, run_model
from .convert import quantize_model
from .model_blocks import blocks_of
from .recipe_layers import require_model
from .unfuse import replace_modules, unfused


def calibrate_sequential(
    model: nn.Module,
    recipe: Recipe | str,
    data: Iterable[Any],
    *,
    statistic: StatisticFor | str = "minmax",
    steps: Steps | None = None,
    progress: bool = False,
) -> Calibration:
    """Return the calibration of a model, run block by block.

    The parameters equal :func:`~zeropoint.models.calibrate`'s, bit for bit, unless ``steps`` asks for
    quantized inputs or for another dtype.

    Args:
        model: a model with a list of blocks that run one after the other.
        recipe: rules, or the name of a preset for all Linear layers.
        data: batches; a list or tuple is read again for each block, anything else is kept as a list.
        statistic: as for :func:`calibrate`.
        steps: blocks, and how they run.
        progress: whether to show a progress bar, on a terminal or in a notebook.

    Raises:
        ZeropointError: what ``calibrate`` raises.
        CalibrationError: for blocks that are not in the model and a folder that does not exist.
        UnsupportedError: for blocks that do not run once each, in order, for every batch; each names the
            block.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> data = [torch.randn(2, 8) for _ in range(3)]
        >>> from zeropoint.models import calibrate
        >>> calibrate_sequential(model, "w8a8_static", data) == calibrate(model, "w8a8_static", data)
        True
    """
    chosen = Steps() if steps is None else steps
    require_model(model)
    require_batches(data)
    batches = data if isinstance(data, (list, tuple)) else list(data)
    if not batches:
        raise CalibrationError("calibration data are empty; pass at least one batch")
    with unfused(model) as root:
        watch = Watch(root, recipe, statistic)
        deployed = functools.partial(_quantized, watch) if chosen.quantized_inputs else None
        observe_blocks(root, batches, watch, chosen, deployed=deployed, progress=progress)
        return watch.calibration(len(batches))


def observe_blocks(
    root: nn.Module,
    batches: Sequence[Any],
    watch: Watching,
    steps: Steps,
    *,
    deployed: Callable[[str, nn.Module], nn.Module] | None = None,
    progress: bool = False,
) -> None:
    """Run a model on all batches under ``watch``, block by block.

    Args:
        root: the model; fused weights as they are to be observed.
        batches: at least one.
        watch: what observes it.
        steps: blocks, and how they run.
        deployed: given a block and its name, returns what computes the next inputs in its place.
        progress: whether to show a progress bar, on a terminal or in a notebook.

    Raises:
        CalibrationError: for blocks that are not in the model and a folder that does not exist.
        UnsupportedError: for blocks that do not run once each, in order, for every batch.
    """
    with evaluating(root), keeping(steps.folder, steps.dtype) as values:
        chain = BlockChain(root, blocks_of(root, steps.blocks), values)
        for step in counted(range(len(chain.blocks)), "Calibrating blocks", shown=progress):
            # Two runs where the observed block and the one that computes the next inputs differ.
            with steps.loaded(chain.blocks[step][0]):
                chain.observe(step, batches, watch, keep=deployed is None)
                if deployed is not None:
                    chain.run(step, batches, deployed(*chain.blocks[step]))
        # One batch, at least, shows that the last block does not run again.
        rest = batches if watch.outside(block for _, block in chain.blocks) else batches[:1]
        chain.observe(len(chain.blocks), rest, watch)


def run_blocks(
    root: nn.Module, batches: Sequence[Any], steps: Steps, *, start: int = 0, given: Sequence[Any] = (),
    progress: bool = False,
) -> Iterator[list[Any]]:  # fmt: skip
    """Run a model block by block; yield each block's outputs by batch.

    root: the model. batches: at least one. steps: blocks, and how they run. start: the first block that runs.
    given: outputs of the block before ``start``, one value a batch. progress: whether to show a progress bar,
    on a terminal or in a notebook. Raises CalibrationError for blocks that are not in the model and a folder
    that does not exist; UnsupportedError for blocks that do not run once each, in order, for every batch.
    """
    with keeping(steps.folder, steps.dtype) as values:
        chain = BlockChain(root, blocks_of(root, steps.blocks), values)
        for batch, value in enumerate(given):
            values.begin(start, batch, value)
        for step in counted(range(start, len(chain.blocks)), "Running blocks", shown=progress):
            name, block = chain.blocks[step]
            with evaluating(root), steps.loaded(name):
                chain.run(step, batches, block)
            yield [values.get(step, batch) for batch in range(len(batches))]


def run_rest(root: nn.Module, batch: Any, value: Any, steps: Steps) -> Any:
    """Return a model's output, given its last block's output.

    root: the model; weights inside of blocks are not read. batch: the model's input. value: the output of the
    last block, see :func:`run_blocks`. steps: blocks.
    """

    def pass_on(position: int, *_: Any, **__: Any) -> Any:  # noqa: ARG001 (each block gives the same)
        return tree_map_only(torch.Tensor, torch.clone, value)

    blocks = blocks_of(root, steps.blocks)
    stages = {block: BlockStage(block, at, pass_on) for at, (_, block) in enumerate(blocks)}
    replace_modules(root, dict(stages))
    try:
        with evaluating(root):
            return run_model(root, batch)
    finally:
        replace_modules(root, {stage: block for block, stage in stages.items()})


def is_chain(root: nn.Module, batch: Any, steps: Steps) -> bool:
    """Return whether each block runs once, on the one before alone.

    Layers outside of blocks read no earlier ones either.

    Args:
        root: the model.
        batch: its input, whose output is finite.
        steps: blocks.

    Raises:
        UnsupportedError: for a model that changes weights of a block, or draws random numbers.
    """
    seen, changes, random = list[Any](), False, torch.get_rng_state()
    blocks = blocks_of(root, steps.blocks)
    inside = {module for _, block in blocks for module in block.modules()}
    handles = [
        m.register_forward_hook(lambda _, given, output: seen.append((given, output)))
        for m in root.modules()
        if m is root or (m not in inside and isinstance(m, nn.Linear))
    ]
    ran, what = False, "the model does not run by these blocks"
    with suppress(UnsupportedError), reading(what, "try others", UnsupportedError, system=True):
        with evaluating(root), keeping(None, None) as values:
            chain = BlockChain(root, blocks, values)
            for step, (name, block) in enumerate(chain.blocks):
                if step == min(1, len(chain.blocks) - 1):  # BigBird makes layers when it first runs
                    random = torch.get_rng_state()
                with steps.loaded(name):
                    before = [parameter._version for parameter in block.parameters()]
                    with InMemory():
                        chain.run(step, [batch], block)
                    changes |= before != [parameter._version for parameter in block.parameters()]
            seen.clear()
            with InMemory():
                chain.visit(len(chain.blocks), [batch], lambda *_: None)
        ran = True
    for handle in handles:
        handle.remove()
    if changes:
        raise UnsupportedError("the model changes its weights when it runs, so that no two runs of it agree")
    if not torch.equal(random, torch.get_rng_state()):
        raise UnsupportedError("the model draws random numbers when it runs, so that no two runs of it agree")
    return ran and not holds_nan(seen)


def _quantized(watch: Watch, name: str, block: nn.Module) -> nn.Module:
    """Return a block as deployed, from its layers' calibration."""
    inner = set(block.modules())
    rules = tuple(
        Rule(
            name=f"re:{re.escape(_within(name, layer))}",
            types=(decision.subject.type,),
            gives=decision.gives,
            reason=decision.rule.reason,
        )
        for layer, module, decision in watch.decided
        if module in inner
    )
    if all(rule.gives is None for rule in rules):
        return block
    learned = Calibration(
        params={_within(name, at): found for at, found in watch.params(block).items()},
        statistics={_within(name, at): found for at, found in watch.statistics(block).items()},
    )
    return quantize_model(block, Recipe(rules=rules), calibration=learned).model


def _within(name: str, place: str) -> str:
    """Return a place in the model relative to block ``name``."""
    return place.removeprefix(name).lstrip(".")
