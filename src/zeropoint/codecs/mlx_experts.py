"""Stacked experts in files of mlx-lm, one tensor per projection.

For E experts (X is ``model.layers.0.mlp``, or ``model.layers.0.block_sparse_moe`` with w1, w3 and w2):

    X.experts.{e}.gate_proj.weight (N, K)  ->  X.switch_mlp.gate_proj.weight [E, N, ...]

and so of ``up_proj`` and ``down_proj``, ``scales``, ``biases`` and ``bias``; one matrix lies after the other.
``global_scale`` [E] has the scale of each expert in NVFP4, with which it is not read.

Source: mlx-lm 0.32.2 (models/switch_layers.py, and ``sanitize`` of models/mixtral.py and qwen3_moe.py). This
module opens no file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..architectures import MOST_EXPERTS, Config, model_type
from ..errors import CheckpointError, printable
from .model_format import ModelFormat
from .stored_forms import StoredForm

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_SHORT = dict(zip(_PROJECTIONS, ("w1", "w3", "w2"), strict=True))
_BLOCK = "block_sparse_moe"
"""The module under which transformers calls the projections of experts w1, w3 and w2."""
_AXES = {"weight": 3, "scales": 3, "biases": 3, "bias": 2, "global_scale": 1}
_OF_MODEL = re.compile(
    r"(?P<stem>(?:.*\.)?(?P<block>[^.]+))\.experts\.(?P<n>\d+)\."
    r"(?P<projection>gate_proj|up_proj|down_proj|w1|w2|w3)(?P<part>\.(?:weight|scales|biases|bias))?"
)
_OF_FILE = re.compile(
    r"(?P<stem>(?:.*\.)?(?P<block>[^.]+))\.switch_mlp\.(?P<projection>gate_proj|up_proj|down_proj)"
    r"\.(?P<part>weight|scales|biases|bias|global_scale)"
)
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NUM_EXPERTS = frozenset(("qwen2_moe", "qwen3_moe", "olmoe"))
"""Families whose experts mlx-lm counts by ``num_experts``, where transformers 5 may write the other name."""
"""More experts than a layer has: a file that says so is damaged."""


def stacked(name: str) -> tuple[str, int] | None:
    """Return the stacked tensor of an expert, and its number; or None.

    name: of a tensor, or of a module, of the model.

    >>> stacked("model.layers.0.block_sparse_moe.experts.3.w2")
    ('model.layers.0.block_sparse_moe.switch_mlp.down_proj', 3)
    """
    found = _OF_MODEL.fullmatch(name) if ".experts." in name else None
    if found is None:
        return None
    known = {_SHORT[long]: long for long in _PROJECTIONS} if found["block"] == _BLOCK else {}
    projection = known.get(found["projection"], found["projection"])
    if projection not in _PROJECTIONS:
        return None
    return f"{found['stem']}.switch_mlp.{projection}{found['part'] or ''}", int(found["n"])


def expert_count(config: Config) -> int | None:
    """Return the configured number of experts per layer, or None."""
    inner = config.get("text_config")
    tables = (config, inner if isinstance(inner, dict) else {})
    found = next((table[key] for table in tables for key in _COUNTS if table.get(key) is not None), None)
    return found if type(found) is int and 0 < found <= MOST_EXPERTS else None


class MlxFormat(ModelFormat):
    """See the module and :class:`ModelFormat`."""

    stack = ".switch_mlp."

    def stored_form(self, name: str, shape: tuple[int, ...], config: Config) -> StoredForm | None:
        """See :class:`ModelFormat`; raises CheckpointError for an expert that the configuration lacks."""
        found = stacked(name)
        if found is None:
            return None
        stored, expert = found
        count = expert_count(config)
        if count is None or expert >= count:
            raise CheckpointError(
                f"{printable(name)} is one of an expert, but config.json says of their number "
                f"{count or 'nothing'} ({', '.join(_COUNTS)}); correct config.json"
            )
        return StoredForm(stored, part=(expert, count))

    def config_values(self, config: Config) -> Mapping[str, Any]:
        """See :class:`ModelFormat`: what transformers 5 calls otherwise."""
        found = _rotary(config)
        count = expert_count(config)
        if count is not None and "num_local_experts" in config and model_type(config) in _NUM_EXPERTS:
            found["num_experts"] = count
        return {key: value for key, value in found.items() if key not in config}

    def parts(self, name: str, shape: tuple[int, ...]) -> Sequence[tuple[str, StoredForm]]:
        found = _OF_FILE.fullmatch(name)
        if found is None or len(shape) != _AXES[found["part"]] or 0 in shape or shape[0] > MOST_EXPERTS:
            return ()
        projection, count = found["projection"], shape[0]
        own = _SHORT[projection] if found["block"] == _BLOCK else projection
        return [
            (
                f"{found['stem']}.experts.{expert}.{own}.{found['part']}",
                StoredForm(name, part=(expert, count)),
            )
            for expert in range(count)
        ]


def _rotary(config: Config) -> dict[str, Any]:
    """Return ``rope_parameters`` under the names of mlx-lm 0.32."""
    found = config.get("rope_parameters")
    if not isinstance(found, Mapping) or "rope_theta" not in found:
        return {}
    said: dict[str, Any] = {"rope_theta": found["rope_theta"]}
    if found.get("rope_type", "default") != "default":
        said["rope_scaling"] = {key: value for key, value in found.items() if key != "rope_theta"}
    return said
