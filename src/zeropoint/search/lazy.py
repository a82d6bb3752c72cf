"""Names that budgets and data need, imported on first use (PEP 562).

They load models, graphs and measures of quality, a third of the package, which a plain quantization does
without.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..checkpoint.model.calibration import calibrated as calibrated
    from ..checkpoint.model.calibration import mean_squares as mean_squares
    from ..checkpoint.model.calibration import require_text as require_text
    from ..checkpoint.model.forward_pass import compared as compared
    from ..checkpoint.model.graph_export import exported_graph as exported_graph
    from ..checkpoint.model.importance import mean_squares_of_file as mean_squares_of_file
    from ..checkpoint.model.importance import takes_importance as takes_importance
    from ..checkpoint.model.importance import with_importance as with_importance
    from ..checkpoint.model.running_model import tokens_digest_of as tokens_digest_of
    from ..checkpoint.model.saved_solving import solved_from as solved_from
    from ..checkpoint.model.saved_solving import with_mean_squares as with_mean_squares
    from ..checkpoint.model.solved_weights import folder_for as folder_for
    from ..checkpoint.model.solved_weights import in_order as in_order
    from ..checkpoint.model.solved_weights import solved as solved
    from ..checkpoint.model.statistics_file import SavedStatistics as SavedStatistics
    from .evolution import by_evolution as by_evolution
    from .weighing import weigh_by as weigh_by

_OWNERS = {
    **dict.fromkeys(("calibrated", "mean_squares", "require_text"), "checkpoint.model.calibration"),
    "compared": "checkpoint.model.forward_pass",
    "exported_graph": "checkpoint.model.graph_export",
    **dict.fromkeys(
        ("mean_squares_of_file", "takes_importance", "with_importance"), "checkpoint.model.importance"
    ),
    "tokens_digest_of": "checkpoint.model.running_model",
    **dict.fromkeys(("solved_from", "with_mean_squares"), "checkpoint.model.saved_solving"),
    **dict.fromkeys(("folder_for", "in_order", "solved"), "checkpoint.model.solved_weights"),
    "SavedStatistics": "checkpoint.model.statistics_file",
    "by_evolution": "search.evolution",
    "weigh_by": "search.weighing",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Return a name of the modules above; keep it."""
        if name not in _OWNERS:
            raise AttributeError(name)
        value = globals()[name] = getattr(import_module(f"..{_OWNERS[name]}", __package__), name)
        return value
