"""Save a converted model as a checkpoint for transformers and vLLM.

Weights, scales and zero points are written as the model has them, under the names that its files have:
nothing is quantized here. All files get their names in the directory, or none of them does.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn

from ...codecs.containers.safetensors import DTYPE_BITS, FILE_DTYPES, SAFETENSORS, header_bytes
from ...codecs.protocol import Codec, LayerScheme
from ...codecs.registry import DEFAULT
from ...errors import CheckpointError, size_of
from ...layout.packing import flat_bytes
from ...models import Conversion
from ...models.recipe_layers import require_model
from ...signatures import by_signature
from ..plan.selection import module_of
from ..read.config_text import CONFIG_KEY, WEIGHTS_ONLY_CONFIG, insert_config
from ..read.source import CONFIG, INDEX_SUFFIX, SINGLE_FILE
from ..run.directory import OutputDirectory
from ..run.folder import write_at
from .parameter_names import WEIGHT, is_pretrained
from .parts import Parts, parts_of

SHARD_BYTES = 5_000_000_000
"""Bytes of tensors from which on a file is followed by another."""


@runtime_checkable
class Saves(Protocol):
    """A tokenizer or processor: what writes its files into a directory."""

    def save_pretrained(self, save_directory: str) -> Any:
        """Write the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """Saved checkpoint: directory, file names, and numbers of layers."""

    path: Path
    files: tuple[str, ...]
    nbytes: int
    quantized: int
    kept: int

    def __str__(self) -> str:
        return f"{self.path}: {self.quantized} quantized layers, {self.kept} kept, {size_of(self.nbytes)}"


@by_signature
def save_checkpoint(
    model: nn.Module | Conversion,
    directory: Path | str,
    *,
    tokenizer: Saves | None = None,
    overwrite: bool = False,
    allow_float: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> SavedCheckpoint:
    """Write a converted model as a checkpoint that engines load.

    Nothing is left behind then.

    Args:
        model: what ``quantize_model`` or ``convert`` gave, of transformers or not; then there is no
            config.json, and the configuration stands in quantization_config.json.
        directory: new or empty, unless ``overwrite``.
        tokenizer: a tokenizer or processor whose files are written too.
        overwrite: write into a directory that is not empty.
        allow_float: whether layers that no layout holds (tables, convolutions) are dequantized and
            written as floats.
        shard_bytes: bytes of tensors in a file at most; a larger tensor has one to itself.

    Returns:
        What was written.

    Raises:
        UnsupportedError: for a layer that no layout holds, with its name, for a model without quantized
            layers and for a prepared one.
        CheckpointError: for everything about files.

    Example:
        >>> from zeropoint.models import quantize_model
        >>> conversion = quantize_model(nn.Sequential(nn.Linear(128, 8)), "w8a16")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sorted(save_checkpoint(conversion, Path(folder, "out")).files)
        ['model.safetensors', 'quantization_config.json']
    """
    module = model.model if isinstance(model, Conversion) else model
    require_model(module)
    parts = parts_of(module, DEFAULT, allow_float=allow_float)
    shards = _shards(parts, shard_bytes)
    companions = _companions(module, tokenizer)
    texts = {**companions, **_documents(companions.get(CONFIG), parts, shards)}
    _write(Path(directory), parts, shards, texts, overwrite=overwrite)
    return SavedCheckpoint(
        path=Path(directory),
        files=(*shards, *texts),
        quantized=len(parts.quantized),
        nbytes=sum(tensor.nbytes for shard in shards.values() for tensor in shard),
        kept=sum(1 for name, tensor in parts.floats.items() if tensor.ndim > 1 and name.endswith(WEIGHT)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """A tensor of a file, and its quantized matrix's module, if any."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    part: str = ""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


_Shards = Mapping[str, list[_Tensor]]


def _tensors(parts: Parts) -> Iterator[list[_Tensor]]:
    """Yield tensors of one shard: a matrix's, or a float tensor."""
    for module, part in parts.quantized.items():
        found = [(spec.suffix, spec.dtype, spec.shape) for spec in part.specs()]
        found += [(end, FILE_DTYPES[t.dtype], tuple(t.shape)) for end, t in part.inputs.items()]
        yield [
            _Tensor(name=f"{module}.{end}", dtype=dtype, shape=shape, part=module)
            for end, dtype, shape in found
        ]
    for name, tensor in parts.floats.items():
        if tensor.dtype not in FILE_DTYPES:
            raise CheckpointError(f"tensor {name} ({tensor.dtype}) has no dtype of safetensors; convert it")
        yield [_Tensor(name=name, dtype=FILE_DTYPES[tensor.dtype], shape=tuple(tensor.shape))]


def _shards(parts: Parts, limit: int) -> dict[str, list[_Tensor]]:
    """Return the tensors of each file in the order of safetensors' writer."""
    files: list[list[_Tensor]] = [[]]
    size = 0
    for group in sorted(_tensors(parts), key=lambda group: group[0].name):
        more = sum(tensor.nbytes for tensor in group)
        if files[-1] and size + more > limit:
            files.append([])
            size = 0
        files[-1] += group
        size += more
    for tensors in files:
        tensors.sort(key=lambda tensor: (SAFETENSORS.order(tensor.dtype), tensor.name))
    if len(files) == 1:
        return {SINGLE_FILE: files[0]}
    stem = SINGLE_FILE.removesuffix(".safetensors")
    return {f"{stem}-{n:05}-of-{len(files):05}.safetensors": file for n, file in enumerate(files, 1)}


def _companions(model: nn.Module, tokenizer: Saves | None) -> dict[str, bytes]:
    """Return the files of the configurations and of the tokenizer, by name."""
    with tempfile.TemporaryDirectory() as folder:
        if is_pretrained(model):
            _save_configs(model, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        root = Path(folder)
        return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def _save_configs(model: Any, folder: str) -> None:
    """Write config.json and generation_config.json as save_pretrained does."""
    config = model.config
    before = {name: getattr(config, name, None) for name in ("dtype", "architectures")}
    try:
        config.dtype = str(model.dtype).removeprefix("torch.")
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
    finally:
        for name, value in before.items():
            setattr(config, name, value)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _documents(model_config: bytes | None, parts: Parts, shards: _Shards) -> dict[str, bytes]:
    """Return the configuration and, of several files, the index, by name."""
    config = _quantization_config(parts, DEFAULT)
    texts = {}
    if len(shards) > 1:
        places = {tensor.name: name for name, tensors in shards.items() for tensor in tensors}
        total = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        texts[SINGLE_FILE + ".index.json"] = json.dumps(index, indent=2) + "\n"
    if model_config is not None:
        texts[CONFIG] = insert_config(model_config.decode("utf-8"), config)
    else:
        texts[WEIGHTS_ONLY_CONFIG] = json.dumps({CONFIG_KEY: config}, indent=2) + "\n"
    return {name: text.encode("utf-8") for name, text in texts.items()}


def _quantization_config(parts: Parts, codec: Codec) -> Mapping[str, Any]:
    """Return the quantization section, by names of the file and model."""
    modules: dict[LayerScheme, list[str]] = {}
    for module, part in parts.quantized.items():
        modules.setdefault(part.layer, []).extend(dict.fromkeys((module, parts.named[module])))
    kept = [
        *(module_of(n) for n, t in parts.floats.items() if t.ndim == 2 and n.endswith(WEIGHT)),
        *parts.kept,
    ]
    return codec.describe(modules, list(dict.fromkeys(kept)))


def _write(path: Path, parts: Parts, shards: _Shards, texts: Mapping[str, bytes], *, overwrite: bool) -> None:
    heads = {
        name: header_bytes([(t.name, t.dtype, t.shape, t.nbytes) for t in tensors], {"format": "pt"})
        for name, tensors in shards.items()
    }
    sizes = {name: len(heads[name]) + sum(t.nbytes for t in tensors) for name, tensors in shards.items()}
    sizes |= {name: len(data) for name, data in texts.items()}
    with OutputDirectory(path, None, sizes, overwrite=overwrite) as directory:
        directory.require_free(published=False)
        try:
            for name, tensors in shards.items():
                directory.prepare(name, sizes[name], heads[name])
                with directory.partials.open(name) as descriptor:
                    _write_tensors(descriptor, len(heads[name]), tensors, parts)
            for name, data in texts.items():
                directory.prepare(name, len(data), data)
            last = [n for n in texts if n.endswith(INDEX_SUFFIX) or n in (CONFIG, WEIGHTS_ONLY_CONFIG)]
            directory.sync()
            directory.publish(last)
        except BaseException:
            directory.discard()
            raise


def _write_tensors(descriptor: int, begin: int, tensors: list[_Tensor], parts: Parts) -> None:
    """Write the tensors of a file; encode each quantized matrix once."""
    offsets: dict[str, list[tuple[_Tensor, int]]] = {}
    for tensor in tensors:
        offsets.setdefault(tensor.part or tensor.name, []).append((tensor, begin))
        begin += tensor.nbytes
    for module, places in offsets.items():
        made = parts.quantized[module].tensors() if places[0][0].part else {}
        for tensor, offset in places:
            value = made[tensor.name.removeprefix(f"{module}.")] if made else parts.floats[tensor.name]
            assert (FILE_DTYPES[value.dtype], tuple(value.shape)) == (tensor.dtype, tensor.shape), tensor
            data = flat_bytes(value.detach().cpu()).numpy()
            write_at(descriptor, memoryview(data), offset)  # type: ignore[arg-type]
