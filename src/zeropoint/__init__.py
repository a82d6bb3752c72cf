"""zeropoint: few-bit numbers in PyTorch, exact and at memory speed."""

import itertools
import sys
from importlib import import_module
from pathlib import PurePath
from typing import TYPE_CHECKING

from .deferred_names import imported
from .errors import (
    CalibrationError,
    CheckpointError,
    DtypeError,
    FormatError,
    NonFiniteError,
    OptionError,
    RangeError,
    RecipeError,
    SchemeError,
    ShapeError,
    UnsupportedError,
    ZeropointError,
)
from .names_elsewhere import elsewhere

if TYPE_CHECKING:
    from .checkpoint.model.loading import load_checkpoint
    from .checkpoint.model.saving import save_checkpoint
    from .checkpoint.model_verbs import add_kv_scales, distill_checkpoint, gather_statistics
    from .checkpoint.verbs import (
        compare_checkpoints,
        convert_checkpoint,
        dequantize_checkpoint,
        plan_checkpoint,
        rotate_checkpoint,
        verify_checkpoint,
    )
    from .checkpoint.verify.inspection import inspect_checkpoint
    from .eval import evaluate_checkpoint
    from .formats import CodebookFormat, FloatFormat, IntFormat, Specials, format_name, get_format
    from .functional import choose_params, dequantize, explain, fake_quantize
    from .layout.packing import pack, unpack
    from .methods.of_tensors import quantize
    from .methods.scheme_comparison import compare
    from .models import calibrate, convert, dequantize_model, fold, prepare, quantize_model
    from .ops.library import only_backend
    from .params import QuantizationParams
    from .prepared import Plan, can_implement, plan
    from .report.page import report_checkpoint
    from .schemes import Granularity, Scheme
    from .search.pipelines import quantize_pipeline
    from .search.under_budget import quantize_checkpoint, search_checkpoint
    from .tensor import QuantizedTensor
    from .training import FakeQuantize

__version__ = "0.1.0"

__all__ = [
    "CalibrationError",
    "CheckpointError",
    "CodebookFormat",
    "DtypeError",
    "FakeQuantize",
    "FloatFormat",
    "FormatError",
    "Granularity",
    "IntFormat",
    "NonFiniteError",
    "OptionError",
    "Plan",
    "QuantizationParams",
    "QuantizedTensor",
    "RangeError",
    "RecipeError",
    "Scheme",
    "SchemeError",
    "ShapeError",
    "Specials",
    "UnsupportedError",
    "ZeropointError",
    "__version__",
    "add_kv_scales",
    "calibrate",
    "can_implement",
    "choose_params",
    "compare",
    "compare_checkpoints",
    "convert",
    "convert_checkpoint",
    "dequantize",
    "dequantize_checkpoint",
    "dequantize_model",
    "distill_checkpoint",
    "evaluate_checkpoint",
    "explain",
    "fake_quantize",
    "fold",
    "format_name",
    "gather_statistics",
    "get_format",
    "inspect_checkpoint",
    "load_checkpoint",
    "only_backend",
    "pack",
    "plan",
    "plan_checkpoint",
    "prepare",
    "quantize",
    "quantize_checkpoint",
    "quantize_model",
    "quantize_pipeline",
    "report_checkpoint",
    "rotate_checkpoint",
    "save_checkpoint",
    "search_checkpoint",
    "unpack",
    "verify_checkpoint",
]

_PARTS = frozenset((
    "checkpoint", "codecs", "eval", "export", "formats", "functional", "layout", "models", "ops", "params",
    "patterns", "prepared", "recipes", "schemes", "search", "stats", "tensor", "training",
))  # fmt: skip


if not TYPE_CHECKING:  # type checkers would take any name for one of the package

    def __getattr__(name: str) -> object:
        """Return a public name or part, imported on first use."""
        if name in _PARTS:
            return import_module(f".{name}", __name__)
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{elsewhere(name)}")
        return imported(__name__, name)

    def __dir__() -> list[str]:
        return sorted({*__all__, "models", "prepared", "recipes", "stats", "training"})


def _is_command() -> bool:
    """Return whether this process is the command, which starts without torch."""
    by_module = ("-m", __name__) in itertools.pairwise(sys.orig_argv)
    return by_module or PurePath(sys.argv[0]).stem == __name__


if not _is_command():
    # Exported programs name our operators: they must be there before one is loaded.
    import_module(".ops.library", __name__)
