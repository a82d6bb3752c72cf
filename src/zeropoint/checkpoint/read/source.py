"""Open a checkpoint: a Hugging Face style directory, or one file.

This module owns which files belong to a checkpoint and that they agree with each other. It knows nothing of
what one file says (safetensors_file.py), of torch or of quantization, and it executes nothing that it finds.

Which weights are read, in this order, as transformers 5.23 chooses (`_get_resolved_checkpoint_files`):
`model.safetensors`; the shards of `model.safetensors.index.json`; and, which transformers does not try, a
single other `*.safetensors.index.json` or `*.safetensors`. Weights that are not chosen are never copied,
because vLLM prefers the index and would load them with ours: they are in `Source.left_out` and named in
`Source.notes`.

No name from a file becomes a path before it is checked: a shard is a plain name of a regular file inside the
directory. Symbolic links may not leave the directory, but for the cache of huggingface_hub, whose
`snapshots/REVISION/NAME` all point into `blobs` of the same model.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zeropoint.checkpoint.read import misplaced, storage
from zeropoint.checkpoint.read.file_names import REPORT, is_own, is_plain
from zeropoint.checkpoint.read.headers import by_parts, inside, read_header
from zeropoint.checkpoint.read.index import NUMBERED, check_index, read_index, require_json
from zeropoint.checkpoint.read.object_store import RemotePath, Stamp, reason
from zeropoint.checkpoint.read.problems import ObstacleError, listed
from zeropoint.checkpoint.read.safetensors_file import LFS_MAGIC, Header
from zeropoint.checkpoint.read.storage import Place, opened, read_bytes, shown
from zeropoint.checkpoint.read.tensor_entries import Entries
from zeropoint.codecs.containers import container_of
from zeropoint.codecs.containers import protocol as containers
from zeropoint.codecs.containers.protocol import Metadata
from zeropoint.errors import CheckpointError, count, printable

SINGLE_FILE = "model.safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
CONFIG = "config.json"
# Values of JSON take up to 20 times their text, and the largest published configurations have about 5 MB.
MAX_JSON_BYTES = 16_000_000
_WEIGHT_SUFFIXES = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".npz")
)
# Version control and download caches: they describe the source, not the copy.
_UNCOPIED_DIRECTORIES = frozenset((".git", ".cache", "__pycache__"))
_INDEX = re.compile(r"\.index(\.[^.]+)?\.json$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A validated checkpoint: the place of each tensor, and files to copy.

    `given`: what was opened, a directory or one file. `root`: the directory, without symbolic links.
    `entries`: by name; shards by name, file order in each. `shards`: file names in `root`. `metadata`: by
    shard. `config`: config.json parsed, with its text as it stands, or None for weights only. `companions`:
    relative paths of the files to copy. `left_out`: relative paths of weights not chosen and of directories
    such as `.git`. `notes`: sentences for the report. `stamps`: the state of shards, index and config when
    they were opened. `graph`: what a file with a graph says besides its tensors.
    """

    given: Place
    root: Place
    entries: Entries
    shards: tuple[str, ...]
    metadata: Mapping[str, Metadata]
    index: str | None
    config: dict[str, Any] | None
    config_text: str | None
    companions: tuple[Path, ...]
    left_out: tuple[Path, ...]
    notes: tuple[str, ...]
    stamps: Mapping[Place, Stamp]
    graph: bytes = b""
    _sizes: dict[Path, int] = field(default_factory=dict, repr=False, compare=False)

    def size_of(self, companion: Path) -> int:
        """Return the size of a file to copy, as first seen."""
        if companion not in self._sizes:
            self._sizes[companion] = storage.stamp(self.root / companion).size
        return self._sizes[companion]

    @property
    def places(self) -> tuple[Path, ...]:
        """Local places of its files: folders, or single files."""
        if not isinstance(self.root, Path):
            return ()
        if self.given != self.root:
            return tuple(self.root / shard for shard in self.shards)
        return folders_of(self.root)

    @property
    def container(self) -> containers.Container:
        """Container of the weights files."""
        return container_of(self.shards[0])

    def check_unchanged(self) -> None:
        """Raise CheckpointError, naming each file, where shards, index or config were changed.

        ObstacleError where a later run can tell what to do again: shards have their names and sizes still.
        """
        changed, kept = [], True
        for path, stamp in self.stamps.items():
            try:
                now = storage.stamp(path)
            except storage.failures(path) as error:
                changed.append(f"{shown(path)} ({reason(error)})")
                kept = False
                continue
            if now != stamp:
                fields = [field.name for field in dataclasses.fields(stamp)]
                moved = [field for field in fields if getattr(now, field) != getattr(stamp, field)]
                changed.append(f"{shown(path)} ({', '.join(moved)})")
                kept = kept and now.size == stamp.size and path.name in self.shards
        if changed:
            kind = ObstacleError if kept else CheckpointError
            rule = "changed since the checkpoint was opened; stop what writes there and start again"
            raise kind(f"{listed(changed)} {rule}")


def open_source(path: Place | str) -> Source:
    """Open and validate the checkpoint at `path`, a directory or one file.

    A single file is taken alone, without companions: its directory may hold anything. Raises CheckpointError
    where a file is missing, damaged, hostile, or contradicts the index; contradictions are listed at once.
    """
    path = storage.place(path)
    if not storage.is_folder(path):
        if path.name.endswith(INDEX_SUFFIX):
            rule = f"is an index, but a checkpoint is its directory; pass {shown(path.parent)}"
            raise CheckpointError(f"{shown(path)} {rule}")
        if isinstance(path, Path) and not storage.exists(path):
            raise misplaced.nothing_there(path)
        wrong = misplaced.other_file(path)
        if wrong is not None:
            raise wrong
        return _single(path)
    return _directory(_real(path))


def folders_of(root: Path) -> tuple[Path, ...]:
    """Return a source's folder, and the cache's `blobs` for a snapshot."""
    return (root, root.parent.parent / "blobs") if root.parent.name == "snapshots" else (root,)


def _real(path: Place) -> Place:
    """Return a path without symbolic links; a URL has none."""
    return path if isinstance(path, RemotePath) else Path(os.path.realpath(path))


def _single(path: Place) -> Source:
    header = read_header(path)
    others = [other.name for other in header.others]
    # The file keeps the name by which it was given: a link in a cache points to a nameless blob.
    return Source(
        given=_real(path.parent) / path.name,
        root=_real(path.parent),
        entries=by_parts(header.table),
        shards=(path.name, *others),
        metadata=MappingProxyType(dict.fromkeys((path.name, *others), header.metadata)),
        index=None,
        config=None if header.config is None else dict(header.config),
        config_text=_text_of(header.config),
        companions=(),
        left_out=(),
        notes=(
            f"{shown(path)} was given as one file: what lies next to it, config.json too, is not read",
            *_inside(path.name, header),
        ),
        stamps=MappingProxyType({path: header.stamp, **header.others}),
        graph=header.graph,
    )


def _directory(root: Place) -> Source:
    """Open a directory; `root` has no symbolic link in it."""
    notes: list[str] = []
    stamps: dict[Place, Stamp] = {}
    names = sorted(found.name for found in storage.listing(root))
    index = _choose_index(root, names, notes)
    if index is None:
        headers = _read_headers(root, [_choose_single(root, names)])
        entries = _merge(headers)
    else:
        path = inside(root, index)
        stamps[path], shards, total_size = read_index(path)
        headers = _read_headers(root, sorted(shards & set(names)))
        entries = _merge(headers)
        check_index(path, headers, entries)
        if total_size != entries.nbytes:
            place = shown(root / index)
            found = f"the tensors have {entries.nbytes} bytes"
            notes.append(f"{place} has total_size {total_size!r:.40}, but {found}")
    config, config_text = _read_config(root, names, notes, stamps)
    if config is None and config_text is None:
        said = next((header.config for header in headers.values()), None)
        config, config_text = None if said is None else dict(said), _text_of(said)
        if config is None:
            notes.append(f"{shown(root)} has no {CONFIG}: weights only")
    for header in headers.values():
        stamps.update(header.others)
    others = [other.name for header in headers.values() for other in header.others]
    companions, left_out = _companions(root, {*headers, *others, index, REPORT}, notes)
    stamps.update((root / shard, header.stamp) for shard, header in headers.items())
    return Source(
        given=root,
        root=root,
        entries=by_parts(entries),
        shards=(*headers, *others),
        metadata=MappingProxyType(
            {shard: header.metadata for shard, header in headers.items()} | {other: {} for other in others}
        ),
        index=index,
        config=config,
        config_text=config_text,
        companions=companions,
        left_out=left_out,
        notes=(*notes, *(note for shard, header in headers.items() for note in _inside(shard, header))),
        stamps=MappingProxyType(stamps),
        graph=b"".join(header.graph for header in headers.values()),
    )


def _text_of(config: Mapping[str, Any] | None) -> str | None:
    """Return a file's embedded configuration in the form of config.json."""
    return None if config is None else json.dumps(config, indent=2) + "\n"


def _quoted(names: Iterable[str]) -> str:
    return listed([printable(name) for name in names])


def _inside(file: str, header: Header) -> list[str]:
    """Return a sentence about tensors that stay in a file's graph."""
    if not header.inside:
        return []
    held = count(len(header.inside), "tensor")
    names = listed([printable(name) for name in header.inside], 8)
    return [f"{held} of few numbers, or with numbers one by one, stay in the graph of {file}: {names}"]


def _choose_index(root: Place, names: Sequence[str], notes: list[str]) -> str | None:
    """Return the index to read, or None for one weights file."""
    found = [name for name in names if name.endswith(INDEX_SUFFIX)]
    own = SINGLE_FILE + ".index.json"
    if SINGLE_FILE in names:
        if own in found and _agrees(root, own):
            return own
        if found:
            notes.append(
                f"{shown(root)} holds both {SINGLE_FILE} and {_quoted(found)}: "
                f"{SINGLE_FILE} is read, as transformers does"
            )
        return None
    if own in found:
        return own
    if len(found) > 1:
        listed = _quoted(found)
        raise CheckpointError(
            f"{shown(root)} holds {len(found)} indexes ({listed}), but one is read; keep one"
        )
    return found[0] if found else None


def _agrees(root: Place, index: str) -> bool:
    """Return whether an index names just the single file's tensors."""
    path = inside(root, index)
    try:
        if read_index(path)[1] != {SINGLE_FILE}:
            return False
        headers = _read_headers(root, [SINGLE_FILE])
        check_index(path, headers, _merge(headers))
    except CheckpointError:
        return False
    return True


def _choose_single(root: Place, names: Sequence[str]) -> str:
    """Return the only weights file of a directory; safetensors come first."""
    if SINGLE_FILE in names:
        return SINGLE_FILE
    found = [name for name in names if name.endswith(".safetensors")]
    whole = [name for name in names if not container_of(name).indexed]
    if not found and len(whole) == 1:
        return whole[0]
    numbered = NUMBERED.fullmatch(found[0]) if found else None
    if len(found) == 1 and (numbered is None or int(numbered["count"]) == 1):
        return found[0]
    if found:
        raise CheckpointError(
            f"{shown(root)} holds {_quoted(found)}, but no {SINGLE_FILE}.index.json that "
            "says which belong together; download the index, or pass one .safetensors file"
        )
    raise misplaced.without_weights(root, names)


def _read_headers(root: Place, shards: Iterable[str]) -> dict[str, Header]:
    """Parse the headers of shards that exist; `check_index` names the others."""
    paths = {shard: inside(root, shard) for shard in shards}
    return {shard: read_header(path, shard) for shard, path in paths.items()}


def _merge(headers: Mapping[str, Header]) -> Entries:
    """Merge the shards' tensors; raises CheckpointError for a duplicate."""
    if len(headers) == 1:
        return next(iter(headers.values())).table
    entries = Entries()
    twice = []
    for header in headers.values():
        for entry in entries.extend(header.table):
            where = f"{printable(entries[entry.name].file.name)} and {printable(entry.file.name)}"
            twice.append(f"tensor {printable(entry.name)} is in both {where}")
    if twice:
        raise CheckpointError(f"{listed(twice)}, but each may be in one; download the shards again")
    return entries


def _read_config(
    root: Place, names: Sequence[str], notes: list[str], stamps: dict[Place, Stamp]
) -> tuple[dict[str, Any] | None, str | None]:
    """Return config.json, parsed and as text, or None with a note."""
    if CONFIG not in names:
        return None, None
    twice: list[str] = []

    def last_wins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            twice.extend(printable(key) for key, count in counts.items() if count > 1)
        return table

    text, reason = None, "it is not a JSON object"
    path = inside(root, CONFIG)
    stamps[path] = require_json(path, limit=MAX_JSON_BYTES)
    raw, _ = storage.read_small(path, limit=MAX_JSON_BYTES)
    try:
        text = raw.decode("utf-8")
        # NaN and Infinity stay allowed: published configs hold them, such as Mamba's time_step_limit.
        config = json.loads(text, object_pairs_hook=last_wins)
    except (ValueError, RecursionError) as error:
        config, reason = None, str(error)
    if twice:
        rule = "has duplicate keys, the last of which counts"
        notes.append(f"{shown(root / CONFIG)} {rule}: {listed(twice)}")
    if not isinstance(config, dict):
        notes.append(f"{shown(root / CONFIG)} is not a valid configuration ({reason}): weights only")
        return None, text
    _require_words(config, shown(root / CONFIG))
    return config, text


def _require_words(config: Mapping[str, Any], place: str) -> None:
    """Raise CheckpointError where a model_type is not text."""
    for table in (config, *(part for part in config.values() if isinstance(part, dict))):
        found = table.get("model_type")
        if found is not None and not isinstance(found, str):
            raise CheckpointError(
                f"{place} has the model_type {printable(repr(found))}, but it must be text; download it again"
            )


def _companions(
    root: Place, taken: Container[str | None], notes: list[str]
) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return the files to copy and the omitted ones, as sorted paths."""
    companions: list[Path] = []
    left_out: list[Path] = []
    pending = [Path()]
    while pending:
        folder = pending.pop()
        for found in storage.listing(root / folder):
            if not is_plain(found.name):
                raise CheckpointError(
                    f"{shown(root / folder)} holds {printable(found.name)}, which is not the name of a file; "
                    "do not trust this checkpoint, or rename it"
                )
            relative = folder / found.name
            if is_own(found.name):
                left_out.append(relative)
            elif found.is_folder:
                (left_out if found.name in _UNCOPIED_DIRECTORIES else pending).append(relative)
            elif folder == Path() and found.name in taken:
                continue
            else:
                (left_out if folder == Path() and is_weights(found.name) else companions).append(relative)
    for relative in companions:
        _check_companion(root, relative, notes)
    if left_out:
        names = listed(sorted(printable(str(path)) for path in left_out))
        notes.append(f"not copied from {shown(root)}: {names}")
    return tuple(sorted(companions)), tuple(sorted(left_out))


def is_weights(name: str) -> bool:
    """Return whether a file name belongs to weights or their index."""
    return Path(name).suffix in _WEIGHT_SUFFIXES or _INDEX.search(name) is not None


def _check_companion(root: Place, relative: Path, notes: list[str]) -> None:
    """Refuse a companion that is no regular file; note Git LFS pointers."""
    path = inside(root, relative)
    with opened(path) as file:
        head = read_bytes(file, 0, min(file.stamp.size, 64))
    if head.startswith(LFS_MAGIC):
        notes.append(
            f"{shown(path)} is a Git LFS pointer and is copied as such; run `git lfs pull` for the file"
        )
