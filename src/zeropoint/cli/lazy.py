"""Names of the layers below, imported on first use (PEP 562).

They import torch, which takes a second or more; help, the version, completion and mistakes of the command
line need none of it. Commands say ``lazy.plan_checkpoint(...)``.
"""

import gc
from typing import TYPE_CHECKING

from ..deferred_names import imported
from .main import ending_at_once

if TYPE_CHECKING:
    from rich.console import Console as Console

    from .. import add_kv_scales as add_kv_scales
    from .. import compare_checkpoints as compare_checkpoints
    from .. import convert_checkpoint as convert_checkpoint
    from .. import dequantize_checkpoint as dequantize_checkpoint
    from .. import distill_checkpoint as distill_checkpoint
    from .. import evaluate_checkpoint as evaluate_checkpoint
    from .. import gather_statistics as gather_statistics
    from .. import get_format as get_format
    from .. import inspect_checkpoint as inspect_checkpoint
    from .. import plan_checkpoint as plan_checkpoint
    from .. import quantize_checkpoint as quantize_checkpoint
    from .. import report_checkpoint as report_checkpoint
    from .. import rotate_checkpoint as rotate_checkpoint
    from .. import search_checkpoint as search_checkpoint
    from .. import verify_checkpoint as verify_checkpoint
    from ..bench.speeds import kernel_speeds as kernel_speeds
    from ..checkpoint.plan.file import PlanFile as PlanFile
    from ..checkpoint.plan.recipe import RecipeText as RecipeText
    from ..checkpoint.plan.recipe import codec_for as codec_for
    from ..checkpoint.plan.recipe import require_blocks as require_blocks
    from ..checkpoint.plan.selection import FLOATS as FLOATS
    from ..checkpoint.read.storage import place as place
    from ..codecs.registry import CODECS as CODECS
    from ..codecs.registry import DEFAULT as DEFAULT
    from ..codecs.registry import get_codec as get_codec
    from ..formats import ALIASES as ALIASES
    from ..formats import CATALOG as CATALOG
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
    from ..stats import statistic_named as statistic_named
    from ..warmup import compile_kernels as compile_kernels
    from .demonstration import demonstrate as demonstrate

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        with ending_at_once():
            value = imported(__name__, name)
        gc.freeze()  # what was imported is no garbage, and looking through it takes a tenth of a second
        return value
