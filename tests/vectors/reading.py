"""The conformance vectors as they are checked in, read with json and safetensors alone."""

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

FOLDER = Path(__file__).resolve().parents[2] / "vectors"
INDEX: dict[str, Any] = json.loads((FOLDER / "index.json").read_text())


@functools.cache
def _file(group: str) -> dict[str, torch.Tensor]:
    return load_file(FOLDER / f"{group}.safetensors")


def cases(group: str) -> list[Any]:
    """Return what the index says of the cases of a file."""
    return list(INDEX["files"][f"{group}.safetensors"]["cases"])


def parts(group: str, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a case, by part."""
    return {part: _file(group)[name] for part, name in case["tensors"].items()}
