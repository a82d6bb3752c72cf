"""Names that budgets and data need, imported on first use (PEP 562).

They load models, graphs and measures of quality, which a plain quantization does without: a third of the time
that all imports take.
"""

from typing import TYPE_CHECKING

from ..deferred_names import imported

if TYPE_CHECKING:
    from ..checkpoint.model.cache_scales import require_keys as require_keys
    from ..checkpoint.model.calibration import calibrated as calibrated
    from ..checkpoint.model.calibration import mean_squares as mean_squares
    from ..checkpoint.model.calibration import require_text as require_text
    from ..checkpoint.model.graph_export import exported_graph as exported_graph
    from ..checkpoint.model.importance import mean_squares_of_file as mean_squares_of_file
    from ..checkpoint.model.importance import takes_importance as takes_importance
    from ..checkpoint.model.statistics_file import SavedStatistics as SavedStatistics
    from .evolution import by_evolution as by_evolution
    from .solving_runs import written_by_data as written_by_data
    from .weighing import weigh_by as weigh_by

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        return imported(__name__, name)
