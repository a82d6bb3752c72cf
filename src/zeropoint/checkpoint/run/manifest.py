"""The manifest of an output: hashes, identity and errors.

``zeropoint_manifest.json`` is one JSON object:

    format     version of this layout, 1
    zeropoint  version that wrote the files
    identity   what was made of what: field to text or digest, as a resumed run compares them
    files      name to {"size", "header"}: bytes, and SHA-256 of the header with its length, of a shard; name
               to {"size", "parts"} of any other file but the manifest itself
    tensors    name to {"file", "parts"}
    weights    quantized module to what quantization did to it, and its method, or the rule that searched its
               scales, unless that is nearest; of those solved on data "loss", the share of outputs that they
               are off by, and "outputs", see Loss and OutputError; "group" where fit chose a smaller one
    kept       name of a tensor that is not quantized to the reason
    sha256     SHA-256 of all text before this key

A part is [first byte in the file, bytes, SHA-256]; the parts of a tensor cover it in order. Which parts there
are depends on the plan alone, so a resumed run has the same manifest as any other.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ...codecs.containers import CONTAINERS
from ...columns import ordered
from ...methods import NEAREST, Loss
from ...schemes.scale_rules import SIGNED, Search
from ...schemes.smaller_groups import group_of
from ..measure.tensor_error import TensorError, finite_number
from ..plan.checkpoint_plan import CheckpointPlan
from ..plan.config_and_index import MANIFEST
from ..plan.identity import VERSION
from ..plan.texts import Text
from ..read.source import INDEX_SUFFIX
from .unit_results import UnitResult
from .units import Units

FORMAT = 1


def manifest(
    plan: CheckpointPlan, identity: Mapping[str, str], all_units: Units, done: Mapping[int, UnitResult]
) -> Text:
    """Return the manifest text of a run with all units ``done``."""
    return Text.made(lambda: _sealed(_pieces(plan, identity, all_units, done)))


def last_files(
    plan: CheckpointPlan, made_of: Mapping[str, str], all_units: Units, done: Mapping[int, UnitResult]
) -> dict[str, Text]:
    """Return the closing files by name, the commit file last."""
    ends = (INDEX_SUFFIX, CONTAINERS[plan.codec.container].suffix)
    index = next((name for name in plan.texts if name.endswith(ends)), None)
    texts = {MANIFEST: manifest(plan, made_of, all_units, done)}
    texts |= {name: text for name, text in plan.texts.items() if name != index}
    return texts if index is None else {**texts, index: plan.texts[index]}


def _sealed(pieces: Iterable[str]) -> Iterator[str]:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece.encode())
        yield piece
    yield f'"sha256": "{digest.hexdigest()}"\n}}\n'


def _pieces(
    plan: CheckpointPlan, identity: Mapping[str, str], all_units: Units, done: Mapping[int, UnitResult]
) -> Iterator[str]:
    yield f'{{\n"format": {FORMAT},\n"zeropoint": {json.dumps(VERSION)},\n'
    yield from _section("identity", sorted(identity.items()))
    files: dict[str, Any] = {
        shard.name: {"size": shard.size, "header": shard.head.sha256} for shard in plan.shards
    }
    for number, (path, size) in enumerate(plan.companions.items(), len(plan.outputs.all)):
        files[str(path)] = {"size": size, "parts": _parts(all_units, done, number, tensor=str(path))}
    for name, text in plan.texts.items():
        files[name] = {"size": text.size, "parts": [[0, text.size, text.sha256]]}
    yield from _section("files", sorted(files.items()))
    yield from _section("tensors", _tensors(plan, all_units, done))
    order = ordered(range(len(plan.weights)), plan.outputs.module)
    fitted = {d.entry.name for d in plan.decisions if d.fitted}

    def about(number: int) -> dict[str, Any]:
        weight = plan.weights[number]
        group = {"group": group_of(weight.layer.weight)} if weight.source.name in fitted else {}
        return {**_about(plan, number, all_units, done), **group}

    found = ((plan.weights[n].module, about(n)) for n in order)
    earlier = () if plan.earlier is None else map(json.loads, plan.earlier.lines())
    yield from _section("weights", itertools.chain(earlier, found))
    yield from _section("kept", _kept(plan))


def _kept(plan: CheckpointPlan) -> Iterator[tuple[str, str]]:
    """Yield the reason for each tensor that is not quantized, by name."""
    reasons = {d.entry.name: d.reason for d in plan.decisions if not d.quantized}
    found = ((tensor.module, reasons.get(tensor.source.name)) for tensor in (*plan.kept, *plan.restored))
    yield from sorted((name, reason) for name, reason in found if reason is not None)


def _about(
    plan: CheckpointPlan, number: int, all_units: Units, done: Mapping[int, UnitResult]
) -> dict[str, Any]:
    weight = plan.weights[number]
    layer = weight.layer
    rule = layer.weight.scales[0].rule if layer.weight.scales else None
    # Rules that compare errors clip, as methods do, and so do signed scales, of which some files do not tell.
    clips = isinstance(rule, Search) or (rule == SIGNED and layer.codec.negative_scales)
    chosen = rule.text if rule is not None and clips and weight.method == NEAREST else weight.method
    method = {} if chosen == NEAREST else {"method": chosen}
    solved = plan.solved.get(weight.module)
    loss = {} if solved is None else {"loss": _of_loss(solved.loss)}
    known = None if solved is None else solved.loss.outputs
    outputs = {} if known is None else {"outputs": asdict(known)}
    return {**_statistics(error_of(number, all_units, done)), **method, **loss, **outputs}


def _of_loss(loss: Loss) -> dict[str, Any]:
    return {"seen": loss.seen, "held_out": loss.held_out, "vectors": loss.vectors, "own": loss.own}


def error_of(weight: int, all_units: Units, done: Mapping[int, UnitResult]) -> TensorError:
    """Return the error of a weight, by number, over its units."""
    errors = (done[number].error for number in all_units.of_weight(weight))
    return TensorError.merge(error for error in errors if error is not None)


def _tensors(
    plan: CheckpointPlan, all_units: Units, done: Mapping[int, UnitResult]
) -> Iterator[tuple[str, Any]]:
    """Yield what is said of each output tensor, by name."""
    for at, tensor in enumerate(plan.outputs.by_name):
        parts = _parts(all_units, done, plan.outputs.owner(at), tensor=tensor.name)
        yield tensor.name, {"file": tensor.shard, "parts": parts}


def _parts(all_units: Units, done: Mapping[int, UnitResult], number: int, *, tensor: str) -> list[list[Any]]:
    """Return the parts of a tensor or plain file by unit."""
    return [
        [span.begin, span.size, digest]
        for unit in all_units.of(number)
        for span, digest in zip(all_units[unit].spans, done[unit].digests, strict=True)
        if span.tensor == tensor
    ]


def _section(name: str, members: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Yield a member of the manifest, one entry per line."""
    yield f"{json.dumps(name)}: {{\n"
    comma = ""
    for key, value in members:
        yield f"{comma}{json.dumps(key)}: {json.dumps(value, allow_nan=False)}"
        comma = ",\n"
    yield "\n},\n"


def _statistics(error: TensorError) -> dict[str, Any]:
    return {
        "values": error.values,
        "relative": finite_number(error.relative),
        "sqnr_db": finite_number(error.sqnr_db),
        "largest": finite_number(error.largest),
        "clipped": error.clipped,
        "zero_blocks": error.zero_blocks,
        "lost_blocks": error.lost_blocks,
    }
