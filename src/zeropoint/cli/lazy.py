"""Names of the layers below, imported on first use (PEP 562).

They import torch, which takes a second or more; help, the version, completion and mistakes of the command
line need none of it. Commands say ``lazy.plan_checkpoint(...)``.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING

from .signals import ending_at_once

if TYPE_CHECKING:
    from rich.console import Console as Console

    from ..bench.speeds import kernel_speeds as kernel_speeds
    from ..checkpoint.model_verbs import add_kv_scales as add_kv_scales
    from ..checkpoint.model_verbs import distill_checkpoint as distill_checkpoint
    from ..checkpoint.model_verbs import gather_statistics as gather_statistics
    from ..checkpoint.plan.file import PlanFile as PlanFile
    from ..checkpoint.plan.recipe import RecipeText as RecipeText
    from ..checkpoint.plan.recipe import codec_for as codec_for
    from ..checkpoint.plan.recipe import require_blocks as require_blocks
    from ..checkpoint.plan.selection import FLOATS as FLOATS
    from ..checkpoint.read.storage import place as place
    from ..checkpoint.verbs import compare_checkpoints as compare_checkpoints
    from ..checkpoint.verbs import convert_checkpoint as convert_checkpoint
    from ..checkpoint.verbs import dequantize_checkpoint as dequantize_checkpoint
    from ..checkpoint.verbs import plan_checkpoint as plan_checkpoint
    from ..checkpoint.verbs import rotate_checkpoint as rotate_checkpoint
    from ..checkpoint.verbs import verify_checkpoint as verify_checkpoint
    from ..checkpoint.verify.inspection import inspect_checkpoint as inspect_checkpoint
    from ..codecs.registry import CODECS as CODECS
    from ..codecs.registry import DEFAULT as DEFAULT
    from ..codecs.registry import get_codec as get_codec
    from ..eval import evaluate_checkpoint as evaluate_checkpoint
    from ..formats import ALIASES as ALIASES
    from ..formats import CATALOG as CATALOG
    from ..formats import get_format as get_format
    from ..methods import method_named as method_named
    from ..methods import methods as methods
    from ..methods import steps as steps
    from ..recipes import recipe_schema as recipe_schema
    from ..report.allocation import search_report as search_report
    from ..report.evaluations import evaluation_report as evaluation_report
    from ..report.formats import formats_document as formats_document
    from ..report.formats import formats_table as formats_table
    from ..report.formats import page_document as page_document
    from ..report.formats import page_table as page_table
    from ..report.machine import checkup as checkup
    from ..report.machine import checkup_table as checkup_table
    from ..report.machine import speed_table as speed_table
    from ..report.page import page_of as page_of
    from ..report.page import report_checkpoint as report_checkpoint
    from ..report.plans import plan_report as plan_report
    from ..report.tables import Order as Order
    from ..report.tables import comparison_report as comparison_report
    from ..report.tables import inspection_report as inspection_report
    from ..report.tables import run_report as run_report
    from ..report.tables import runs_report as runs_report
    from ..report.tables import verification_report as verification_report
    from ..schemes import PRESETS as PRESETS
    from ..schemes.presets import OF_LAYOUTS as OF_LAYOUTS
    from ..search.budgets import Budget as Budget
    from ..search.pipelines import each_part as each_part
    from ..search.under_budget import quantize_checkpoint as quantize_checkpoint
    from ..search.under_budget import search_checkpoint as search_checkpoint
    from ..stats import statistic_named as statistic_named
    from ..warmup import compile_kernels as compile_kernels
    from .demonstration import demonstrate as demonstrate

_OWNERS = {
    "Console": "rich.console",
    "RecipeText": "checkpoint.plan.recipe",
    "statistic_named": "stats",
    "FLOATS": "checkpoint.plan.selection",
    "PlanFile": "checkpoint.plan.file",
    "place": "checkpoint.read.storage",
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
    **dict.fromkeys(("codec_for", "require_blocks"), "checkpoint.plan.recipe"),
    **dict.fromkeys(("CODECS", "DEFAULT", "get_codec"), "codecs.registry"),
    "evaluate_checkpoint": "eval",
    **dict.fromkeys(("ALIASES", "CATALOG", "get_format"), "formats"),
    **dict.fromkeys(("method_named", "methods", "steps"), "methods"),
    "recipe_schema": "recipes",
    "search_report": "report.allocation",
    "evaluation_report": "report.evaluations",
    **dict.fromkeys(("formats_document", "formats_table", "page_document", "page_table"), "report.formats"),
    **dict.fromkeys(("page_of", "report_checkpoint"), "report.page"),
    "plan_report": "report.plans",
    **dict.fromkeys(
        (
            "Order",
            "comparison_report",
            "inspection_report",
            "run_report",
            "runs_report",
            "verification_report",
        ),
        "report.tables",
    ),
    "PRESETS": "schemes",
    "inspect_checkpoint": "checkpoint.verify.inspection",
    "OF_LAYOUTS": "schemes.presets",
    "Budget": "search.budgets",
    "each_part": "search.pipelines",
    **dict.fromkeys(("quantize_checkpoint", "search_checkpoint"), "search.under_budget"),
    "compile_kernels": "warmup",
    "demonstrate": "cli.demonstration",
    "kernel_speeds": "bench.speeds",
    **dict.fromkeys(("checkup", "checkup_table", "speed_table"), "report.machine"),
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Return a name of a layer below, and keep it here."""
        if name not in _OWNERS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        place = _OWNERS[name]
        with ending_at_once():
            owner = import_module(place if place.startswith("rich") else f"..{place}", __package__)
        gc.freeze()  # what was imported is no garbage, and looking through it takes a tenth of a second
        value = globals()[name] = getattr(owner, name)
        return value
