"""Plan files, from which the same plan is made again.

It is never trusted to describe the source: the plan is made from its request, and refused where the identity
or any decision is another one. What limits say (memory, threads) changes no byte and is left out of that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...codecs.protocol import Codec
from ...codecs.registry import get_codec
from ...errors import CheckpointError, printable, size_of
from ...libraries import reading
from ...own_files import FileKind, OwnFile
from ...recipes.document import read_bounded
from ..read.source import Source
from ..read.storage import shown
from .checkpoint_plan import CheckpointPlan, make_plan
from .identity import OF_SOURCE, SHARD, identity, require_same
from .limits import Limits
from .plan_document import FORMAT, VERSION, plan_document, tensor_documents
from .recipe import RecipeText
from .selection import DequantizePolicy, Selection

_MAX_BYTES = 1 << 31
_PLAN = FileKind("plan", FORMAT.encode())
_AGAIN = "make the plan again"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A saved plan: the request, and the identity and decisions to reproduce."""

    path: Path
    recipe: RecipeText
    codec: Codec
    selection: Selection
    identity: Mapping[str, str]
    tensors: tuple[Mapping[str, Any], ...]

    @staticmethod
    def read(path: Path | str) -> PlanFile:
        """Return the plan in the file at ``path``.

        Raises CheckpointError when it cannot be read, is none, or was written by a newer zeropoint.
        """
        found = _json(Path(path))
        version = found.get(FORMAT)
        if version != VERSION:
            raise CheckpointError(
                f"{shown(path)} is not a plan that is read here: {FORMAT} is {version!r}, not {VERSION}; "
                "make it again with zeropoint plan --out"
            )
        with reading(f"{shown(path)} is a damaged plan", "make it again with zeropoint plan --out"):
            request = found["request"]
            return PlanFile(
                path=Path(path),
                recipe=RecipeText(**{key: _text(text) for key, text in request["recipe"].items()}),
                codec=get_codec(_text(request["format"])),
                selection=Selection(
                    include=tuple(map(_text, request["include"])),
                    ignore=tuple(map(_text, request["ignore"])),
                    strict=request["strict"] is True,
                    # Plans of earlier versions have neither.
                    fit=request.get("fit") is True,
                    kv_scales=request.get("kv_scales") is True,
                    dequantize=DequantizePolicy(request["dequantize"]),
                    floats=None if request["floats"] is None else _text(request["floats"]),
                ),
                identity=dict(found["identity"]),
                tensors=tuple(dict(tensor) for tensor in found["tensors"]),
            )

    def remake(self, source: Source, *, limits: Limits | None = None) -> CheckpointPlan:
        """Return the same plan for ``source``.

        Raises CheckpointError, naming the first field or tensor that differs, when the source, the
        configuration or the version is another one.
        """
        plan = make_plan(source, self.recipe, selection=self.selection, limits=limits, codec=self.codec)
        now = identity(plan)
        self._require_source(now)
        require_same(now, self.identity, what=f"plan {shown(self.path)}", remedy=_AGAIN)
        tensors = list(tensor_documents(plan))
        self._require("the number of tensors", len(self.tensors), len(tensors))
        for before, after in zip(self.tensors, tensors, strict=True):
            for key in after:
                self._require(f"{key} of tensor {printable(after['name'])}", before.get(key), after[key])
        return plan

    def _require_source(self, now: Mapping[str, str]) -> None:
        """Raise CheckpointError for a changed source, before digests of it are compared."""
        for field in {**self.identity, **now}:
            of_source = field in OF_SOURCE or field.startswith(SHARD)
            if of_source and self.identity.get(field) != now.get(field):
                raise CheckpointError(
                    f"the plan {shown(self.path)} was made for another model, or for this one before it was "
                    f"changed: {printable(field.removeprefix(SHARD))} differs; {_AGAIN}"
                )

    def _require(self, field: str, before: object, after: object) -> None:
        if before != after:
            raise CheckpointError(
                f"plan {shown(self.path)} differs in {field}: it has {printable(str(before))}, now "
                f"{printable(str(after))}; {_AGAIN}"
            )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is not a string")
    return value


def _json(path: Path) -> dict[str, Any]:
    try:
        raw = read_bounded(path, _MAX_BYTES)
        if len(raw) > _MAX_BYTES:
            raise CheckpointError(f"{shown(path)} has more than {size_of(_MAX_BYTES)}, the limit of a plan")
        found = json.loads(raw.decode("utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"plan {shown(path)} cannot be read: {error.strerror}; check the path"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{shown(path)} is not valid JSON: {error}; make it again") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{shown(path)} is not a plan but a JSON {type(found).__name__}; make it again")
    return found


def write_plan(plan: CheckpointPlan, path: Path) -> None:
    """Write a plan to a new file; raises CheckpointError where impossible."""
    text = json.dumps(plan_document(plan), indent=1, allow_nan=False) + "\n"
    OwnFile(path, _PLAN, plan.source.places).write([text.encode("utf-8")], overwrite=False)
