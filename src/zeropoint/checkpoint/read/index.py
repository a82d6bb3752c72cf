"""The index of a sharded checkpoint, and its agreement with the shards.

An index may name a million tensors, so it is read as a stream, as often as it is needed. No name of it
becomes a path before it is checked.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from zeropoint.checkpoint.read.file_names import is_plain
from zeropoint.checkpoint.read.json_stream import JsonStream
from zeropoint.checkpoint.read.object_store import Stamp
from zeropoint.checkpoint.read.problems import listed
from zeropoint.checkpoint.read.safetensors_file import Header, foreign_magic, pieces, unique_keys
from zeropoint.checkpoint.read.storage import Place, opened, read_bytes, shown
from zeropoint.checkpoint.read.tensor_entries import Entries
from zeropoint.errors import CheckpointError, printable

# As for two safetensors headers: the largest published index has about 10 MB.
MAX_INDEX_BYTES = 200_000_000
# Characters of what an index says of one tensor.
_MAX_VALUE = 1 << 16
NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d{1,9})-of-(?P<count>\d{1,9})\.safetensors", re.DOTALL)


def require_json(path: Place, *, limit: int) -> Stamp:
    """Return a JSON file's stamp; raises CheckpointError for larger or others."""
    with opened(path) as file:
        size = file.stamp.size
        foreign = foreign_magic(bytes(read_bytes(file, 0, min(size, 64))))
    if size > limit:
        rule = f"has {size} bytes, above the limit of {limit} for a JSON file"
        raise CheckpointError(f"{shown(path)} {rule}; check that it is the right file")
    if foreign is not None:
        what, remedy = foreign
        raise CheckpointError(f"{shown(path)} is not JSON but a {what}; {remedy}")
    return file.stamp


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _keys(stream: JsonStream) -> Iterator[str]:
    """Yield the keys of an object; what is none has none."""
    if stream.is_object:
        yield from stream.members()
    else:
        stream.value(_MAX_VALUE)


class IndexMap:
    """The weight_map of an index as a stream, and its total_size.

    It yields (tensor, shard). Raises CheckpointError, ValueError and RecursionError on the way.
    """

    def __init__(self, path: Place) -> None:
        self.path = path
        self.total_size: object = None

    def __iter__(self) -> Iterator[tuple[str, str]]:
        maps, names = 0, 0
        with opened(self.path) as file:
            stream = JsonStream(
                pieces(file, 0, file.stamp.size),
                object_pairs_hook=unique_keys,
                parse_constant=_refuse_constant,
            )
            for key in _keys(stream):
                if key != "weight_map" or not stream.is_object:
                    metadata = stream.value(_MAX_VALUE)
                    if key == "metadata" and isinstance(metadata, dict):
                        self.total_size = metadata.get("total_size")
                    continue
                maps += 1
                if maps > 1:
                    raise ValueError("'weight_map' appears twice in one object")
                for name in stream.members():
                    names += 1
                    yield name, self._shard(name, stream.value(_MAX_VALUE))
            stream.end()
        if not names:
            rule = "must be a JSON object whose weight_map names the shard of each tensor"
            raise CheckpointError(f"{shown(self.path)} {rule}; download it again")

    def _shard(self, name: str, shard: object) -> str:
        if not isinstance(shard, str):
            place = (
                f"{shown(self.path)}: weight_map says of tensor {printable(name)} a {type(shard).__name__}"
            )
            raise CheckpointError(f"{place}, but must name a shard; download it again")
        return shard


def read_index(path: Place) -> tuple[Stamp, set[str], object]:
    """Return an index's stamp, its checked shard names and its total_size."""
    stamp = require_json(path, limit=MAX_INDEX_BYTES)
    table = IndexMap(path)
    try:
        shards = {shard for _, shard in table}
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, a key that appears twice
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"{shown(path)} is not a valid index: {reason}; download it again") from error
    _check_names(path, sorted(shards))
    _check_numbering(path, sorted(shards))
    return stamp, shards, table.total_size


def _check_names(path: Place, shards: Sequence[str]) -> None:
    """Refuse shard names that lead out of the directory on any system."""
    bad = [printable(shard) for shard in shards if not is_plain(shard) or not shard.endswith(".safetensors")]
    if bad:
        raise CheckpointError(
            f"{shown(path)}: weight_map names {listed(bad)}, but a shard must be the plain name of a file "
            "in the same directory, which ends in .safetensors; do not trust this checkpoint, or correct the "
            "index"
        )


def _check_numbering(path: Place, shards: Sequence[str]) -> None:
    """Refuse shards named NUMBER-of-COUNT that are not COUNT numbers without a gap."""
    sets: dict[str, tuple[set[int], set[int]]] = {}
    for match in filter(None, map(NUMBERED.fullmatch, shards)):
        numbers, counts = sets.setdefault(match["stem"], (set(), set()))
        numbers.add(int(match["number"]))
        counts.add(int(match["count"]))
    for stem, (numbers, counts) in sets.items():
        count = max(counts)
        # Some exporters count from 0.
        if len(counts) > 1 or len(numbers) != count or max(numbers) - min(numbers) != count - 1:
            found = f"{listed(list(map(str, sorted(numbers))))} of {listed(list(map(str, sorted(counts))))}"
            raise CheckpointError(
                f"{shown(path)}: weight_map names of {printable(stem)} the shards {found}, but all {count} "
                "must be there under one count; download the index again"
            )


def check_index(path: Place, headers: Mapping[str, Header], entries: Entries) -> None:
    """Compare the index with shards; raises CheckpointError with every contradiction."""
    missing: Counter[str] = Counter()
    absent, moved, twice = [], [], []
    strangers: set[str] = set()
    named = bytearray(len(entries))
    for name, shard in IndexMap(path):
        number = entries.number(name)
        if shard not in headers:
            missing[shard] += 1
        if number is None:
            twice += [printable(name)] if name in strangers else []
            strangers.add(name)
            absent += [f"{printable(name)} (of {printable(shard)})"] if shard in headers else []
            continue
        if named[number]:
            twice.append(printable(name))
        named[number] = True
        lies = entries.at(number).file.name
        if lies != shard:
            moved.append(f"{printable(name)} lies in {printable(lies)}, not {printable(shard)}")
    extra = [
        f"{printable(entry.name)} (in {printable(entry.file.name)})"
        for entry in map(entries.at, (number for number, found in enumerate(named) if not found))
    ]
    shards = [f"{printable(shard)} ({count} tensors)" for shard, count in missing.items()]
    kinds = {
        "missing shards": shards,
        "missing tensors": absent,
        "tensors in another shard": moved,
        "tensors that the index does not name": extra,
        "tensors that the index names twice": twice,
    }
    problems = [f"{len(found)} {kind}: {listed(found)}" for kind, found in kinds.items() if found]
    if problems:
        rule = f"the index and its shards contradict each other: {'; '.join(problems)}"
        raise CheckpointError(f"{shown(path)}: {rule}; download the checkpoint again")
