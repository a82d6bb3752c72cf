"""The manifest of an output: what every byte of it hashes to, what it was made of, and how far off it is.

``zeropoint_manifest.json`` is one JSON object:

    format     version of this layout, 1
    zeropoint  version that wrote the files
    identity   what was made of what: field to text or digest, as a resumed run compares them
    files      name to {"size", "header"}: bytes, and SHA-256 of the header with its length, of a shard; name
               to {"size", "parts"} of any other file but the manifest itself
    tensors    name to {"file", "parts"}
    weights    quantized module to what quantization did to it
    sha256     SHA-256 of all text before this key

A part is [first byte in the file, bytes, SHA-256]; the parts of a tensor cover it in order. Which parts there
are depends on the plan alone, so the manifest of a resumed run is that of any other.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from .identity import VERSION
from .measure import TensorError
from .plan import Plan
from .units import Rows, Unit
from .work import Done

FORMAT = 1


def manifest(plan: Plan, identity: Mapping[str, str], units: Sequence[Unit], done: Mapping[int, Done]) -> str:
    """Return the text of the manifest of a run all of whose ``units`` are ``done``."""
    parts: dict[tuple[str, str | None], list[list[Any]]] = {}
    for unit in units:
        for span, digest in zip(unit.spans, done[unit.number].digests, strict=True):
            parts.setdefault((span.file, span.tensor), []).append([span.begin, span.size, digest])
    files: dict[str, Any] = {
        shard.name: {"size": shard.size, "header": hashlib.sha256(shard.header).hexdigest()}
        for shard in plan.shards
    }
    for path, size in plan.companions.items():
        files[str(path)] = {"size": size, "parts": parts.get((str(path), None), [])}
    for name, text in plan.texts.items():
        data = text.encode("utf-8")
        files[name] = {"size": len(data), "parts": [[0, len(data), hashlib.sha256(data).hexdigest()]]}
    placed = [p for weight in plan.weights for p in weight.outputs]
    placed += [*(kept.placed for kept in plan.kept), *(restored.placed for restored in plan.restored)]
    tensors = {p.name: {"file": p.shard, "parts": parts.get((p.shard, p.name), [])} for p in placed}
    weights = {name: _statistics(error) for name, error in errors(units, done).items()}
    sections: dict[str, Mapping[str, Any]] = {
        "identity": identity,
        "files": files,
        "tensors": tensors,
        "weights": weights,
    }
    body = ",\n".join(_section(name, table) for name, table in sections.items())
    text = f'{{\n"format": {FORMAT},\n"zeropoint": {json.dumps(VERSION)},\n{body},\n'
    return f'{text}"sha256": "{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n'


def errors(units: Sequence[Unit], done: Mapping[int, Done]) -> dict[str, TensorError]:
    """Return the error of each weight by module, in the order of the units."""
    found: dict[str, list[TensorError]] = {}
    for unit in units:
        error = done[unit.number].error
        if isinstance(unit, Rows) and error is not None:
            found.setdefault(unit.weight.module, []).append(error)
    return {module: TensorError.merge(parts) for module, parts in found.items()}


def _section(name: str, table: Mapping[str, Any]) -> str:
    """Return a member of the object, a line an entry, so that two manifests can be compared by line."""
    lines = [f"{json.dumps(key)}: {json.dumps(table[key], allow_nan=False)}" for key in sorted(table)]
    return f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}"


def _statistics(error: TensorError) -> dict[str, Any]:
    return {
        "values": error.values, "relative": _number(error.relative), "sqnr_db": _number(error.sqnr_db),
        "largest": _number(error.largest), "clipped": error.clipped, "zero_blocks": error.zero_blocks,
        "lost_blocks": error.lost_blocks,
    }  # fmt: skip


def _number(value: float) -> float | None:
    """Return a number that JSON holds; infinities become null."""
    return value if math.isfinite(value) else None
