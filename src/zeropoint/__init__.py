"""zeropoint: few-bit numbers in PyTorch, exact and at memory speed."""

import itertools
import sys
from importlib import import_module
from pathlib import PurePath
from typing import TYPE_CHECKING

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

_OWNERS = {
    **dict.fromkeys(
        ("CodebookFormat", "FloatFormat", "IntFormat", "Specials", "format_name", "get_format"), "formats"
    ),
    **dict.fromkeys(("choose_params", "dequantize", "explain", "fake_quantize"), "functional"),
    **dict.fromkeys(("pack", "unpack"), "layout.packing"),
    **dict.fromkeys(
        ("calibrate", "convert", "dequantize_model", "fold", "prepare", "quantize_model"), "models"
    ),
    **dict.fromkeys(("Plan", "can_implement", "plan"), "prepared"),
    **dict.fromkeys(("Granularity", "Scheme"), "schemes"),
    **dict.fromkeys(("add_kv_scales", "distill_checkpoint", "gather_statistics"), "checkpoint.model_verbs"),
    **dict.fromkeys(
        (
            "compare_checkpoints",
            "convert_checkpoint",
            "dequantize_checkpoint",
            "plan_checkpoint",
            "rotate_checkpoint",
            "verify_checkpoint",
        ),
        "checkpoint.verbs",
    ),
    "FakeQuantize": "training",
    "evaluate_checkpoint": "eval",
    "inspect_checkpoint": "checkpoint.verify.inspection",
    "QuantizationParams": "params",
    "QuantizedTensor": "tensor",
    "only_backend": "ops.library",
    "compare": "methods.scheme_comparison",
    "quantize": "methods.of_tensors",
    "report_checkpoint": "report.page",
    "quantize_pipeline": "search.pipelines",
    **dict.fromkeys(("quantize_checkpoint", "search_checkpoint"), "search.under_budget"),
    "load_checkpoint": "checkpoint.model.loading",
    "save_checkpoint": "checkpoint.model.saving",
}
"""Names and their owners, which are imported at the first use (PEP 562)."""
_PARTS = frozenset((
    "checkpoint", "codecs", "eval", "export", "formats", "functional", "layout", "models", "ops", "params",
    "patterns", "prepared", "recipes", "schemes", "search", "stats", "tensor", "training",
))  # fmt: skip


if not TYPE_CHECKING:  # type checkers would take any name for one of the package

    def __getattr__(name: str) -> object:
        """Return a public name or part, imported on first use."""
        if name in _PARTS:
            return import_module(f".{name}", __name__)
        if name not in _OWNERS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{elsewhere(name)}")
        value = globals()[name] = getattr(import_module(f".{_OWNERS[name]}", __name__), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*__all__, "models", "prepared", "recipes", "stats", "training"})


def _is_command() -> bool:
    """Return whether this process is the command, which starts without torch."""
    by_module = ("-m", __name__) in itertools.pairwise(sys.orig_argv)
    return by_module or PurePath(sys.argv[0]).stem == __name__


if not _is_command():
    # Exported programs name our operators: they must be there before one is loaded.
    import_module(".ops.library", __name__)
