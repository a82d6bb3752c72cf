"""A checkpoint's model on data, one block in memory at a time.

The model is built by transformers, with parameters that have no memory; the parameters of a block are read
from the checkpoint while it runs, and given back afterwards (models/sequential.py is the driver). Code that
comes with a checkpoint is not executed.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...architectures import classes_of
from ...codecs.registry import DEFAULT
from ...declared_models import transformers_package
from ...errors import CheckpointError, UnsupportedError, printable, size_of
from ...libraries import reading
from ...models.block_chain import Steps
from ...models.model_blocks import with_embeddings
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
from .statistics_file import tokens_digest
from .tokens import OWN, Given, Windows, windows_of

WITHOUT_DATA = "quantize it by method mse, which needs no data"
Batches = list[dict[str, torch.Tensor]]
"""Inputs of a model by argument name, token ids as input_ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningModel:
    """A model that runs on data, block by block in memory.

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
        model = empty_model(floats.source, limits, remedy, dtype)
        config, (longest, vocabulary) = model.config.get_text_config(), _sizes(model)
        batches = (
            given
            if isinstance(given, list)
            else [
                {"input_ids": window}
                for window in windows_of(given, source, vocabulary=vocabulary, longest=longest)
            ]
        )
        model.config.use_cache = config.use_cache = False
        blocks = _blocks(model, remedy)
        spare = _spare_memory(limits, model, blocks, batches)
        windows = [batch["input_ids"] for batch in batches]
        own = not isinstance(given, list) and Windows.of(given).is_own
        if own:
            require_memory(model, blocks, windows, limits, spare)
        weights = _Weights(model, floats, files, remedy, device)
        root = stack.enter_context(unfused(model))
        weights.root = root
        weights.release()
        rows = file_rows(root, [name for name, m in root.named_modules() if type(m) is nn.Linear])
        with weights.outside(blocks):
            if own:
                generate(root, weights.block, blocks, windows, workers=limits.batches_at_once)
            given = [{name: x.to(device) for name, x in batch.items()} for batch in batches]
            batches = [with_decoder_ids(model, batch) for batch in given]
            yield RunningModel(
                floats=floats, root=root, rows=rows, steps=Steps(blocks=blocks, loaded=weights.block),
                batches=batches, vocabulary=vocabulary, longest=longest, width=config.hidden_size,
                spare=spare, device=device,
            )  # fmt: skip


def with_decoder_ids(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a batch with ids, one token later, for a decoder.

    This is what models of transformers take that make them by themselves, as BART.
    """
    config, name = model.config, "decoder_input_ids"
    if not config.is_encoder_decoder or name not in inspect.signature(model.forward).parameters:
        return batch
    starts = (getattr(config, f"{key}_token_id", None) for key in ("decoder_start", "pad"))
    start = next((number for number in starts if number is not None), 0)
    ids = batch["input_ids"]
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


def windows_without_a_run(source: Source, given: Given, limits: Limits) -> list[torch.Tensor]:
    """Return calibration windows, (1, length) each, without running the model.

    Of tokens that it generates, these are the beginnings. given: as for :func:`calibrated`, which says what
    is raised.
    """
    _require_runnable(source, WITHOUT_DATA)
    what = f"transformers does not build the model of {shown(source.root)}"
    with reading(what, WITHOUT_DATA, UnsupportedError, system=True):
        model = empty_model(as_floats(source).source, limits, WITHOUT_DATA, None)
        longest, vocabulary = _sizes(model)
        return windows_of(given, source, vocabulary=vocabulary, longest=longest)


def tokens_digest_of(source: Source, given: Given, limits: Limits) -> str:
    """Return a digest of the calibration tokens, as :func:`windows_without_a_run`."""
    windows = windows_without_a_run(source, given, limits)
    return f"{OWN if Windows.of(given).is_own else ''} {tokens_digest(windows)}"


def _sizes(model: Any) -> tuple[int, int]:
    """Return a model's longest input in tokens, and its vocabulary size."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0
    # XLNet says -1 for any length.
    return longest if longest > 0 else 1 << 30, model.get_input_embeddings().num_embeddings


def _require_runnable(source: Source, remedy: str) -> None:
    """Raise UnsupportedError where the model of a source is not run here."""
    if source.config is None and source.given != source.root:
        raise UnsupportedError(
            f"{shown(source.given)} is one file, and a model runs on data by its config.json; pass its folder"
        )
    if not classes_of(source.config or {}):
        raise UnsupportedError(f"{shown(source.root)} has no config.json with architectures; {remedy}")


def _blocks(model: nn.Module, remedy: str) -> tuple[str, ...]:
    """Return the names of blocks: the longest outermost list by the embeddings."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    outer = {n: m for n, m in lists.items() if not any(n.startswith(f"{other}.") for other in lists)}
    outer = with_embeddings(model, outer)
    name = max(outer, key=lambda name: (len(outer[name]), -name.count(".")), default=None)
    if name is None or not len(outer[name]):
        raise UnsupportedError(f"{type(model).__name__} has no list of blocks; {remedy}")
    return tuple(f"{name}.{key}" for key, _ in outer[name].named_children())


def _spare_memory(limits: Limits, model: nn.Module, blocks: tuple[str, ...], batches: Batches) -> int:
    """Return the bytes of ``max_memory`` that running the model leaves free.

    Running takes one block, the layers outside of blocks, and activations: of a GPU, where models run on one,
    and then the process holds one of both at a time. Raises CheckpointError where that is too much.
    """
    every = sum(p.nbytes for p in model.parameters())
    inside = [sum(p.nbytes for p in model.get_submodule(name).parameters()) for name in blocks]
    item = next(model.parameters()).dtype.itemsize
    tokens = [batch["input_ids"].numel() for batch in batches]
    config: Any = model.config
    hidden: int = config.get_text_config().hidden_size
    passing, logits = sum(tokens) * hidden * item, max(tokens) * _sizes(model)[1] * 4
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
        self, model: nn.Module, floats: Floats, files: OpenFiles, remedy: str, device: torch.device
    ) -> None:
        self._model, self._floats, self._files, self._remedy = model, floats, files, remedy
        self.root, self._device = model, device
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
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
        inside = {n: tensor for n, tensor in self._state.items() if n.startswith(f"{name}.")}
        return self._loaded(inside, self.root.get_submodule(name).modules())

    def outside(self, blocks: tuple[str, ...]) -> AbstractContextManager[None]:
        """Return a context with the weights outside of all ``blocks``."""
        inside = tuple(f"{name}." for name in blocks)
        held = {module for name in blocks for module in self.root.get_submodule(name).modules()}
        own = [module for module in self.root.modules() if module not in held]
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
        """Read tensors from the files; raises CheckpointError unless optional."""
        entries, views = self._floats.source.entries, file_tensors(self._model, state)
        if any(name not in entries for name in views):  # weights that were cut have the model's names
            own = {name: t for name, t in state.items() if name in entries and name not in views}
            rest = {name: t for name, t in state.items() if name not in own}
            views = {**file_tensors(self._model, rest), **own}
        missing = {name for name in views if name not in entries}
        if missing and not optional:
            raise CheckpointError(
                f"{printable(min(missing))} (of {len(missing)}) is not in the files under the name that "
                f"transformers saves it by; {self._remedy}"
            )
        fill(self._model, state, views, views.keys() & entries.keys(), self._read)

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
