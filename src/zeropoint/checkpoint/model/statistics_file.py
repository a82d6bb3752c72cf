"""Statistics files: sums over layer inputs in a safetensors file.

Each site, a tensor that layers read, has the name of its first reader X:

    X.squares    (features,) float64, sums of squares
    X.gram       (features * (features + 1) / 2,) float64, rows of the upper triangle of X^T X; in all or none

``__metadata__`` has zeropoint_statistics, the version; model, a digest of the checkpoint; tokens, digests of
the data; and sites, by name: readers, vectors and numbers that were left out as not finite.

Several files are read as one, whose sums are the files' sums, added in float64 in their order.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...codecs.containers.protocol import Row
from ...codecs.containers.safetensors import SAFETENSORS
from ...columns import LazySequence
from ...errors import CalibrationError, CheckpointError, all_of, printable
from ...own_files import FileKind, OwnFile
from ...stats import GramMatrix, MeanSquare, State, Statistics
from ..read.decoding import read_tensor
from ..read.safetensors_file import Header, parse_header
from ..read.source import Source
from ..read.storage import OpenFiles, read_bytes, shown

MARK, VERSION = "zeropoint_statistics", "1"
STATISTICS = FileKind("statistics", MARK.encode())
_SQUARES, _GRAM = "squares", "gram"
_SAMPLED, _SAMPLE = 16, 256
"""Tensors of a checkpoint, and bytes of each, that are in its digest with all names and shapes."""


def mark_of(source: Source) -> str:
    """Return a digest of a checkpoint's headers and sampled bytes."""
    total = hashlib.sha256()
    names = sorted(source.entries)
    for name in names:
        entry = source.entries[name]
        total.update(f"{name}\0{entry.dtype}\0{tuple(entry.shape)}\n".encode())
    with OpenFiles() as files:
        for name in names[:: max(1, len(names) // _SAMPLED)]:
            entry = source.entries[name]
            piece = read_bytes(files[entry.file], entry.begin, min(entry.nbytes, _SAMPLE))
            total.update(piece)
    return total.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRecord:
    """Record of a site in a statistics file.

    readers: modules, by their names in files. features: of a vector. vectors, left_out: counts.
    """

    readers: tuple[str, ...]
    features: int
    vectors: int
    left_out: int


class StatisticsDraft:
    """Statistics that are not written yet, in a temporary file.

    folder: in which that file is. model: see :func:`mark_of`. tokens: digests of data.
    """

    def __init__(self, folder: Path, model: str, tokens: Sequence[str]) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed with the draft)
        self._model, self._tokens = model, list(tokens)
        self.sites: dict[str, SiteRecord] = {}
        self._rows: list[Row] = []

    def __enter__(self) -> StatisticsDraft:
        return self

    def __exit__(self, *failure: object) -> None:
        self._file.close()

    def add(self, readers: Sequence[str], squares: State, gram: State | None) -> None:
        """Append the sums of a site."""
        features = len(squares["squares"])
        self.sites[readers[0]] = SiteRecord(
            readers=tuple(readers),
            features=features,
            vectors=int(squares["vectors"]),
            left_out=int(squares["left_out"]),
        )
        self._append(f"{readers[0]}.{_SQUARES}", squares["squares"])
        if gram is not None:
            self._append(f"{readers[0]}.{_GRAM}", _triangle(gram["gram"]))

    def _append(self, name: str, numbers: torch.Tensor) -> None:
        self._rows.append(Row(name, "F64", tuple(numbers.shape), numbers.nbytes))
        self._file.write(numbers.cpu().contiguous().numpy().data)

    def write(self, file: OwnFile, *, overwrite: bool) -> int:
        """Write the file, and return its bytes."""
        sites = {
            name: {"readers": site.readers, "vectors": site.vectors, "left_out": site.left_out}
            for name, site in self.sites.items()
        }
        texts = {
            MARK: VERSION,
            "model": self._model,
            "tokens": json.dumps(self._tokens),
            "sites": json.dumps(sites),
        }
        head = SAFETENSORS.head(self._rows, texts)
        left = head.size - len(head.data)

        def piece(number: int) -> bytes:
            if not number:
                return head.data
            begin = (number - 1) * _PIECE
            self._file.seek(begin)
            return self._file.read(min(_PIECE, left - begin))

        file.write(LazySequence(1 + -(-left // _PIECE), piece), overwrite=overwrite)
        return head.size


_PIECE = 1 << 24


class SavedStatistics:
    """Statistics of one or several files.

    paths: of the files, at least one. source: the checkpoint that they must be of. sites: by the names of
    their first readers. owners: the site of each reader. tokens: digests of data. has_gram: whether there are
    Gram matrices. Raises CheckpointError for files that are none or damaged; CalibrationError for files of
    another checkpoint, of other sites, and of the same data.
    """

    def __init__(self, paths: Iterable[Path | str], source: Source) -> None:
        self.paths = tuple(map(Path, paths))
        self._files = OpenFiles()
        self._headers = [parse_header(path) for path in self.paths]
        self.model = mark_of(source)
        found = [self._read(path, head) for path, head in zip(self.paths, self._headers, strict=True)]
        self.tokens = [digest for _, tokens in found for digest in tokens]
        first = found[0][0]
        for path, (sites, _) in zip(self.paths, found, strict=True):
            if _layout(sites) != _layout(first):
                raise CalibrationError(
                    f"{shown(path)} is of other layers than {shown(self.paths[0])}, so that they are not "
                    "added; make both of the same model, of more data"
                )
        grams = [any(name.endswith(f".{_GRAM}") for name in head.table) for head in self._headers]
        if any(grams) != all(grams):
            raise CalibrationError(
                f"{shown(self.paths[grams.index(False)])} has no Gram matrices, and another file has; make "
                "both alike"
            )
        if len(set(self.tokens)) < len(self.tokens):
            raise CalibrationError(
                f"{all_of([shown(path) for path in self.paths])} are of the same data, which would count "
                "twice; name files of different data"
            )
        self.has_gram = all(grams)
        self.sites = {
            name: SiteRecord(
                readers=site.readers,
                features=site.features,
                vectors=sum(sites[name].vectors for sites, _ in found),
                left_out=sum(sites[name].left_out for sites, _ in found),
            )
            for name, site in first.items()
        }
        self.owners = {reader: name for name, site in self.sites.items() for reader in site.readers}

    def __enter__(self) -> SavedStatistics:
        return self

    def __exit__(self, *failure: object) -> None:
        self._files.__exit__(*failure)

    def _read(self, path: Path, head: Header) -> tuple[dict[str, SiteRecord], list[str]]:
        texts = head.metadata
        if texts.get(MARK) != VERSION:
            raise CheckpointError(
                f"{shown(path)} is no file of statistics that is read here; make one with "
                "zeropoint statistics"
            )
        if texts.get("model") != self.model:
            raise CalibrationError(
                f"{shown(path)} has statistics of another checkpoint: names, shapes or numbers differ; make "
                "them of the one that is quantized"
            )
        try:
            sites = {
                name: SiteRecord(
                    readers=tuple(map(str, said["readers"])),
                    features=head.table[f"{name}.{_SQUARES}"].shape[0],
                    vectors=_whole(said["vectors"]),
                    left_out=_whole(said["left_out"]),
                )
                for name, said in json.loads(str(texts["sites"])).items()
            }
            tokens = [str(digest) for digest in json.loads(str(texts["tokens"]))]
            wanted = {f"{name}.{_SQUARES}": (site.features,) for name, site in sites.items()}
            if len(head.table) > len(wanted):
                wanted |= {
                    f"{name}.{_GRAM}": (site.features * (site.features + 1) // 2,)
                    for name, site in sites.items()
                }
            there = {name: tuple(entry.shape) for name, entry in head.table.items() if entry.dtype == "F64"}
            readers = [reader for site in sites.values() for reader in site.readers]
            whole = all(site.readers[:1] == (name,) for name, site in sites.items())
            if there != wanted or len(set(readers)) < len(readers) or not whole or not sites:
                raise ValueError("tensors and sites differ")
        except (KeyError, ValueError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{shown(path)} is a damaged file of statistics ({printable(str(error))}); make it again"
            ) from error
        return sites, tokens

    def _sum(self, name: str) -> torch.Tensor:
        """Return the sum of a tensor over the files."""
        total: torch.Tensor | None = None
        for path, head in zip(self.paths, self._headers, strict=True):
            own = read_tensor(head.table[name], self._files)
            if not bool(torch.isfinite(own).all()):
                raise CheckpointError(
                    f"{shown(path)}: {printable(name)} has numbers that are not finite; make the file again"
                )
            total = own if total is None else total + own
        assert total is not None
        return total

    def _counts(self, site: SiteRecord) -> State:
        return {
            "vectors": torch.tensor(site.vectors),
            "seen": torch.tensor(site.vectors * site.features),
            "left_out": torch.tensor(site.left_out),
        }

    def squares(self, name: str) -> State:
        """Return a site's mean-square state; raises CheckpointError for bad numbers."""
        own = self._sum(f"{name}.{_SQUARES}")
        if bool((own < 0).any()):
            raise CheckpointError(
                f"{shown(self.paths[0])}: {printable(name)} has squares below 0; make the file again"
            )
        return {"squares": own, **self._counts(self.sites[name])}

    def gram(self, name: str) -> State:
        """Return a site's Gram matrix state; raises CheckpointError for bad numbers."""
        site = self.sites[name]
        return {"gram": _square(self._sum(f"{name}.{_GRAM}"), site.features), **self._counts(site)}

    def mean_square(self, module: str) -> Statistics | None:
        """Return the mean squares of a module's inputs, or None."""
        name = self.owners.get(module)
        if name is None or not self.sites[name].vectors:
            return None
        accumulator = MeanSquare(features=self.sites[name].features)
        return Statistics(accumulator=accumulator, state=self.squares(name), name=module)

    def gram_of(self, state: State, module: str) -> Statistics:
        """Return a state as statistics."""
        return Statistics(accumulator=GramMatrix(features=len(state["gram"])), state=state, name=module)

    def copy_to(self, draft: StatisticsDraft) -> None:
        """Append the sums of all sites to a draft."""
        for name, site in self.sites.items():
            draft.add(site.readers, self.squares(name), self.gram(name) if self.has_gram else None)

    @property
    def digest(self) -> str:
        """A digest of counts and squares, which tells these statistics from others."""
        total = hashlib.sha256()
        for name, site in self.sites.items():
            total.update(f"{name}\0{site}\0{self.has_gram}\n".encode())
            total.update(self.squares(name)["squares"].numpy().tobytes())
        return total.hexdigest()


def _layout(sites: Mapping[str, SiteRecord]) -> dict[str, tuple[tuple[str, ...], int]]:
    return {name: (site.readers, site.features) for name, site in sites.items()}


def _whole(number: object) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no count")
    return number


def _triangle(gram: torch.Tensor) -> torch.Tensor:
    """Return the concatenated rows of a symmetric matrix's upper triangle."""
    return torch.cat([row[at:] for at, row in enumerate(gram)])


def _square(triangle: torch.Tensor, features: int) -> torch.Tensor:
    """Return the symmetric matrix of which ``triangle`` has the upper triangle."""
    found, begin = torch.empty(features, features, dtype=triangle.dtype), 0
    for at in range(features):
        row = triangle[begin : begin + features - at]
        found[at, at:] = found[at:, at] = row
        begin += features - at
    return found


def tokens_digest(windows: Iterable[torch.Tensor]) -> str:
    """Return a digest of windows of tokens."""
    total = hashlib.sha256()
    for window in windows:
        total.update(f"{tuple(window.shape)}".encode() + window.cpu().numpy().tobytes())
    return total.hexdigest()
