"""Forward pass of a checkpoint's model on decoded weights, block by block.

Blocks have their weights one at a time while all batches pass them. What the last block gives is kept, and
the rest of the model, which is small next to its blocks, runs on one batch at a time when that is asked for:
logits of a large vocabulary are never held for more than one.
"""

from __future__ import annotations

import inspect
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ...errors import (
    CalibrationError,
    CheckpointError,
    UnsupportedError,
    ZeropointError,
    count,
    option,
    printable,
    size_of,
)
from ...models.dynamic_quantize import as_module
from ...models.layer import on_inputs
from ...models.sequential import run_blocks, run_rest
from ...ops.devices import CPU
from ..plan.limits import Limits
from ..read.source import Source, open_source
from ..read.storage import Files, OpenFiles, shown
from ..run.loop import RunResult
from .loading import input_quantizer
from .parameter_names import WeightRows
from .running_model import RunningModel, running
from .samples import IDS, Batches

_REMEDY = "it is not evaluated here"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """A model that has run on batches up to its last block.

    model: it. values: what the last block gave, one value a batch. notes: sentences about inputs that are
    quantized.
    """

    model: RunningModel
    values: Sequence[Any]
    notes: tuple[str, ...] = ()

    def output(self, batch: int, *, last: int | None = None) -> Any:
        """Return the model's output for a batch; of logits, ``last`` positions."""
        given: dict[str, Any] = dict(self.model.batches[batch])
        if last is not None and _KEEP in inspect.signature(self.model.root.forward).parameters:
            given[_KEEP] = last
        with torch.no_grad():
            there = tree_map_only(torch.Tensor, lambda x: x.to(self.model.device), self.values[batch])
            return run_rest(self.model.root, given, there, self.model.steps)

    def logits(self, batch: int, *, last: int | None = None) -> torch.Tensor:
        """Return logits of a batch: (sequences, positions, vocabulary).

        They are of the last positions, or of all. Raises UnsupportedError for a model that gives none.
        """
        found = getattr(self.output(batch, last=last), "logits", None)
        if found is None:
            kind = type(self.model.root).__name__
            raise UnsupportedError(f"{kind} gives no logits of tokens; {_REMEDY}")
        whole: torch.Tensor = found
        return whole if last is None else whole[:, -last:]


_KEEP = "logits_to_keep"
"""Argument of transformers models: number of last positions with logits."""


@contextmanager
def opened(
    source: Source, batches: Batches, limits: Limits, *, dtype: torch.dtype | None = torch.float32
) -> Iterator[tuple[RunningModel, tuple[str, ...]]]:
    """Return a context in which a checkpoint's model runs on batches.

    Inputs are quantized where it says so. It gives the model, and sentences about inputs. dtype: of weights
    and activations. Raises CalibrationError for tokens that the model does not know, and what
    :func:`~.running_model.running` raises.
    """
    with OpenFiles() as files, ExitStack() as stack:
        model = stack.enter_context(running(source, batches, limits, remedy=_REMEDY, dtype=dtype))
        for batch in batches:
            if IDS not in batch:
                continue
            high, length = int(batch[IDS].max()), batch[IDS].shape[1]
            if 0 < model.vocabulary <= high:
                raise CalibrationError(
                    f"{shown(source.given)} knows tokens 0..{model.vocabulary - 1}, and the text has token "
                    f"{high}: vocabularies differ; compare models of one vocabulary"
                )
            if length > model.longest:
                raise CalibrationError(
                    f"{shown(source.given)} takes {model.longest} tokens at most, and a window has {length}; "
                    f"use {option('context', model.longest)}"
                )
        notes = stack.enter_context(rounded_inputs(model, source, files))
        yield model, notes


@contextmanager
def forward_pass(
    source: Source,
    batches: Batches,
    limits: Limits,
    *,
    dtype: torch.dtype | None = torch.float32,
    progress: bool = False,
    known: Callable[[int], Sequence[Any]] | None = None,
) -> Iterator[ForwardPass]:
    """Return a context with the outputs of a model on batches.

    batches: see :data:`~.running_model.Batches`. dtype: of weights and activations. progress: whether to show
    a bar, on a terminal. known: where that is known already, takes the width of the model and gives what the
    last block does, one value a batch. Raises what :func:`opened` raises.
    """
    with opened(source, batches, limits, dtype=dtype) as (model, notes):
        if known is None:
            values: Sequence[Any] = _last(
                run_blocks(model.root, model.batches, model.steps, progress=progress)
            )
        else:
            values = known(model.width)
        yield ForwardPass(model=model, values=values, notes=notes)


def _last(passed: Iterator[list[Any]]) -> list[Any]:
    """Return the output of the last block, keeping no other."""
    (found,) = deque(passed, maxlen=1)
    return found


class Replacing:
    """A model on data with replaceable weights; later blocks run again.

    model: a model that runs, see :func:`opened`. Within the context all of it has its weights, and what each
    block gives for each batch is kept: for models that fit into memory.
    """

    def __init__(self, model: RunningModel) -> None:
        self.model = model
        self._blocks = model.steps.blocks
        self._held = ExitStack()
        self._steps = replace(model.steps, loaded=nullcontext)
        self._given: list[Sequence[Any]] = []

    def __enter__(self) -> Replacing:
        require_whole(self.model)
        for name in self._blocks:
            self._held.enter_context(self.model.steps.loaded(name))
        self._given = list(run_blocks(self.model.root, self.model.batches, self._steps))
        return self

    def __exit__(self, *failure: object) -> None:
        self._held.close()

    @property
    def modules(self) -> tuple[str, ...]:
        """Names in the files of the replaceable Linear layers."""
        return tuple(rows.module for rows in self.model.rows)

    def weight(self, module: str) -> torch.Tensor:
        """Return a copy of a weight in file layout: (out, in)."""
        rows = self._rows(module)
        return self._parameter(rows.layer)[rows.index].clone()

    @contextmanager
    def outputs(self, weights: Mapping[str, torch.Tensor]) -> Iterator[ForwardPass]:
        """Return a context with some replaced weights: (out, in), by module.

        Raises CalibrationError for a name or shape that the model has not.
        """
        model, first = self.model, min((self._block(module) for module in weights), default=len(self._blocks))
        given = self._given[first - 1] if first else ()
        with self._replaced(weights):
            if first < len(self._blocks):
                passed = run_blocks(model.root, model.batches, self._steps, start=first, given=given)
                yield ForwardPass(model=model, values=_last(passed))
            else:
                yield ForwardPass(model=model, values=given)

    @contextmanager
    def _replaced(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        before = {module: self.weight(module) for module in weights}
        for module, weight in weights.items():
            if weight.shape != before[module].shape:
                raise CalibrationError(
                    f"the weight for {printable(module)} has shape {tuple(weight.shape)}, and the model has "
                    f"{tuple(before[module].shape)} there; pass one of its shape"
                )
        try:
            for module, weight in weights.items():
                self._put(module, weight)
            yield
        finally:
            for module, weight in before.items():
                self._put(module, weight)

    def _put(self, module: str, weight: torch.Tensor) -> None:
        rows = self._rows(module)
        parameter = self._parameter(rows.layer)
        parameter[rows.index] = weight.detach().to(parameter)

    def _rows(self, module: str) -> WeightRows:
        found = next((rows for rows in self.model.rows if rows.module == module), None)
        if found is None:
            raise CalibrationError(
                f"{printable(module)} is no Linear layer of {type(self.model.root).__name__}; name one of "
                f"its {len(self.model.rows)}, such as {printable(self.model.rows[0].module)}"
            )
        return found

    def _parameter(self, layer: str) -> torch.Tensor:
        return self.model.root.get_parameter(f"{layer}.weight").detach()

    def _block(self, module: str) -> int:
        """Return the block number of a layer; the block count after all."""
        layer = self._rows(module).layer
        for number, name in enumerate(self._blocks):
            if layer.startswith(f"{name}."):
                return number
        embeddings = self.model.root.get_input_embeddings().weight  # type: ignore[operator]
        tied = self.model.root.get_parameter(f"{layer}.weight") is embeddings
        return len(self._blocks) if layer == _HEAD and not tied else 0


def require_whole(model: RunningModel) -> None:
    """Raise CheckpointError if a model's blocks exceed a GPU's free memory."""
    inside = [sum(p.nbytes for p in model.root.get_submodule(n).parameters()) for n in model.steps.blocks]
    missing = sum(inside) - 2 * max(inside) - model.spare
    if model.device != CPU and missing > 0:
        raise CheckpointError(
            f"the whole model takes {size_of(missing)} more than is free on {model.device}; leave "
            f"{option('device', str(model.device))} out"
        )


_HEAD = "lm_head"
"""Name of the layer after all blocks in transformers models."""


TOKENS = 200
"""Tokens of the short run."""
_ROWS = 16
"""Tokens whose probabilities are held at once in float64: vocabularies are large."""
_ANOTHER, _FAR = 2.0, 1.0
"""KL divergence in nats, and relative squared error, of a result that counts as another model."""


def compared(
    result: RunResult, source: Source, batch: Mapping[str, torch.Tensor], limits: Limits
) -> RunResult:
    """Return ``result`` with a note on its outputs' distance from the original's.

    result: what was written. source: what it was made of. batch: inputs that nothing was learned from; of
    token ids alone the first `TOKENS` are run. limits: of memory.
    """
    of_tokens = batch.keys() == {IDS}
    batches = [{IDS: batch[IDS][:, :TOKENS]} if of_tokens else dict(batch)]
    try:
        found = []
        for each in (source, open_source(result.path)):
            with forward_pass(each, batches, limits) as passed:
                found.append(passed.logits(0)[0].float() if of_tokens else _numbers(passed.output(0)))
    except ZeropointError as error:
        return _noted(result, f"the result was not run against the original: {error}")
    far, said = (_divergence if of_tokens else _distance)(*found)
    if far:
        said = f"THE RESULT IS ANOTHER MODEL: {said}; use more bits, another method, or more calibration data"
    return _noted(result, said)


def _divergence(base: torch.Tensor, own: torch.Tensor) -> tuple[bool, str]:
    """Return whether logits, (tokens, vocabulary), are another model's, and a sentence."""
    divergence, same = 0.0, float((base.argmax(-1) == own.argmax(-1)).double().mean())
    for ours, theirs in zip(torch.split(own, _ROWS), torch.split(base, _ROWS), strict=True):
        p, q = theirs.double().log_softmax(-1), ours.double().log_softmax(-1)
        divergence += float((p.exp() * (p - q)).sum()) / len(base)
    said = (
        f"KL divergence {divergence:.4f} from the original on {len(base)} tokens, same top token {same:.0%}"
    )
    return divergence > _ANOTHER, said


def _numbers(output: Any) -> torch.Tensor:
    """Return all floats of an output in one vector, float64."""
    floats = (x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.is_floating_point())
    return torch.cat([x.double().flatten() for x in floats])


def _distance(base: torch.Tensor, own: torch.Tensor) -> tuple[bool, str]:
    """Return whether outputs are another model's, and a sentence."""
    left = torch.where(own == base, 0.0, own - base).square().sum()  # infinities may be the same
    share = float(left / base[base.isfinite()].square().sum().clamp_min(1e-300))
    said = f"outputs are off by {share:.3%} of their squares from the original's on a sample"
    return not share < _FAR, said


def _noted(result: RunResult, note: str) -> RunResult:
    return replace(result, notes=(*result.notes, note))


@contextmanager
def rounded_inputs(model: RunningModel, source: Source, files: Files) -> Iterator[tuple[str, ...]]:
    """Fake-quantize layer inputs within the context; yield sentences about them.

    Sentences say how many layers have which scheme of inputs, and where inputs are quantized in engines but
    not here. source: the checkpoint with its codes. files: of it, open.
    """
    rounding: list[tuple[nn.Module, nn.Module]] = []
    hooked: set[str] = set()
    rounded, left = Counter[str](), Counter[str]()
    for rows in model.rows:
        found = model.floats.quantized(f"{rows.module}.weight")
        layer, given = found or (None, None)
        if layer is None or given is None or rows.layer in hooked:
            continue
        hooked.add(rows.layer)
        if layer.codec.input_names is None and not given.dynamic:
            left[str(given)] += 1
            continue
        quantizer = as_module(input_quantizer(layer, given, source, files))
        assert quantizer is not None
        rounding.append((model.root.get_submodule(rows.layer), quantizer.to(model.device).eval()))
        rounded[str(given)] += 1
    with on_inputs(rounding):
        yield (
            *(f"inputs of {count(n, 'layer')} are quantized to {text}" for text, n in rounded.items()),
            *(
                f"weights only: inputs of {count(n, 'layer')} are {text} in engines, and floats here"
                for text, n in left.items()
            ),
        )
