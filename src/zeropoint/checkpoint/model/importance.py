"""Importance matrices of llama.cpp as input statistics of layers.

Its names are llama.cpp's, ``blk.0.attn_q.weight``, which are matched with the names of transformers, or
the checkpoint's own. llama.cpp permutes rows of some weights; importance is of columns, in their order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from ...codecs.model_format import WEIGHTED
from ...codecs.stored_forms import OMITTED, StoredForm
from ...errors import CalibrationError, near_misses, option, printable
from ...methods import method_named
from ...methods.rotate import of_rotated
from ...stats import MeanSquare, Statistics
from ..plan.checkpoint_plan import CheckpointPlan, make_plan
from ..plan.limits import BASE_MEMORY
from ..plan.output_tensors import Output
from ..read.imatrix_file import Floats, read_imatrix
from ..read.storage import shown

NEED = "mean_square"
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
_BLOCK = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")
_OUTSIDE = {"lm_head": "output.weight", "model.embed_tokens": "token_embd.weight"}


def name_in_llama_cpp(module: str) -> str | None:
    """Return llama.cpp's name of a module's weight, or None if unknown.

    >>> name_in_llama_cpp("model.layers.3.mlp.down_proj")
    'blk.3.ffn_down.weight'
    """
    match = _BLOCK.fullmatch(module)
    if match is None:
        return _OUTSIDE.get(module)
    part = _PARTS.get(match[2])
    return None if part is None else f"blk.{match[1]}.{part}.weight"


def with_importance(plan: CheckpointPlan, path: Path | str) -> tuple[CheckpointPlan, list[str]]:
    """Return ``plan`` with the importance in a file, and modules without any.

    path: an importance matrix of llama.cpp. A mixture is planned anew, as it is with importance. Raises
    CheckpointError where it is none, CalibrationError where no method of the plan takes importance, no weight
    of it is named, for one of another width, and where the plan rotates the model.
    """
    plan = weighted(plan)
    wanted = [weight for weight in plan.weights if takes_importance(weight.method)]
    if not wanted:
        raise CalibrationError(
            f"no method of this plan takes an importance matrix; use {option('method', 'ggml')}, or "
            "leave it out"
        )
    if plan.rotation is not None:
        raise CalibrationError(of_rotated(plan.rotation, "imatrix"))
    statistics, missing = mean_squares_of_file(path, ((plan, weight) for weight in wanted))
    return replace(plan, statistics=statistics), missing


def mean_squares_of_file(
    path: Path | str, weights: Iterable[tuple[CheckpointPlan, Output]]
) -> tuple[dict[str, dict[str, Statistics]], list[str]]:
    """Return the mean squares in an importance matrix, and modules without any.

    weights: at least one, each with a plan that writes it. Raises CheckpointError for a file that is none,
    CalibrationError where no weight is named and for one of another width.
    """
    found, wanted = read_imatrix(Path(path)), list(weights)
    statistics, missing = {}, []
    for plan, weight in wanted:
        stored = _stored_form(plan, weight)
        values = importance_in(found, weight.module, weight.shape[-1], Path(path), stored)
        if values is None:
            missing.append(weight.module)
            continue
        statistics[weight.module] = {NEED: _statistics(values, weight.module)}
    if not statistics:
        first = missing[0]
        raise CalibrationError(
            f"{shown(Path(path))} names no weight of this checkpoint, such as {printable(first)}; "
            f"{near_misses(name_in_llama_cpp(first) or first, found)}"
        )
    return statistics, missing


def takes_importance(method: str) -> bool:
    """Return whether a method weighs errors by mean squares of inputs."""
    return NEED in method_named(method).takes


def importance_in(
    found: Mapping[str, Floats], module: str, columns: int, path: Path | str, stored: StoredForm | None = None
) -> Floats | None:
    """Return the importance of a module's inputs, (columns,), or None.

    found: of the file at ``path``. stored: llama.cpp's name of the weight, where it is known, and which of
    several it is under that name. Raises CalibrationError for numbers of a layer of another width.
    """
    own = None if stored is None else stored.name
    names = own or name_in_llama_cpp(module) or module, f"{module}.weight", module
    values = next((found[name] for name in names if name in found), None)
    at, count = (0, 1) if stored is None or stored.part is None else stored.part
    if values is not None and len(values) == count * columns:
        values = values[at * columns : (at + 1) * columns]
    if values is not None and len(values) != columns:
        raise CalibrationError(
            f"{printable(module)} has {columns} inputs, and {shown(Path(path))} has {len(values)} numbers "
            "for it; use the file of this model"
        )
    if values is not None and stored is not None and stored.columns is not None:
        ordered: Floats = values[stored.columns.file_rows(torch.arange(columns)).numpy()]
        return ordered
    return values


def weighted(plan: CheckpointPlan) -> CheckpointPlan:
    """Return ``plan`` with the importance-matrix variant of its mixture, if any."""
    mixture = plan.recipe.mixture(plan.codec)
    if mixture is None or mixture.endswith(WEIGHTED):
        return plan
    limits = replace(plan.limits, base_memory=BASE_MEMORY)
    return make_plan(
        plan.source, plan.recipe.weighted(), selection=plan.selection, limits=limits, codec=plan.codec
    )


def _stored_form(plan: CheckpointPlan, weight: Output) -> StoredForm | None:
    """Return the form of a weight in the output files of llama.cpp."""
    name, config = f"{weight.module}.weight", plan.source.config or {}
    form = plan.codec.model_format.stored_form(name, weight.shape, config)
    return None if form is OMITTED else form


def _statistics(values: Floats, name: str) -> Statistics:
    """Return statistics whose mean is ``values``: llama.cpp has divided already."""
    state = {
        "squares": torch.from_numpy(values).double(),
        "vectors": torch.tensor(1),
        "seen": torch.tensor(len(values)),
        "left_out": torch.tensor(0),
    }
    return Statistics(accumulator=MeanSquare(features=len(values)), state=state, name=name)
