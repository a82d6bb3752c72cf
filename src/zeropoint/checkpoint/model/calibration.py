"""A checkpoint's model on data: it runs, and the inputs of its layers give the statistics that methods need.

The model is built by transformers, with parameters that have no memory; those of one block are read from the
checkpoint while it runs, and given back afterwards (models/sequential.py is the driver). Code that comes with
a checkpoint is not executed. What was learned is part of a plan: its digest is in the identity of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...architectures import classes_of, is_transposed
from ...codecs.protocol import LayerScheme
from ...declared_models import transformers_package
from ...errors import CalibrationError, CheckpointError, UnsupportedError, count, option, printable, size_of
from ...libraries import reading
from ...methods import method_named
from ...methods.channels import in_order
from ...methods.rotate import unrotated
from ...models import LocalQuantize, SplitExperts, calibrate_sequential
from ...models.block_chain import Steps
from ...models.unfuse import unfused
from ...ops.devices import CPU, exact_products, free_bytes
from ...params import QuantizationParams
from ...recipes import Assignment, Recipe, Rule
from ...stats import Statistics
from ...training import FakeQuantize
from ..plan.additions import with_added
from ..plan.checkpoint_plan import CheckpointPlan
from ..plan.learned_data import static_inputs
from ..plan.limits import Limits
from ..plan.new_tensor import NewTensor
from ..plan.origin import Floats, as_floats
from ..plan.placement import Placement
from ..read.source import Source
from ..read.storage import shown
from .device_memory import parameters_on
from .empty_model import empty_model
from .graph_inputs import as_weight, input_params
from .importance import weighted
from .loading import Files, fill, read_tensor
from .own_tokens import generate, require_memory
from .parameter_names import WEIGHT, WeightRows, file_rows, file_tensors, stands_of
from .parts import input_tensors
from .statistics_file import tokens_digest
from .tokens import OWN, Given, Windows, windows_of


def calibrated(plan: CheckpointPlan, given: Given, *, progress: bool = False) -> CheckpointPlan:
    """Return ``plan`` with what its methods and static inputs need, of the inputs of layers under ``given``.

    given: token ids, a file of these or of text, ``"random"`` or ``"self"``; see :class:`~.tokens.Windows`.
    progress: whether to show a bar, on a terminal. Raises CalibrationError for bad data, a plan without need
    of any, a layer that no token reached, and static inputs under random tokens; UnsupportedError for a
    checkpoint that is not run here; CheckpointError where its tensors are not those of its model, or
    --max-memory is too little.
    """
    plan = weighted(plan)
    static = static_inputs(plan)
    wanted = {w.module: w for w in plan.weights if _takes(w.method) or w.layer in static}
    if not wanted and plan.recipe.quality is not None:
        return replace(plan, notes=(*plan.notes, "no method takes calibration data, which are not read"))
    if not wanted:
        raise CalibrationError(
            "no method of this plan takes calibration data, and no inputs take scales from them; leave them "
            f"out, or pass {option('method', 'mse_weighted')}, or ggml for types of GGUF"
        )
    if plan.source.graph:
        found = input_params(plan.source, wanted.values(), Windows.of(given), progress=progress)
        return with_added(plan, map(as_weight, _scales_of_inputs((wanted[n], found[n]) for n in found)))
    require_text(plan, given)
    # Ranges of inputs are those of the model before its biases are corrected.
    rescaled = replace(plan, folds={name: fold.rescaling for name, fold in plan.folds.items()})
    run = running(plan.source, given, plan.limits, remedy=_REMEDY, seen=rescaled.seen)
    seen = _observed(plan.source, wanted, run, static=static, progress=progress)
    plan = replace(plan, statistics=seen.statistics)
    if seen.missing:
        without = f"{len(seen.missing)} of {len(plan.weights)} weights have no importance"
        note = f"{without}, {printable(seen.missing[0])} the first: they are no Linear layers of the model"
        plan = replace(plan, notes=(*plan.notes, note))
    if seen.borrowed:
        what = f"{count(len(seen.borrowed), 'layer')} of experts, such as {printable(seen.borrowed[0])}"
        note = f"no token reached {what}: inputs have the largest scale of the other experts of the layer"
        plan = replace(plan, notes=(*plan.notes, note))
    if not static:
        return plan
    return with_added(plan, _scales_of_inputs((w, seen.inputs.get(w.module)) for w in wanted.values()))


def require_text(plan: CheckpointPlan, given: Given) -> None:
    """Raise CalibrationError where static inputs of a plan would take their scales from random tokens."""
    if Windows.of(given).is_random and static_inputs(plan):
        raise CalibrationError(
            "static inputs take their scales from calibration, and random tokens are not what the model will "
            "see; give text, or make inputs dynamic"
        )


def mean_squares(
    source: Source, weights: Iterable[Placement], given: Given, limits: Limits,
    *, progress: bool = False,
) -> StatisticsOfModules:  # fmt: skip
    """Return the mean squares of the inputs of weights, by module, whatever the methods of these are.

    The other arguments are those of :func:`calibrated`, which says what is raised. Weights that are no Linear
    layers of the model have none.
    """
    wanted = {weight.module: replace(weight, method=_TAKES_SQUARES) for weight in weights}
    return _observed(
        source, wanted, running(source, given, limits, remedy=_REMEDY), progress=progress
    ).statistics


_TAKES_SQUARES = "ggml"
"""A method that uses mean squares of inputs where they are there, and does without them elsewhere."""
StatisticsOfModules = Mapping[str, Mapping[str, Statistics]]
"""By module, and by the name under which methods ask for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Observed:
    """What was learned of the inputs of weights, by module.

    inputs: parameters of static ones. missing: weights that are no Linear layers of the model. borrowed:
    those of experts that no token reached, with the parameters of another expert.
    """

    statistics: StatisticsOfModules
    inputs: Mapping[str, QuantizationParams | None]
    missing: tuple[str, ...]
    borrowed: tuple[str, ...]


def _observed(
    source: Source, wanted: Mapping[str, Placement], run: AbstractContextManager[RunningModel],
    *, static: Collection[LayerScheme] = (), progress: bool = False,
) -> _Observed:  # fmt: skip
    """Run the model and return what the methods and static inputs of ``wanted`` need."""
    odd = next((module for module in wanted if is_transposed(module, source.config or {})), None)
    if odd is not None:
        raise UnsupportedError(f"{printable(odd)} is stored transposed, its columns are outputs; {_REMEDY}")
    with run as model:
        rows = [found for found in model.rows if found.module in wanted]
        missing = sorted(wanted.keys() - {found.module for found in rows})
        needed = [module for module in missing if method_named(wanted[module].method).needs]
        if needed:
            raise UnsupportedError(
                f"{printable(needed[0])} is no Linear layer of {type(model.root).__name__}, so that "
                "it has no statistics of inputs; give it another method by a rule, or name it in "
                f"{option('ignore')}"
            )
        found = calibrate_sequential(
            model.root, _recipe(rows, wanted, static), model.batches, steps=model.steps, progress=progress
        )
    seen = {own.module: found.statistics.get(own.layer) for own in rows}
    return _Observed(
        statistics={module: needs for module, needs in seen.items() if needs is not None},
        inputs={own.module: found.params.get(f"{own.layer}.input") for own in rows}, missing=tuple(missing),
        borrowed=tuple(own.module for own in rows if own.layer in found.borrowed),
    )  # fmt: skip


def _scales_of_inputs(
    weights: Iterable[tuple[Placement, QuantizationParams | None]],
) -> Iterator[NewTensor]:
    """Yield the tensors of static inputs, from the parameters that were learned of each."""
    for weight, params in weights:
        given = weight.layer.input
        if params is not None and given is not None:
            quantizer = LocalQuantize.of(given, params) if given.local else FakeQuantize(params)
            for suffix, value in input_tensors(quantizer, weight.layer.codec).items():
                yield NewTensor(f"{weight.module}.{suffix}", weight.source, value)


_REMEDY = "quantize it by method mse, which needs no data"
Batches = list[dict[str, torch.Tensor]]
"""What a model runs on: by the names of its arguments, token ids as input_ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningModel:
    """A model that runs on data, a block in memory at a time.

    floats: the checkpoint as if it were not quantized. root: with experts apart. rows: where the rows of its
    Linear layers lie in the files. steps: its blocks, which have their weights while they run. batches: what
    it runs on, where it runs. vocabulary: number of tokens that it knows. longest: most tokens that it takes
    at once. width: numbers that a block gives for a token. spare: bytes of memory that may be taken beyond
    that, of a GPU where it runs on one. device: where it runs.
    """

    floats: Floats
    root: nn.Module
    rows: list[WeightRows]
    steps: Steps
    batches: Batches
    vocabulary: int
    longest: int
    width: int
    spare: int
    device: torch.device


@contextmanager
def running(
    source: Source, given: Given | Batches, limits: Limits, *, remedy: str,
    dtype: torch.dtype | None = None, seen: Callable[[Floats], Floats] | None = None,
) -> Iterator[RunningModel]:  # fmt: skip
    """Return a context in which the model of a checkpoint runs, on decoded weights where it is quantized.

    given: as for :func:`calibrated`, which says what is raised, or batches. remedy: what to do instead, for
    messages. dtype: of weights and activations; that of the configuration if None. seen: takes
    the checkpoint, and gives the one that runs in its place.
    """
    _require_runnable(source, remedy)
    transformers = transformers_package()
    what = f"transformers {transformers.__version__} does not run the model of {shown(source.root)}"
    device = limits.device
    with reading(what, remedy, UnsupportedError, system=True), torch.no_grad(), ExitStack() as stack:
        stack.enter_context(exact_products(device))
        files = stack.enter_context(Files())
        floats = as_floats(source, dtype=dtype)
        floats = floats if seen is None else seen(floats)
        model = empty_model(floats.source, limits, remedy, dtype)
        config, (longest, vocabulary) = model.config.get_text_config(), _sizes(model)
        batches = given if isinstance(given, list) else [
            {"input_ids": window}
            for window in windows_of(given, source, vocabulary=vocabulary, longest=longest)
        ]  # fmt: skip
        model.config.use_cache = config.use_cache = False
        blocks = _blocks(model, remedy)
        spare = _spare_memory(
            limits, model, blocks, batches, hidden=config.hidden_size, vocabulary=vocabulary
        )
        windows = [batch["input_ids"] for batch in batches]
        own = not isinstance(given, list) and Windows.of(given).is_own
        if own:
            require_memory(model, blocks, windows, limits, spare)
        weights = _Weights(model, floats, files, remedy, device)
        root = stack.enter_context(unfused(model))
        weights.release()
        rows = _rows(root)
        weights.split(root, rows)
        with weights.outside(blocks):
            if own:
                generate(root, weights.block, blocks, windows, workers=limits.batches_at_once)
            batches = [{name: x.to(device) for name, x in batch.items()} for batch in batches]
            yield RunningModel(
                floats=floats, root=root, rows=rows, steps=Steps(blocks=blocks, loaded=weights.block),
                batches=batches, vocabulary=vocabulary, longest=longest, width=config.hidden_size,
                spare=spare, device=device,
            )  # fmt: skip


def whole_model(source: Source, limits: Limits, remedy: str, dtype: torch.dtype) -> nn.Module:
    """Return the model of a checkpoint with all its weights in memory, decoded where they are quantized.

    dtype: of weights and activations. remedy: what to do instead, for messages. Raises UnsupportedError where
    transformers does not build the model, CheckpointError where its weights do not fit the files.
    """
    with Files() as files, torch.no_grad():
        floats = as_floats(source, dtype=dtype)
        model: nn.Module = empty_model(floats.source, limits, remedy, dtype)
        _Weights(model, floats, files, remedy, CPU).read()
    return model


def tokens_digest_of(source: Source, given: Given, limits: Limits) -> str:
    """Return a digest of the tokens that a model runs on, without running it.

    Those that it generates follow from their beginnings and from the model. given: as for
    :func:`calibrated`, which says what is raised.
    """
    _require_runnable(source, _REMEDY)
    what = f"transformers does not build the model of {shown(source.root)}"
    with reading(what, _REMEDY, UnsupportedError, system=True):
        model = empty_model(as_floats(source).source, limits, _REMEDY, None)
        longest, vocabulary = _sizes(model)
        windows = windows_of(given, source, vocabulary=vocabulary, longest=longest)
    return f"{OWN if Windows.of(given).is_own else ''} {tokens_digest(windows)}"


def _sizes(model: Any) -> tuple[int, int]:
    """Return the most tokens that a model takes at once, and how many it knows."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    return longest, model.get_input_embeddings().num_embeddings


def _recipe(
    rows: Iterable[WeightRows], wanted: Mapping[str, Placement], static: Collection[LayerScheme]
) -> Recipe:
    """Return the recipe that gives the layers of ``rows`` the methods of their weights, and keeps others.

    static: schemes whose inputs are observed.
    """
    gives = {own.layer: wanted[own.module] for own in rows}
    return Recipe(
        rules=tuple(
            Rule(name=name, gives=_assignment(weight, static=weight.layer in static))
            for name, weight in gives.items()
        ),
        default=Rule(gives=None),
    )


def _assignment(weight: Placement, *, static: bool) -> Assignment:
    layer = weight.layer
    method = unrotated(method_named(weight.method)).name if _takes(weight.method) else None
    return Assignment(weight=layer.weight, input=layer.input if static else None, method=method)


def _takes(method: str) -> bool:
    """Return whether a method takes statistics that are held for all weights at once."""
    takes = method_named(method).takes
    return bool(takes) and not in_order(method_named(method))


def _rows(root: nn.Module) -> list[WeightRows]:
    linears = {name: m.out_features for name, m in root.named_modules() if type(m) is nn.Linear}
    experts = {name: m for name, m in root.named_modules() if isinstance(m, SplitExperts)}
    return file_rows(root, stands_of(linears, experts))


def _require_runnable(source: Source, remedy: str) -> None:
    """Raise UnsupportedError where the model of a source is not run here."""
    if source.config is None and source.given != source.root:
        raise UnsupportedError(
            f"{shown(source.given)} is one file, and a model runs on data by its config.json; pass its folder"
        )
    if not classes_of(source.config or {}):
        raise UnsupportedError(f"{shown(source.root)} has no config.json with architectures; {remedy}")


def _blocks(model: nn.Module, remedy: str) -> tuple[str, ...]:
    """Return the blocks of a model: the children of the longest ModuleList that is inside of no other."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    outer = {n: m for n, m in lists.items() if not any(n.startswith(f"{other}.") for other in lists)}
    name = max(outer, key=lambda name: len(outer[name]), default=None)
    if name is None or not len(outer[name]):
        raise UnsupportedError(f"{type(model).__name__} has no list of blocks; {remedy}")
    return tuple(f"{name}.{key}" for key, _ in outer[name].named_children())


def _spare_memory(
    limits: Limits, model: nn.Module, blocks: tuple[str, ...], batches: Batches,
    *, hidden: int, vocabulary: int,
) -> int:  # fmt: skip
    """Return the bytes of ``max_memory`` that running the model leaves free.

    Running takes one block, the layers outside of blocks, and activations: of a GPU, where models run on one,
    and then the process holds one of both at a time. Raises CheckpointError where that is too much.
    """
    every = sum(p.nbytes for p in model.parameters())
    inside = [sum(p.nbytes for p in model.get_submodule(name).parameters()) for name in blocks]
    item = next(model.parameters()).dtype.itemsize
    tokens = [batch["input_ids"].numel() for batch in batches]
    passing, logits = sum(tokens) * hidden * item, max(tokens) * vocabulary * 4
    outside, running = every - sum(inside), 2 * max(inside) + passing + logits
    on_host = limits.base_memory + (max(outside, *inside) if limits.on_gpu else outside + running)
    host = limits.max_memory - on_host
    if host < 0:
        what = "a block or the embeddings" if limits.on_gpu else _RUNNING
        raise CheckpointError(
            f"the model takes about {size_of(on_host)} on its data ({what}), "
            f"{replace(limits, device=CPU).short_of(-host)}, or fewer tokens"
        )
    if not limits.on_gpu:
        return host
    spare = free_bytes(limits.device) - outside - running
    if spare < 0:
        raise CheckpointError(
            f"the model takes about {size_of(outside + running)} on its data ({_RUNNING}), "
            f"{size_of(-spare)} {limits.short_of(-spare)}, or use fewer tokens"
        )
    return spare


_RUNNING = "a block, the embeddings, and what passes between blocks"
"""What takes memory where a model runs."""


class _Weights:
    """The parameters of a model, which have memory, and are read from the checkpoint, while they are needed.

    model: before it is unfused, since its own tensors have the names from which those of files follow.
    device: where the model runs, to which parameters are moved while they are needed.
    """

    def __init__(
        self, model: nn.Module, floats: Floats, files: Files, remedy: str, device: torch.device
    ) -> None:  # fmt: skip
        self._model, self._floats, self._files, self._remedy = model, floats, files, remedy
        self._root, self._device = model, device
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        state = model.state_dict()
        self._state = {name: tensor for name, tensor in state.items() if name in parameters}
        buffers = {name: tensor for name, tensor in state.items() if name not in parameters}
        self._split: dict[str, list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
        self._fill(buffers, optional=True)

    def split(self, root: nn.Module, rows: Iterable[WeightRows]) -> None:
        """Let fused weights be read a layer of an expert at a time: files have their rows apart."""
        self._root = root
        experts = {name: m for name, m in root.named_modules() if isinstance(m, SplitExperts)}
        fused = tuple(f"{name}.{own}" for name, m in experts.items() for own in (m.up, m.down))
        for found in rows:
            whole = next((name for name in fused if found.layer.startswith(f"{name}.")), None)
            if whole is not None:
                layer = root.get_parameter(f"{found.layer}{WEIGHT}").detach()
                own = f"{found.module}{WEIGHT}", found.index, layer
                self._split.setdefault(whole, []).append(own)

    def read(self) -> None:
        """Read all parameters."""
        self._fill(self._state)

    def release(self) -> None:
        """Give back the memory of all parameters."""
        for tensor in self._state.values():
            tensor.untyped_storage().resize_(0)

    def block(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which the block called ``name`` has its weights."""
        inside = {n: tensor for n, tensor in self._state.items() if n.startswith(f"{name}.")}
        return self._loaded(inside, self._root.get_submodule(name).modules())

    def outside(self, blocks: tuple[str, ...]) -> AbstractContextManager[None]:
        """Return a context in which all that is inside none of ``blocks`` has its weights."""
        inside = tuple(f"{name}." for name in blocks)
        held = {module for name in blocks for module in self._root.get_submodule(name).modules()}
        own = [module for module in self._root.modules() if module not in held]
        return self._loaded({n: t for n, t in self._state.items() if not n.startswith(inside)}, own)

    @contextmanager
    def _loaded(self, state: Mapping[str, torch.Tensor], modules: Iterable[nn.Module]) -> Iterator[None]:
        for tensor in state.values():
            tensor.untyped_storage().resize_(tensor.nbytes)
        try:
            self._fill(state)
            with parameters_on(self._device, modules):
                if self._device.type != CPU.type:
                    self._empty(state)
                yield
        finally:
            self._empty(state)

    def _empty(self, state: Mapping[str, torch.Tensor]) -> None:
        for tensor in state.values():
            tensor.untyped_storage().resize_(0)

    def _fill(self, state: Mapping[str, torch.Tensor], *, optional: bool = False) -> None:
        """Read tensors from the files; raises CheckpointError for one that is not there, unless optional."""
        split = [part for name in state for part in self._split.get(name, ())]
        whole = {name: tensor for name, tensor in state.items() if name not in self._split}
        views = file_tensors(self._model, whole)
        names = [*views, *(name for name, _, _ in split)]
        entries = self._floats.source.entries
        missing = {name for name in names if name not in entries}
        if missing and not optional:
            raise CheckpointError(
                f"{printable(min(missing))} (of {len(missing)}) is not in the files under the name that "
                f"transformers saves it by; {self._remedy}"
            )
        fill(whole, views, views.keys() & entries.keys(), self._read)
        for name, index, layer in split:
            layer[index] = self._read(name).to(layer.dtype)

    def _read(self, name: str) -> torch.Tensor:
        """Return a tensor of the checkpoint, decoded where it holds codes."""
        entry = self._floats.source.entries[name]
        origin = self._floats.origin(entry)
        if origin.copied:
            return read_tensor(entry, self._files)
        count = math.prod(entry.shape) // max(1, origin.width)
        return origin.read_as_written(self._files, 0, count, bytearray(entry.nbytes)).reshape(entry.shape)
