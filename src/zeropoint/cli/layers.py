"""The layers below, imported when a command first asks for one of their names (PEP 562).

They import torch, which takes a second or more; help, the version, completion and mistakes of the command
line need none of it. Commands say ``layers.make_plan(...)``.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING

from .signals import ending_at_once

if TYPE_CHECKING:
    from rich.console import Console as Console
    from rich.progress import BarColumn as BarColumn
    from rich.progress import Progress as Progress
    from rich.progress import SpinnerColumn as SpinnerColumn
    from rich.progress import TextColumn as TextColumn
    from rich.progress import TimeElapsedColumn as TimeElapsedColumn

    from ..checkpoint.choose.recipe import KEEP as KEEP
    from ..checkpoint.choose.recipe import RecipeText as RecipeText
    from ..checkpoint.choose.selection import FLOATS as FLOATS
    from ..checkpoint.choose.selection import DequantizePolicy as DequantizePolicy
    from ..checkpoint.choose.selection import Selection as Selection
    from ..checkpoint.cluster.ray import RayExecutor as RayExecutor
    from ..checkpoint.model.cache_scales import with_cache_scales as with_cache_scales
    from ..checkpoint.model.calibration import calibrated as calibrated
    from ..checkpoint.model.importance import with_importance as with_importance
    from ..checkpoint.plan.checkpoint_plan import conversion_plan as conversion_plan
    from ..checkpoint.plan.checkpoint_plan import make_plan as make_plan
    from ..checkpoint.plan.file import PlanFile as PlanFile
    from ..checkpoint.plan.file import write_plan as write_plan
    from ..checkpoint.plan.limits import Limits as Limits
    from ..checkpoint.plan.rotation_plan import Rotations as Rotations
    from ..checkpoint.plan.rotation_plan import rotation_plan as rotation_plan
    from ..checkpoint.plan.verdicts import require_loadable as require_loadable
    from ..checkpoint.read.object_store import RemotePath as RemotePath
    from ..checkpoint.read.source import open_source as open_source
    from ..checkpoint.read.storage import place as place
    from ..checkpoint.run.executor import local as local
    from ..checkpoint.run.lock import break_lock as break_lock
    from ..checkpoint.run.loop import run as run
    from ..checkpoint.verify.compare import compare as compare
    from ..checkpoint.verify.inspection import inspect as inspect
    from ..checkpoint.verify.verification import verify as verify
    from ..codecs.layer_schemes import require_blocks as require_blocks
    from ..codecs.registry import CODECS as CODECS
    from ..codecs.registry import DEFAULT as DEFAULT
    from ..codecs.registry import get_codec as get_codec
    from ..eval import evaluate_checkpoint as evaluate_checkpoint
    from ..formats import ALIASES as ALIASES
    from ..formats import CATALOG as CATALOG
    from ..formats import get_format as get_format
    from ..methods import method_named as method_named
    from ..own_files import OwnFile as OwnFile
    from ..recipes import recipe_schema as recipe_schema
    from ..report.allocation import SVG as SVG
    from ..report.allocation import curve_svg as curve_svg
    from ..report.allocation import search_report as search_report
    from ..report.evaluations import evaluation_report as evaluation_report
    from ..report.formats import formats_document as formats_document
    from ..report.formats import formats_table as formats_table
    from ..report.formats import page_document as page_document
    from ..report.formats import page_table as page_table
    from ..report.plans import plan_report as plan_report
    from ..report.tables import Order as Order
    from ..report.tables import comparison_report as comparison_report
    from ..report.tables import inspection_report as inspection_report
    from ..report.tables import run_report as run_report
    from ..report.tables import verification_report as verification_report
    from ..schemes import PRESETS as PRESETS
    from ..schemes.presets import OF_LAYOUTS as OF_LAYOUTS
    from ..search.budgets import Budget as Budget
    from ..search.evolution import by_evolution as by_evolution
    from ..search.inputs import inputs_by as inputs_by
    from ..search.inputs import with_ranges as with_ranges
    from ..search.searching import RECIPE as RECIPE
    from ..search.searching import asked as asked
    from ..search.searching import search as search
    from ..search.weighing import weigh_by as weigh_by
    from ..warmup import compile_kernels as compile_kernels

_OWNERS = {
    "Console": "rich.console",
    **dict.fromkeys(
        ("BarColumn", "Progress", "SpinnerColumn", "TextColumn", "TimeElapsedColumn"), "rich.progress"
    ),
    "local": "checkpoint.run.executor",
    "require_loadable": "checkpoint.plan.verdicts",
    "compare": "checkpoint.verify.compare",
    "inspect": "checkpoint.verify.inspection",
    "Limits": "checkpoint.plan.limits",
    "break_lock": "checkpoint.run.lock",
    "RemotePath": "checkpoint.read.object_store",
    "calibrated": "checkpoint.model.calibration",
    "with_importance": "checkpoint.model.importance",
    "with_cache_scales": "checkpoint.model.cache_scales",
    **dict.fromkeys(("conversion_plan", "make_plan"), "checkpoint.plan.checkpoint_plan"),
    **dict.fromkeys(("Rotations", "rotation_plan"), "checkpoint.plan.rotation_plan"),
    **dict.fromkeys(("PlanFile", "write_plan"), "checkpoint.plan.file"),
    "RayExecutor": "checkpoint.cluster.ray",
    **dict.fromkeys(("KEEP", "RecipeText"), "checkpoint.choose.recipe"),
    "run": "checkpoint.run.loop",
    "method_named": "methods",
    **dict.fromkeys(("DequantizePolicy", "FLOATS", "Selection"), "checkpoint.choose.selection"),
    "open_source": "checkpoint.read.source",
    "place": "checkpoint.read.storage",
    "verify": "checkpoint.verify.verification",
    "require_blocks": "codecs.layer_schemes",
    **dict.fromkeys(("CODECS", "DEFAULT", "get_codec"), "codecs.registry"),
    "evaluate_checkpoint": "eval",
    "evaluation_report": "report.evaluations",
    **dict.fromkeys(("ALIASES", "CATALOG", "get_format"), "formats"),
    "recipe_schema": "recipes",
    **dict.fromkeys(("formats_document", "formats_table", "page_document", "page_table"), "report.formats"),
    "plan_report": "report.plans",
    **dict.fromkeys(
        ("Order", "comparison_report", "inspection_report", "run_report", "verification_report"),
        "report.tables",
    ),
    "OF_LAYOUTS": "schemes.presets",
    "PRESETS": "schemes",
    **dict.fromkeys(("SVG", "curve_svg", "search_report"), "report.allocation"),
    "Budget": "search.budgets",
    **dict.fromkeys(("RECIPE", "asked", "search"), "search.searching"),
    "OwnFile": "own_files",
    "by_evolution": "search.evolution",
    **dict.fromkeys(("inputs_by", "with_ranges"), "search.inputs"),
    "weigh_by": "search.weighing",
    "compile_kernels": "warmup",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Return a name of a layer below, which stays here from then on."""
        if name not in _OWNERS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        place = _OWNERS[name]
        with ending_at_once():
            owner = import_module(place if place.startswith("rich") else f"..{place}", __package__)
        gc.freeze()  # what was imported is no garbage, and looking through it takes a tenth of a second
        value = globals()[name] = getattr(owner, name)
        return value
