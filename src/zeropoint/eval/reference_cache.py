"""Cache file of a reference's last block, to compare without its pass.

Its key covers all inputs: the bytes of the checkpoint, the tokens, the dtype and the versions of packages.
Numbers are kept as they were, so that a result from the file is the same, bit for bit; and since the head of
a model is small, the file has a few numbers for each token, not one for each word of a vocabulary.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.model.samples import Batches
from ..checkpoint.plan.row_reader import bytes_of
from ..checkpoint.read.decoding import read_tensor
from ..checkpoint.read.safetensors_file import Header, parse_header, pieces
from ..checkpoint.read.source import Source
from ..checkpoint.read.storage import OpenFiles, opened, shown
from ..checkpoint.read.tensor_entries import TensorEntry
from ..codecs.containers.safetensors import FILE_DTYPES, TORCH_DTYPES, header_bytes
from ..declared_models import transformers_package
from ..errors import CheckpointError, UnsupportedError, printable
from ..own_files import FileKind, OwnFile

_KEY, _DIGESTS, _PROMPTS = "zeropoint.reference", "zeropoint.sha256", "sequences"
_CACHE = FileKind("cache", _KEY.encode())
_SAID = {
    "model": "another reference",
    "text": "another text, context, number of windows or device",
    "dtype": "another dtype",
    "versions": "other versions of torch or transformers",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceKey:
    """Key of a cache's contents; each part is a digest, or text.

    model: the checkpoint: configuration and weights. text: the tokens of the pass, and the prompts to
    continue. dtype: of weights and activations. versions: of the packages that computed.
    """

    model: str
    text: str
    dtype: str
    versions: str


def reference_key(source: Source, batches: Batches, asked: str, dtype: torch.dtype) -> ReferenceKey:
    """Return a pass's cache key, from all bytes of the weights."""
    model = hashlib.sha256((source.config_text or "").encode("utf-8", "surrogateescape"))
    for shard in source.shards:
        own = hashlib.sha256()
        with opened(source.root / shard) as file:
            for piece in pieces(file, 0, file.stamp.size):
                own.update(piece)
        model.update(own.digest())
    text = hashlib.sha256(asked.encode())
    for batch in batches:
        for name, tensor in sorted(batch.items()):
            text.update(f"{name}{tuple(tensor.shape)}".encode())
            text.update(tensor.contiguous().numpy().tobytes())
    versions = f"torch {torch.__version__}, transformers {transformers_package().__version__}"
    return ReferenceKey(model=model.hexdigest(), text=text.hexdigest(), dtype=_name(dtype), versions=versions)


@dataclass(frozen=True, slots=True)
class ReferenceCache:
    """A file of what a reference gave; it need not exist.

    Each tensor has the digest of its bytes in the metadata, so that what a disk has changed is not taken for
    numbers of the reference. path: of the file. apart: where checkpoints lie that are read, in which it is
    not written.
    """

    path: Path
    apart: Sequence[Path] = ()

    def require_place(self) -> None:
        """Raise CheckpointError where the file cannot be written."""
        if not self.path.absolute().parent.is_dir():
            raise CheckpointError(f"the folder of cache {shown(self.path)} does not exist; create it first")
        self._file.require_free(overwrite=True)

    @property
    def is_there(self) -> bool:
        """Whether there is a file."""
        return os.path.lexists(self.path)

    def sequences(self) -> torch.Tensor | None:
        """Return the cached prompts with the reference's continuations, or None.

        They are part of the text whose digest is checked by :meth:`read`. Raises CheckpointError for a file
        that is damaged.
        """
        if not self.is_there:
            return None
        header = self._header()
        entry = header.table.get(_PROMPTS)
        if entry is None:
            return None
        if entry.dtype != "I64" or len(entry.shape) != 2:
            raise self._damaged(f"its {_PROMPTS} are {entry.dtype} of shape {list(entry.shape)}")
        found = self._tensor(header, entry)
        if found.numel() and int(found.min()) < 0:
            raise self._damaged(f"its {_PROMPTS} hold the token {int(found.min())}")
        return found

    def read(self, key: ReferenceKey, batches: Batches, width: int) -> list[torch.Tensor]:
        """Return the cached outputs of the last block, one a batch.

        key: the expected key. batches: the block's inputs. width: numbers of the block's output for a token.
        Raises CheckpointError for a file of another key, a damaged one, or no cache.
        """
        header = self._header()
        said = _object(header.metadata.get(_KEY, "{}"))
        different = [_SAID[name] for name, part in asdict(key).items() if said.get(name) != part]
        if different:
            raise CheckpointError(
                f"cache {shown(self.path)} was made of {' and '.join(different)}; delete it, or name another "
                "file"
            )
        found = []
        for number, batch in enumerate(batches):
            entry, shape = header.table.get(str(number)), (*batch["input_ids"].shape, width)
            if entry is None or entry.shape != shape or _name(TORCH_DTYPES.get(entry.dtype)) != key.dtype:
                has = "nothing" if entry is None else f"{entry.dtype} of shape {list(entry.shape)}"
                raise self._damaged(f"it has {has} where {key.dtype} of shape {list(shape)} belongs")
            found.append(self._tensor(header, entry))
        return found

    def write(self, key: ReferenceKey, values: Sequence[Any], sequences: torch.Tensor | None) -> None:
        """Write the file, at once.

        key: what it follows from. values: what the last block gave, one tensor a batch. sequences: prompts
        with continuations, or None. Raises UnsupportedError for a model whose blocks give more than a tensor;
        CheckpointError where it cannot be written.
        """
        if not all(isinstance(value, torch.Tensor) for value in values):
            raise UnsupportedError(
                "blocks of this model give more than a tensor, which no cache holds; leave it out"
            )
        tensors = {str(n): value.contiguous() for n, value in enumerate(values)}
        tensors |= {} if sequences is None else {_PROMPTS: sequences.contiguous()}
        data = {name: bytes_of(tensor) for name, tensor in tensors.items()}
        digests = {name: hashlib.sha256(view).hexdigest() for name, view in data.items()}
        head = header_bytes(
            ((name, FILE_DTYPES[t.dtype], tuple(t.shape), t.nbytes) for name, t in tensors.items()),
            {_KEY: json.dumps(asdict(key)), _DIGESTS: json.dumps(digests)},
        )
        self._file.write([head, *data.values()], overwrite=False)

    @property
    def _file(self) -> OwnFile:
        return OwnFile(self.path, _CACHE, self.apart)

    def _header(self) -> Header:
        try:
            return parse_header(self.path)
        except CheckpointError as error:
            raise self._damaged(str(error)) from error

    def _tensor(self, header: Header, entry: TensorEntry) -> torch.Tensor:
        """Return a tensor whose bytes have the digest that the file says."""
        with OpenFiles() as files:
            found = read_tensor(entry, files)
        digest = hashlib.sha256(bytes_of(found)).hexdigest()
        if _object(header.metadata.get(_DIGESTS, "{}")).get(entry.name) != digest:
            raise self._damaged(f"its tensor {printable(entry.name)} is not the one that was written")
        return found

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"cache {shown(self.path)} cannot be read: {what}; delete it, or name another file"
        )


def _object(text: object) -> dict[str, Any]:
    """Return an object of JSON; one without keys for anything else."""
    try:
        found = json.loads(str(text))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
