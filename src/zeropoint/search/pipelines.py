"""Diffusers pipelines: folders of checkpoints and other files."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..architectures import PIPELINE_INDEX
from ..checkpoint.read.misplaced import holds_weights
from ..checkpoint.read.source import MAX_JSON_BYTES
from ..checkpoint.read.storage import read_small, shown
from ..checkpoint.run.loop import RunResult
from ..errors import CheckpointError, OptionError, option
from ..libraries import reading
from ..recipes import Recipe
from ..signatures import by_signature
from .under_budget import quantize_checkpoint

_LIBRARIES = ("diffusers", "transformers")
_AUTOENCODER = "Autoencoder"
"""What classes begin with that turn pictures into latents, by convolutions; they are kept."""


@by_signature
def quantize_pipeline(
    source: Path | str, out: Path | str, to: Recipe | Path | str | None = None, **options: Any
) -> dict[str, RunResult]:
    """Quantize the models of a diffusers pipeline, and copy the rest.

    Autoencoder, scheduler and tokenizers are copied. This is ``zeropoint quantize`` of such a folder. Its
    index is written last, so that an output is a pipeline when it is complete. Repeat an interrupted call to
    resume it.

    Args:
        source: the folder, with model_index.json.
        out: the output folder.
        to: a preset or scheme, such as ``"int8wo"``.
        options: of :func:`~zeropoint.quantize_checkpoint`, for each part.

    Returns:
        The results of the quantized parts, by their names.

    Raises:
        CheckpointError: for a folder that is no pipeline, or none with weights to quantize, and where another
            file is in the place of one that is copied.
        OptionError: for options of one checkpoint, such as a plan.
        ZeropointError: what :func:`~zeropoint.quantize_checkpoint` raises for a part.
    """
    for name in ("plan", "state"):
        if options.get(name) is not None:
            said = option(name, options[name])
            raise OptionError(f"{said} is of one checkpoint; pass a part of the pipeline")
    overwrite = bool(options.get("overwrite", False))
    return each_part(
        Path(source),
        Path(out),
        lambda one, target: quantize_checkpoint(one, target, to, **options),
        overwrite=overwrite,
    )


def each_part(
    source: Path, out: Path, quantize: Callable[[str, str], RunResult], *, overwrite: bool
) -> dict[str, RunResult]:
    """Quantize pipeline parts by a function; copy the rest, index last.

    Raises CheckpointError where nothing is quantized, or another file would be written over.
    """
    if not (source / PIPELINE_INDEX).is_file():
        raise CheckpointError(f"{shown(source)} is no pipeline of diffusers: it has no {PIPELINE_INDEX}")
    if out.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"{shown(out)} lies in the pipeline; name a folder outside of it")
    parts = list(_quantized(source))
    if not parts:
        raise CheckpointError(f"{shown(source)} has no part to quantize; check its {PIPELINE_INDEX}")
    found = {part: quantize(str(source / part), str(out / part)) for part in parts}
    rest = sorted(path for path in source.rglob("*") if path.is_file() and path.name != PIPELINE_INDEX)
    for path in (*rest, source / PIPELINE_INDEX):
        inside = path.relative_to(source)
        if inside.parts[0] not in parts and not inside.parts[0].startswith("."):
            _copy(path, out / inside, overwrite=overwrite)
    return found


def _quantized(source: Path) -> Iterator[str]:
    """Yield the quantized parts: models with weights, without autoencoders."""
    path = source / PIPELINE_INDEX
    with reading(f"{shown(path)} is no index of a pipeline", "download it again"):
        index = dict(json.loads(read_small(path, limit=MAX_JSON_BYTES)[0]))
    for name, said in index.items():
        library, kind = said if isinstance(said, list) and len(said) == 2 else (None, None)
        plain = Path(name).name == name and library in _LIBRARIES and isinstance(kind, str)
        if plain and holds_weights(source / name) and not str(kind).startswith(_AUTOENCODER):
            yield name


def _copy(path: Path, target: Path, *, overwrite: bool) -> None:
    """Copy a file durably; an equal existing one stays."""
    if target.exists() and filecmp.cmp(path, target, shallow=False):
        return
    if os.path.lexists(target) and not overwrite:
        raise CheckpointError(
            f"{shown(target)} exists and is another file; move it away, or pass {option('overwrite', True)}"
        )
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as read, draft.open("xb") as written:
            shutil.copyfileobj(read, written, 1 << 20)
            written.flush()
            os.fsync(written.fileno())
        draft.replace(target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise CheckpointError(f"{shown(target)} cannot be written: {error.strerror}; make room") from error
