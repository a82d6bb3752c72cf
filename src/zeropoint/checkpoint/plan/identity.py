"""Identity of a run: equal identities write equal bytes.

In words and digests. A journal, a plan file and a worker on another machine are compared by it before
anything is done. It holds no path, time or host, and nothing that changes speed alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING

from ...codecs.containers.safetensors import MAX_BYTES
from ...errors import CheckpointError, printable
from ...methods import NEAREST
from ..read.source import Source
from ..read.storage import Place, opened, read_bytes, stamp
from .row_reader import Literal, RowReader

if TYPE_CHECKING:
    from .checkpoint_plan import CheckpointPlan

ASKED = "asked"
"""The field that is known before weights are solved."""
JOURNAL_FORMAT = "1"
"""The format of journals (run/journal.py) that this version resumes."""
VERSION = metadata.version("zeropoint")


def identity(plan: CheckpointPlan) -> dict[str, str]:
    """Return the identity of a plan: field name to text or digest.

    Fields that a user chose come first. Reads the headers of all shards. Raises CheckpointError when one is
    gone.
    """
    selection, source = plan.selection, plan.source
    fields = {
        "zeropoint": VERSION,
        "journal": JOURNAL_FORMAT,
        "recipe": plan.recipe.text,
        "include": json.dumps(list(selection.include)),
        "ignore": json.dumps(list(selection.ignore)),
        "dequantize": f"{selection.dequantize.value} {selection.floats or ''}".strip(),
        "config.json": "absent" if source.config_text is None else _digest([source.config_text.encode()]),
        "companions": _digest(f"{path}\0{size}\n" for path, size in sorted(plan.companions.items())),
    }
    if plan.statistics or plan.outputs.added or plan.solved:
        fields["calibration"] = _digest(_learned(plan))
    if plan.limits.on_gpu:
        fields["device"] = plan.limits.device.type
    if selection.fit:
        fields["fit"] = "true"
    if plan.asked:
        fields[ASKED] = plan.asked
    fields |= shard_fields(source)
    fields["output"] = _digest(_output(plan))
    return fields


def request_digest(plan: CheckpointPlan, data: str) -> str:
    """Return a digest of a plan before solving and its calibration data.

    data: their digest.
    """
    return _digest([json.dumps(identity(plan), sort_keys=True), data])


def _output(plan: CheckpointPlan) -> Iterator[str | bytes]:
    """Yield all that tells one output from another."""
    heads = ((shard.name, shard.head) for shard in plan.shards)
    for name, text in (*heads, *sorted(plan.texts.items(), key=lambda item: item[0])):
        yield f"{name}\0"
        yield from text.pieces()
    for w in plan.weights:
        method = "" if w.method == NEAREST else f"\0{w.method}"
        yield f"{w.module}\0{w.layer}\0{w.share}\0{_codes(w.reader)}{method}"
    for r in plan.restored:
        yield f"{r.module}\0{_codes(r.reader)}"


def _learned(plan: CheckpointPlan) -> Iterator[str | bytes]:
    """Yield all calibration results: input statistics, solved codes, cache scales."""
    for added in plan.outputs.added:
        yield f"{added.entry.name}\0"
        yield added.data if isinstance(added, Literal) else b""
    for module, weight in sorted(plan.solved.items()):
        yield f"{module}\0{weight.digest}\0"
    for module, needs in sorted(plan.statistics.items()):
        for need, statistics in sorted(needs.items()):
            for name, tensor in sorted(statistics.state.items()):
                yield f"{module}\0{need}\0{statistics.accumulator}\0{name}\0"
                yield tensor.cpu().contiguous().numpy().tobytes()


OF_SOURCE = ("config.json", "companions")
"""Fields that the source decides, as do those about its files of weights."""
SHARD = "shard "
"""Prefix of fields about weights files."""


def shard_fields(source: Source) -> Iterator[tuple[str, str]]:
    """Yield each shard's identity field; raises CheckpointError for a missing shard."""
    # A file that was given alone may be a link with a name of its own.
    paths = {path.name: path for path in source.stamps}
    heads: dict[str, int] = {}
    for entry in () if source.container.indexed else source.entries.values():
        heads[entry.file.name] = min(entry.begin, heads.get(entry.file.name, entry.begin))
    for name in source.shards:
        # A file without tensors says where others lie, all of it.
        whole = None if source.container.indexed else heads.get(name, MAX_BYTES)
        size, digest = header_digest(paths.get(name, source.root / name), whole)
        yield f"{SHARD}{name}", f"{size} bytes, header {digest}"


def _codes(reader: RowReader) -> str:
    """Return the scheme, layout and dtype under which codes are decoded."""
    layer = reader.layer
    return "" if layer is None else f"{layer.weight} {layer.layer.layout} {layer.dtype}"


def require_same(now: Mapping[str, str], then: Mapping[str, str], *, what: str, remedy: str) -> None:
    """Raise CheckpointError for the first field in which two identities differ.

    The error has both values. what: what ``then`` is the identity of.
    """
    for field in (*now, *then):
        if now.get(field) != then.get(field):
            values = [printable(fields.get(field, "absent")) for fields in (then, now)]
            raise CheckpointError(
                f"{what} differs in {printable(field)}: it has {values[0]}, now {values[1]}; {remedy}"
            )


def stamps(plan: CheckpointPlan) -> dict[str, str]:
    """Return each source file's stamp, by name, which reveals changed bytes."""
    source = plan.source
    found = {path.name: state for path, state in source.stamps.items() if path.name in source.shards}
    for path in plan.companions:
        found[str(path)] = stamp(source.root / path)
    # Without the device, whose number a network file system may choose anew at each mount.
    return {
        name: f"{s.size} {s.mtime_ns} {s.ctime_ns} {s.inode} {s.identity}".strip()
        for name, s in found.items()
    }


def header_digest(path: Place, length: int | None = None) -> tuple[int, str]:
    """Return the size and the header's SHA-256 of a weights file.

    length: bytes of the head; without it, the file begins with the length of the rest, as safetensors has it.
    """
    with opened(path) as file:
        size, head = file.stamp.size, read_bytes(file, 0, min(8, file.stamp.size))
        # A length that the file does not have means that it was replaced since it was opened.
        rest = int.from_bytes(head, "little") if length is None else max(0, length - 8)
        text = read_bytes(file, len(head), min(rest, max(0, size - 8)))
    return size, hashlib.sha256(head + text).hexdigest()


def _digest(parts: Iterable[str | bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part)
    return total.hexdigest()
