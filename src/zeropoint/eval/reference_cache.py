"""What the last block of a reference gave, in a file, so that other models are compared without its pass.

It is keyed by what it was computed from: the bytes of the checkpoint, the tokens, the dtype and the versions
of what computed it. Numbers are kept as they were, so that a result from the file is the same, bit for bit;
and since a model's rest is small, the file has a few numbers for each token, not one for each word of a
vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..checkpoint.model.calibration import Batches, transformers_package
from ..checkpoint.read.source import Source
from ..checkpoint.read.storage import shown
from ..errors import CheckpointError, UnsupportedError

_KEY, _PROMPTS = "zeropoint.reference", "sequences"
_SAID = {"model": "another reference", "text": "another text, context or number of windows",
         "dtype": "another dtype", "versions": "other versions of torch or transformers"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceKey:
    """What the contents of a cache follow from; each part is a digest, or text.

    Args:
        model: the checkpoint: configuration and weights.
        text: the tokens that it was given, and those that it was asked to continue.
        dtype: of weights and activations.
        versions: of the packages that computed.
    """

    model: str
    text: str
    dtype: str
    versions: str

    @property
    def parts(self) -> dict[str, str]:
        """All parts by name."""
        return {name: getattr(self, name) for name in _SAID}


def reference_key(source: Source, batches: Batches, asked: str, dtype: torch.dtype) -> ReferenceKey:
    """Return what a pass over batches follows from; all files of weights are read for it.

    Args:
        source: a local checkpoint.
        batches: what it runs on.
        asked: what else was asked of it.
        dtype: of weights and activations.
    """
    model = hashlib.sha256((source.config_text or "").encode())
    for shard in source.shards:
        with (Path(str(source.root)) / shard).open("rb") as file:
            model.update(hashlib.file_digest(file, "sha256").digest())
    text = hashlib.sha256(asked.encode())
    for batch in batches:
        for name, tensor in sorted(batch.items()):
            text.update(f"{name}{tuple(tensor.shape)}".encode())
            text.update(tensor.contiguous().numpy().tobytes())
    versions = f"torch {torch.__version__}, transformers {transformers_package().__version__}"
    return ReferenceKey(
        model=model.hexdigest(), text=text.hexdigest(), dtype=str(dtype).removeprefix("torch."),
        versions=versions,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceCache:
    """A file of what a reference gave.

    Args:
        path: of the file; it need not exist.
    """

    path: Path

    def sequences(self) -> torch.Tensor | None:
        """Return prompts with the reference's continuations, as the file has them, or None.

        They are part of the text whose digest is checked by :meth:`read`.
        """
        if not self.path.exists():
            return None
        with self._open() as file:
            return file.get_tensor(_PROMPTS) if _PROMPTS in file.keys() else None  # noqa: SIM118 (no mapping)

    def read(self, key: ReferenceKey, batches: int) -> list[torch.Tensor] | None:
        """Return what the last block gave, one tensor a batch, or None where there is no file yet.

        Args:
            key: what it must follow from.
            batches: how many there are.

        Raises:
            CheckpointError: for a file that follows from something else, or that is none.
        """
        if not self.path.exists():
            return None
        with self._open() as file:
            said = json.loads((file.metadata() or {}).get(_KEY, "{}"))
            different = [_SAID[name] for name, part in key.parts.items() if said.get(name) != part]
            if different:
                raise CheckpointError(
                    f"cache {shown(self.path)} was made of {' and '.join(different)}; delete it, or name "
                    "another file"
                )
            return [file.get_tensor(str(n)) for n in range(batches)]

    def write(self, key: ReferenceKey, values: Sequence[Any], sequences: torch.Tensor | None) -> None:
        """Write the file, at once.

        Args:
            key: what it follows from.
            values: what the last block gave, one tensor a batch.
            sequences: prompts with continuations, or None.

        Raises:
            UnsupportedError: for a model whose blocks give more than a tensor.
            CheckpointError: where it cannot be written.
        """
        if not all(isinstance(value, torch.Tensor) for value in values):
            raise UnsupportedError(
                "blocks of this model give more than a tensor, which no cache holds; leave it out"
            )
        tensors: Mapping[str, torch.Tensor] = {str(n): value.contiguous() for n, value in enumerate(values)}
        more = {} if sequences is None else {_PROMPTS: sequences.contiguous()}
        part = self.path.with_name(f"{self.path.name}.part")
        try:
            save_file({**tensors, **more}, part, metadata={_KEY: json.dumps(key.parts)})
            part.replace(self.path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cache {shown(self.path)} cannot be written: {error}") from error

    @contextmanager
    def _open(self) -> Iterator[Any]:
        try:
            with safe_open(self.path, "pt") as file:
                yield file
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"cache {shown(self.path)} cannot be read: {error}; delete it, or name another file"
            ) from error
