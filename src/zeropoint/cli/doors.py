"""The Python function of each command, and options of one side alone.

Every other option has one name in both, ``--max-memory`` and ``max_memory``; tests compare them one by one.
"""

from __future__ import annotations

FUNCTIONS = {
    "quantize": "quantize_checkpoint",
    "plan": "plan_checkpoint",
    "search": "search_checkpoint",
    "dequantize": "dequantize_checkpoint",
    "compare": "compare_checkpoints",
    "eval": "evaluate_checkpoint",
    "kv-scales": "add_kv_scales",
    "statistics": "gather_statistics",
    "convert": "convert_checkpoint",
    "rotate": "rotate_checkpoint",
    "distill": "distill_checkpoint",
    "inspect": "inspect_checkpoint",
    "verify": "verify_checkpoint",
    "report": "report_checkpoint",
    "formats": None,
    "warmup": None,
    "demo": None,
    "doctor": None,
    "bench": None,
}
"""Command to the function of ``zeropoint`` that it calls, or None."""
OF_A_TERMINAL = {
    "all": "a result holds every tensor",
    "json": "result.to_json(), result.to_dict()",
    "sort": "sorted(result.outcomes, key=lambda outcome: -outcome.error.relative)",
    "require": "found.equality.of_bits",
    "schema": "zp.recipes.recipe_schema()",
}
"""Option of a command to what stands in its place in Python."""
OF_PYTHON = {"progress": "the command always shows it"}
"""Argument of a function that no option is, and why."""
