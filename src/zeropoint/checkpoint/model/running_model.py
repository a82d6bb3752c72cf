"""A checkpoint's model on data, one block in memory at a time.

The model is built by transformers, with parameters that have no memory; the parameters of a block are read
from the checkpoint while it runs, and given back afterwards (models/sequential.py is the driver). Code that
comes with a checkpoint is not executed.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...architectures import classes_of
from ...codecs.registry import DEFAULT
from ...declared_models import transformers_package
from ...errors import CheckpointError, UnsupportedError, option, printable, size_of
from ...libraries import reading
from ...models.block_chain import Steps
from ...models.model_blocks import likely_blocks, token_embeddings
from ...models.sequential import is_chain
from ...models.unfuse import unfused
from ...ops.devices import CPU, exact_products, free_bytes
from ..plan.as_loaded import as_saved
from ..plan.float_view import Floats, as_floats
from ..plan.limits import Limits
from ..read.decoding import read_tensor
from ..read.source import Source
from ..read.storage import OpenFiles, shown
from .empty_model import empty_model
from .loading import fill
from .own_tokens import generate, require_memory
from .parameter_names import WeightRows, file_rows, file_tensors
from .samples import IDS, Batches, digest_of, entering, require_arguments, samples_of
from .tokens import OWN, Given, Windows, windows_of

WITHOUT_DATA = "quantize it by method mse, which needs no data"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningModel:
    """A model that runs on data, block by block in memory.

    floats: the checkpoint as if it were not quantized. root: with experts apart. rows: where the rows of its
    Linear layers lie in the files. steps: its blocks, which have their weights while they run. given: its
    inputs, on the host. batches: what it runs on, where it runs. vectors: that enter a block, for each batch.
    vocabulary: number of tokens that it knows. longest: most tokens that it takes at once. width: numbers of
    a vector between blocks. spare: bytes of memory that may be taken beyond that, of a GPU where it runs on
    one. device: where it runs.
    """

    floats: Floats
    root: nn.Module
    rows: list[WeightRows]
    steps: Steps
    given: Batches
    batches: Batches
    vectors: list[int]
    vocabulary: int
    longest: int
    width: int
    spare: int
    device: torch.device


Names = tuple[str, ...]
LIBRARIES = 176 << 20
"""Memory of the libraries that run models, beyond Python with torch."""


@contextmanager
def running(
    source: Source,
    given: Given | Batches,
    limits: Limits,
    *,
    remedy: str,
    dtype: torch.dtype | None = None,
    seen: Callable[[Floats], Floats] | None = None,
) -> Iterator[RunningModel]:
    """Return a context in which the model of a checkpoint runs.

    Weights are decoded where they are quantized. given: as for :func:`calibrated`, which says what is raised,
    or batches. remedy: what to do instead, for messages. dtype: of weights and activations; the
    configuration's if None. seen: takes the checkpoint, and gives the one that runs in its place.
    """
    _require_runnable(source, remedy)
    transformers = transformers_package()
    what = f"transformers {transformers.__version__} does not run the model of {shown(source.root)}"
    device = limits.device
    with reading(what, remedy, UnsupportedError, system=True), torch.no_grad(), ExitStack() as stack:
        stack.enter_context(exact_products(device))
        files = stack.enter_context(OpenFiles())
        floats = as_saved(as_floats(source, dtype=dtype).in_pieces(DEFAULT))
        floats = floats if seen is None else seen(floats)
        model, batches = _model_and_batches(floats.source, given, limits, remedy, dtype)
        model.config.use_cache = model.config.get_text_config().use_cache = False
        known = likely_blocks(model)
        if not known:
            raise UnsupportedError(f"{type(model).__name__} has no list of blocks; {remedy}")
        vectors, width = entering(model, known[0][0], batches)
        memory = functools.partial(_spare_memory, limits, model, batches, sum(vectors) * width)
        blocks, spare = known[0], memory(known[0])
        own = not isinstance(given, list) and Windows.of(given).is_own
        windows = [batch[IDS] for batch in batches] if own else []
        if own:
            require_memory(model, blocks, windows, limits, spare)
        weights = _Weights(model, floats, files, remedy, device)
        root = stack.enter_context(unfused(model))
        weights.root = root
        weights.release()
        rows = file_rows(root, [name for name, m in root.named_modules() if type(m) is nn.Linear])
        if len(known) > 1 and all(_fits(memory, names) for names in known):
            one = _there(model, batches[0], device)
            blocks = _first_chain(root, known, one, weights)
            spare = memory(blocks)
        with weights.outside(blocks):
            if own:
                generate(root, weights.block, blocks, windows, workers=limits.batches_at_once)
            longest, vocabulary = _sizes(model)
            yield RunningModel(
                floats=floats,
                root=root,
                rows=rows,
                steps=Steps(blocks=blocks, loaded=weights.block),
                given=batches,
                batches=[_there(model, batch, device) for batch in batches],
                vectors=vectors,
                vocabulary=vocabulary,
                longest=longest,
                width=width,
                spare=spare,
                device=device,
            )


def _model_and_batches(
    source: Source, given: Given | Batches, limits: Limits, remedy: str, dtype: torch.dtype | None
) -> tuple[Any, Batches]:
    """Return an empty model and its inputs; given: see :func:`running`."""
    if isinstance(given, list):
        of_tokens = all(batch.keys() == {IDS} for batch in given)
        return empty_model(source, limits, remedy, dtype, of_tokens=of_tokens), given
    samples = samples_of(Windows.of(given), max(0, limits.max_memory - limits.base_memory))
    if samples is None:
        remedy = f"{remedy}, or pass {option('calibration', metavar='FILE.safetensors')} with inputs by name"
    model = empty_model(source, limits, remedy, dtype, of_tokens=samples is None)
    if samples is not None:
        require_arguments(model, samples)
        return model, samples
    longest, vocabulary = _sizes(model)
    windows = windows_of(given, source, vocabulary=vocabulary, longest=longest)
    return model, [{IDS: window} for window in windows]


def _there(model: Any, batch: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Return inputs where the model runs, floats in its dtype."""
    floats = {name: x.to(device, model.dtype) for name, x in batch.items() if x.is_floating_point()}
    return with_decoder_ids(model, {name: x.to(device) for name, x in batch.items()} | floats)


def with_decoder_ids(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a batch with ids, one token later, for a decoder.

    This is what models of transformers take that make them by themselves, as BART.
    """
    config, name = model.config, "decoder_input_ids"
    takes_it = config.is_encoder_decoder and name in inspect.signature(model.forward).parameters
    if not takes_it or IDS not in batch:
        return batch
    starts = (getattr(config, f"{key}_token_id", None) for key in ("decoder_start", "pad"))
    start = next((number for number in starts if number is not None), 0)
    ids = batch[IDS]
    return {name: torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], 1), **batch}


def whole_model(source: Source, limits: Limits, remedy: str, dtype: torch.dtype) -> nn.Module:
    """Return the model of a checkpoint with all decoded weights in memory.

    dtype: of weights and activations. remedy: what to do instead, for messages. Raises UnsupportedError where
    transformers does not build the model, CheckpointError where its weights do not fit the files.
    """
    with OpenFiles() as files, torch.no_grad():
        floats = as_saved(as_floats(source, dtype=dtype).in_pieces(DEFAULT))
        model: nn.Module = empty_model(floats.source, limits, remedy, dtype)
        _Weights(model, floats, files, remedy, CPU).read()
    return model


def inputs_without_a_run(source: Source, given: Given, limits: Limits) -> Batches:
    """Return calibration inputs without running the model.

    Of tokens that it generates, these are the beginnings. given: as for :func:`calibrated`, which says what
    is raised.
    """
    _require_runnable(source, WITHOUT_DATA)
    what = f"transformers does not build the model of {shown(source.root)}"
    with reading(what, WITHOUT_DATA, UnsupportedError, system=True):
        return _model_and_batches(as_floats(source).source, given, limits, WITHOUT_DATA, None)[1]


def digest_without_a_run(source: Source, given: Given, limits: Limits) -> str:
    """Return a digest of the calibration inputs, as :func:`inputs_without_a_run`."""
    inputs = inputs_without_a_run(source, given, limits)
    return f"{OWN if Windows.of(given).is_own else ''} {digest_of(inputs)}"


def _sizes(model: Any) -> tuple[int, int]:
    """Return a model's longest input in tokens, and its vocabulary size."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0
    # XLNet says -1 for any length.
    return longest if longest > 0 else 1 << 30, getattr(token_embeddings(model), "num_embeddings", 0)


def _require_runnable(source: Source, remedy: str) -> None:
    """Raise UnsupportedError where the model of a source is not run here."""
    if source.config is None and source.given != source.root:
        raise UnsupportedError(
            f"{shown(source.given)} is one file, and a model runs on data by its config.json; pass its folder"
        )
    if not classes_of(source.config or {}):
        raise UnsupportedError(f"{shown(source.root)} has no config.json with architectures; {remedy}")


_CHAINS: dict[object, Names] = {}
"""Blocks that are a chain, by the model and the names of its inputs."""


def _first_chain(
    root: nn.Module, known: Sequence[Names], batch: Mapping[str, torch.Tensor], weights: _Weights
) -> Names:
    """Return the first blocks that are a chain, or the first.

    Raises UnsupportedError for a model whose runs differ.
    """
    key = type(root), str(root.config), tuple(batch)
    if key not in _CHAINS:
        _CHAINS[key] = next((names for names in known if weights.is_chain(batch, names)), known[0])
    return _CHAINS[key]


def _fits(memory: Callable[[Names], int], blocks: Names) -> bool:
    """Return whether running a model by these blocks fits into memory."""
    with suppress(CheckpointError):
        memory(blocks)
        return True
    return False


def _spare_memory(limits: Limits, model: nn.Module, batches: Batches, entering: int, blocks: Names) -> int:
    """Return the bytes of ``max_memory`` that running the model leaves free.

    Running takes one block, the layers outside of blocks, and activations: of a GPU, where models run on one,
    and then the process holds one of both at a time. entering: numbers that enter a block for all batches.
    Raises CheckpointError where that is too much.
    """
    every = sum(p.nbytes for p in model.parameters())
    inside = [sum(p.nbytes for p in model.get_submodule(name).parameters()) for name in blocks]
    item = next(model.parameters()).dtype.itemsize
    # Inputs are held as they are given and in the dtype of the model.
    given = 2 * sum(x.nbytes for batch in batches for x in batch.values() if x.is_floating_point())
    tokens = max(sum(x.numel() for name, x in batch.items() if name.endswith(IDS)) for batch in batches)
    passing, logits = entering * item + given, tokens * _sizes(model)[1] * 4
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
"""Memory use of a running model, in words."""


class _Weights:
    """Parameters of a model, read from the checkpoint while needed.

    model: before it is unfused, since names in files follow from its own names.
    device: where the model runs, to which parameters are moved while they are needed.
    """

    def __init__(
        self, model: Any, floats: Floats, files: OpenFiles, remedy: str, device: torch.device
    ) -> None:
        self._model, self._floats, self._files, self._remedy = model, floats, files, remedy
        self.root, self._device = model, device
        parameters = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
        self._identity, self._outside = parameters, set[int]()
        state = model.state_dict()
        self._state = {name: tensor for name, tensor in state.items() if name in parameters}
        buffers = {name: tensor for name, tensor in state.items() if name not in parameters}
        self._fill(buffers, optional=True)

    def read(self) -> None:
        """Read all parameters."""
        self._fill(self._state)

    def release(self) -> None:
        """Give back the memory of all parameters."""
        for tensor in self._state.values():
            tensor.untyped_storage().resize_(0)

    def block(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which the block called ``name`` has its weights."""
        begin = f"{name}."
        inside = {
            n: tensor
            for n, tensor in self._state.items()
            if n.startswith(begin) and self._identity[n] not in self._outside
        }
        return self._loaded(inside, self.root.get_submodule(name).modules())

    def is_chain(self, batch: Mapping[str, torch.Tensor], blocks: Names) -> bool:
        """Return whether blocks, each loaded while it runs, are a chain."""
        with self.outside(blocks):
            return is_chain(self.root, batch, Steps(blocks=blocks, loaded=self.block))

    def outside(self, blocks: Names) -> AbstractContextManager[None]:
        """Return a context with the weights outside of ``blocks``, shared ones included."""
        inside = tuple(f"{name}." for name in blocks)
        self._outside = {number for n, number in self._identity.items() if not n.startswith(inside)}
        held = {module for name in blocks for module in self.root.get_submodule(name).modules()}
        own = [module for module in self.root.modules() if module not in held]
        return self._loaded(
            {n: tensor for n, tensor in self._state.items() if self._identity[n] in self._outside}, own
        )

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
        """Read tensors from the files; raises CheckpointError unless optional."""
        entries, views = self._floats.source.entries, file_tensors(self._model, state)
        if any(name not in entries for name in views):  # weights that were cut have the model's names
            own = {name: t for name, t in state.items() if name in entries and name not in views}
            rest = {name: t for name, t in state.items() if name not in own}
            views = {**file_tensors(self._model, rest), **own}
        known = {self._identity[name]: name for name in self._identity.keys() & entries.keys()}
        for name in [name for name in views if name not in entries]:
            same = known.get(self._identity.get(name, 0))
            if same is not None:  # files have a shared parameter once
                views[same] = views.pop(name)
        missing = {name for name in views if name not in entries}
        missing -= set() if optional else self._computed(missing)
        if missing and not optional:
            raise CheckpointError(
                f"{printable(min(missing))} (of {len(missing)}) is not in the files under the name that "
                f"transformers saves it by; {self._remedy}"
            )
        fill(self._model, state, views, views.keys() & entries.keys(), self._read)

    def _computed(self, names: Iterable[str]) -> set[str]:
        """Compute parameters that transformers does not save; return their names."""
        unsaved = getattr(self._model, "_keys_to_ignore_on_save", None) or ()
        found = {name for name in names if any(re.search(pattern, name) for pattern in unsaved)}
        for name in found:
            self._model._init_weights(self._model.get_submodule(name.rpartition(".")[0]))
        return found

    def _read(self, name: str) -> torch.Tensor:
        """Return a tensor of the checkpoint, decoded where it holds codes."""
        entry = self._floats.source.entries[name]
        reader = self._floats.reader(entry)
        if reader.copied:
            return read_tensor(entry, self._files)
        count = math.prod(entry.shape) // max(1, reader.width)
        return reader.read_as_written(self._files, 0, count, bytearray(entry.nbytes)).reshape(entry.shape)


@contextmanager
def parameters_on(device: torch.device, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Move parameters and buffers of modules to ``device`` for the context.

    On the CPU nothing is moved. Parameters that modules share stay shared. At the end the modules have their
    parameters on the CPU again; memory of these may be given back meanwhile.
    """
    if device.type == CPU.type:
        yield
        return
    moved: dict[int, nn.Parameter] = {}
    before: list[tuple[dict[str, nn.Parameter | None], dict[str, nn.Parameter | None]]] = []
    try:
        for module in modules:
            before.append((module._parameters, dict(module._parameters)))
            for name, own in module._parameters.items():
                if own is not None:
                    there = moved.get(id(own))
                    if there is None:
                        there = moved[id(own)] = nn.Parameter(own.detach().to(device), requires_grad=False)
                    module._parameters[name] = there
            for name, buffer in module._buffers.items():
                # Few and small: once moved, they stay.
                module._buffers[name] = None if buffer is None else buffer.to(device)
        yield
    finally:
        for own_place, own_parameters in before:
            own_place.update(own_parameters)
