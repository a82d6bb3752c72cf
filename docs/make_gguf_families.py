"""The families that become GGUF files of llama.cpp, and how near its logits are to transformers'.

The rows are src/zeropoint/codecs/llama_cpp/families.py; the differences are in tests/oracles/converted.json,
which ``python -m tests.oracles.converted`` writes.
"""

from __future__ import annotations

import json
from pathlib import Path

from docs.make_tables import table

from zeropoint.codecs.llama_cpp.families import FAMILIES

RECORDED = Path(__file__).parents[1] / "tests/oracles/converted.json"


def families_table() -> str:
    """Return the families, with llama.cpp's names for them and the largest difference of logits."""
    apart: dict[tuple[str, str], float] = {}
    for row in json.loads(RECORDED.read_text()).values():
        key = row["architecture"], row["model_type"]
        apart[key] = max(row["logits"], apart.get(key, 0.0))
    cells = {}
    for family in FAMILIES:
        kinds = ((family.architecture, kind) for kind in (family.model_type, *family.types))
        known = [apart[key] for key in kinds if key in apart]
        needs = ", ".join(f"`{key}`: {value}" for key, value in family.always.items())
        cells[family.architecture, family.model_type] = [
            f"`{family.model_type}`", family.class_name, f"`{family.architecture}`",
            f"{max(known):.0e}" if known else "", needs,
        ]  # fmt: skip
    head = ("`model_type`", "Class", "llama.cpp", "Logits apart", "Must be")
    return table(head, sorted(cells.values()))
