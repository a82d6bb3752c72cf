"""Samples of a model's own inputs, such as images, by argument names.

A file has one tensor for each argument of the model's ``forward``, with a row for each sample. Inputs whose
shapes differ from sample to sample are numbered: ``0.pixel_values``, ``1.pixel_values``.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...codecs.containers.safetensors import TORCH_DTYPES
from ...errors import (
    CalibrationError,
    CheckpointError,
    UnsupportedError,
    count,
    near_misses,
    option,
    printable,
)
from ...layout.packing import flat_bytes
from ...libraries import reading
from ..read.safetensors_file import parse_header
from ..read.storage import shown
from .statistics_file import tokens_digest
from .tokens import REMEDY, TEXT_OF_IDS, Windows, read_tensors

Batches = list[dict[str, torch.Tensor]]
"""Inputs of a model by argument name, token ids as input_ids."""
IDS = "input_ids"
_WIDTH = 64
"""Features of a vector between blocks, where the configuration has no hidden_size."""
_NUMBERED = re.compile(r"(\d{1,9})\.(\w+)")


def samples_of(asked: Windows, most: int) -> Batches | None:
    """Return the inputs of each sample, or None for tokens.

    One tensor of integers in a file holds token ids; others are arguments. most: bytes of a file. Raises
    CalibrationError for a larger one, for tensors that are no samples, and for fewer than are asked for.
    """
    if isinstance(asked.given, Mapping):
        name, tensors = "calibration", asked.given
    elif isinstance(asked.given, torch.Tensor) or not _holds_arguments(asked.given):
        return None
    else:
        name = shown(asked.given)
        tensors = read_tensors(asked.given, what="samples", most=most, remedy=REMEDY)
    if asked.length is not None:
        raise CalibrationError(
            f"{option('length', asked.length)} counts tokens, and {name} holds inputs by name; leave it out"
        )
    given: Mapping[str, Any] = tensors
    for key, x in given.items():
        if not isinstance(x, torch.Tensor) or not x.numel():
            raise CalibrationError(f"{printable(key)} of {name} must be a tensor of the model's inputs")
    found = _numbered(tensors) or _rows(tensors, name)
    if asked.samples is not None and len(found) < asked.samples:
        raise CalibrationError(
            f"{option('samples', asked.samples)} asks for more than the {len(found)} of {name}"
        )
    return found[: asked.samples]


def _holds_arguments(path: Path | str) -> bool:
    """Return whether a safetensors file holds more than token ids."""
    if Path(path).suffix != TEXT_OF_IDS:
        return False
    try:
        dtypes = [TORCH_DTYPES.get(entry.dtype) for entry in parse_header(Path(path)).table.values()]
    except CheckpointError:
        return False  # which reading token ids says
    return len(dtypes) > 1 or any(dtype is not None and dtype.is_floating_point for dtype in dtypes)


def _numbered(tensors: Mapping[str, torch.Tensor]) -> Batches:
    """Return samples by the numbers before the names of tensors, or none."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for name, x in tensors.items():
        parts = _NUMBERED.fullmatch(name)
        if parts is None:
            return []
        found.setdefault(int(parts[1]), {})[parts[2]] = x
    return [found[number] for number in sorted(found)]


def _rows(tensors: Mapping[str, torch.Tensor], name: str) -> Batches:
    """Return samples from the rows of tensors."""
    rows = {key: len(x) if x.ndim else 0 for key, x in tensors.items()}
    if len(set(rows.values())) != 1 or 0 in rows.values():
        listed = ", ".join(f"{count(n, 'row')} of {printable(key)}" for key, n in sorted(rows.items()))
        raise CalibrationError(
            f"{name} has {listed or 'no tensor'}; give each input a row for each sample, or number inputs of "
            "other shapes by sample, as in 0.pixel_values and 1.pixel_values"
        )
    return [{key: x[n : n + 1] for key, x in tensors.items()} for n in range(min(rows.values()))]


def digest_of(batches: Batches) -> str:
    """Return a digest of inputs, as statistics have of token ids."""
    if all(batch.keys() == {IDS} for batch in batches):
        return tokens_digest(batch[IDS] for batch in batches)
    total = hashlib.sha256()
    for name, x in ((name, batch[name]) for batch in batches for name in sorted(batch)):
        total.update(f"{name} {x.dtype} {tuple(x.shape)}".encode() + flat_bytes(x.cpu()).numpy().tobytes())
    return total.hexdigest()


def require_arguments(model: nn.Module, batches: Batches) -> None:
    """Raise CalibrationError for an input that the model does not take."""
    taken = inspect.signature(model.forward).parameters
    for name in {name: None for batch in batches for name in batch}:
        if name not in taken:
            raise CalibrationError(
                f"{type(model).__name__} takes no {printable(name)}; {near_misses(name, taken)}"
            )


def entering(model: Any, block: str, batches: Batches) -> tuple[list[int], int]:
    """Return the vectors that enter a block by batch, and their width.

    model: of transformers, whose parameters are not read: where inputs are no tokens, a twin on the meta
    device runs. Where it does not run there, vectors have four times as many numbers as the inputs.
    """
    width: int = getattr(model.config.get_text_config(), "hidden_size", _WIDTH)
    if all(IDS in batch and not any(x.is_floating_point() for x in batch.values()) for batch in batches):
        return [batch[IDS].numel() for batch in batches], width
    with torch.device("meta"):
        twin = type(model)._from_config(model.config, dtype=model.dtype).eval()
    shapes: dict[object, torch.Size] = {}
    for batch in batches:
        if _kind(batch) not in shapes:
            more = torch.Size((4 * sum(x.numel() for x in batch.values()) // width + 1, width))
            shapes[_kind(batch)] = _shape_entering(twin, block, batch) or more
    width = max(shape[-1] for shape in shapes.values())
    return [-(-shapes[_kind(batch)].numel() // width) for batch in batches], width


def _kind(batch: Mapping[str, torch.Tensor]) -> tuple[object, ...]:
    return tuple((name, x.shape) for name, x in batch.items())


def _shape_entering(twin: Any, block: str, batch: Mapping[str, torch.Tensor]) -> torch.Size | None:
    """Return the shape of what enters a block, or None if unknown."""
    shapes: list[torch.Size] = []

    def enter(_: nn.Module, args: Any, named: Any) -> None:
        shapes.extend(x.shape for x in tree_leaves((args, named)) if isinstance(x, torch.Tensor))
        raise UnsupportedError("what follows does not matter")

    given = {
        name: x.to("meta", twin.dtype if x.is_floating_point() else x.dtype) for name, x in batch.items()
    }
    hook = twin.get_submodule(block).register_forward_pre_hook(enter, with_kwargs=True)
    with hook, suppress(UnsupportedError), reading("the model needs values", "run it", UnsupportedError):
        twin(**given)
    return shapes[0] if shapes and len(shapes[0]) else None
