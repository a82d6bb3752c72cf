"""Errors for paths without a checkpoint, with the likely remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ...architectures import PIPELINE_INDEX
from ...errors import CheckpointError, printable
from .file_names import JOURNAL
from .storage import Place, is_folder, listing, shown

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_WEIGHTS = frozenset((".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz"))
_LISTED = 5


def nothing_there(path: Path) -> CheckpointError:
    """Return the error for a missing path, with Hub advice."""
    given = str(path)
    name, folder = (given, path.name) if _HUB_NAME.fullmatch(given) else ("ORG/NAME", "DIR")
    return CheckpointError(
        f"{shown(path)} cannot be opened: No such file or directory; pass the directory of a checkpoint, or "
        "one .safetensors, .gguf or .onnx file; to use a model from the Hugging Face Hub, download it first: "
        f"hf download {name} --local-dir {folder}"
    )


def other_file(path: Place) -> CheckpointError | None:
    """Return the error for a file next to weights, or None."""
    if not path.name.endswith((".json", ".txt", ".md", ".model", ".yaml")):
        return None
    return CheckpointError(
        f"{shown(path)} is not a file of weights; pass the directory that holds it, {shown(path.parent)}"
    )


def without_weights(root: Place, names: Sequence[str]) -> CheckpointError:
    """Return the error for a directory of ``names`` without safetensors files."""
    place, folders = shown(root), [name for name in names if holds_weights(root / name)]
    if JOURNAL in names:
        said = "is the output of a zeropoint run that has not finished; run the same command again to resume"
    elif PIPELINE_INDEX in names:
        said = (
            "is a diffusers pipeline, whose parts are checkpoints of their own; pass one of them"
            f"{_named(folders)}, or the pipeline to zeropoint quantize"
        )
    elif whole := next((n.rpartition(".")[2] for n in names if n.endswith((".gguf", ".onnx"))), None):
        said = f"holds several {whole.upper()} files, of which one is read; pass it"
    elif others := [name for name in names if Path(name).suffix in _WEIGHTS]:
        said = (
            f"holds weights only as {', '.join(map(printable, others[:_LISTED]))}, but only safetensors "
            "files are read and nothing is ever unpickled; convert them first, in a sandbox: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW) of transformers writes them, and "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(NEW) the tokenizer"
        )
    else:
        said = (
            "holds no model.safetensors, model.safetensors.index.json or other .safetensors file; pass the "
            f"directory of a checkpoint or one .safetensors, .gguf or .onnx file{_named(folders)}"
        )
    return CheckpointError(f"{place} {said}")


def holds_weights(folder: Place) -> bool:
    """Return whether a folder holds safetensors files; unreadable ones do not."""
    try:
        return is_folder(folder) and any(found.name.endswith(".safetensors") for found in listing(folder))
    except CheckpointError:
        return False


def _named(folders: Sequence[str]) -> str:
    return f", such as {', '.join(map(printable, folders[:_LISTED]))}" if folders else ""
