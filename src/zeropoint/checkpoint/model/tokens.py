"""Calibration data of models: windows of token ids, from a tensor, a file of them, plain text, or at random.

Text is cut by the tokenizer of the checkpoint, without special tokens, into windows of equal length that
follow each other; what is left at the end is dropped. Code of a checkpoint is never executed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ...errors import CalibrationError, UnsupportedError
from ..read.storage import shown

WINDOW, MOST = 512, 128
"""Tokens of a window, and windows: those of llama.cpp's imatrix, and of GPTQ (arXiv:2210.17323)."""
RANDOM, _RANDOM_WINDOWS = "random", 8
"""The word for random tokens in place of a file, and how many windows of them there are."""


def random_tokens(vocabulary: int, windows: int, length: int) -> torch.Tensor:
    """Return random token ids, (windows, length) int64, the same ones each time.

    They are no data, and yet they show which inputs of a layer are large: norms and outliers of channels
    belong to the model.
    """
    return torch.randint(0, vocabulary, (windows, length), generator=torch.Generator().manual_seed(0))


def is_random(given: object) -> bool:
    """Return whether random tokens are asked for."""
    return isinstance(given, str) and given == RANDOM


def windows_of(
    given: torch.Tensor | Path | str, root: Path, *, vocabulary: int, longest: int, transformers: Any
) -> list[torch.Tensor]:
    """Return windows of token ids, each (1, length) int64.

    Args:
        given: (windows, length) or (tokens,) integers; a .safetensors file that holds one such tensor; a file
            of text in UTF-8; or :data:`RANDOM`.
        root: the checkpoint, for its tokenizer.
        vocabulary: number of tokens that the model knows.
        longest: most tokens that the model takes at once.
        transformers: the package.

    Raises:
        CalibrationError: for what is no such thing, for ids that the model does not know, and for less than
            one window.
        UnsupportedError: where text is given and the checkpoint has no tokenizer.
    """
    length = min(WINDOW, longest)
    if is_random(given):
        return list(random_tokens(vocabulary, _RANDOM_WINDOWS, length).unsqueeze(1))
    name = "calibration" if isinstance(given, torch.Tensor) else shown(given)
    ids = given if isinstance(given, torch.Tensor) else _ids(Path(given), root, transformers)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool or ids.ndim not in (1, 2):
        raise CalibrationError(
            f"{name} ({ids.dtype}, shape {tuple(ids.shape)}) must be token ids: integers of shape (windows, "
            "length) or (tokens,)"
        )
    if ids.ndim == 1:
        ids = ids[: len(ids) // length * length][: MOST * length].reshape(-1, length)
    if not ids.numel():
        raise CalibrationError(
            f"{name} has fewer tokens than one window of {length}; give more text, some {16 * length} tokens"
        )
    if ids.shape[1] > longest:
        raise CalibrationError(
            f"{name} has windows of {ids.shape[1]} tokens, and the model takes {longest} at most; cut them"
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise CalibrationError(
            f"{name} has token {low if low < 0 else high}, and the model knows 0..{vocabulary - 1}; use its "
            "own tokenizer"
        )
    return list(ids.to(torch.int64).unsqueeze(1))


def _ids(path: Path, root: Path, transformers: Any) -> torch.Tensor:
    try:
        if path.suffix == ".safetensors":
            found = load_file(path)
            if len(found) != 1:
                raise CalibrationError(f"{shown(path)} holds {len(found)} tensors; store the token ids alone")
            return next(iter(found.values()))
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, SafetensorError) as error:
        raise CalibrationError(
            f"calibration {shown(path)} cannot be read: {error}; give text in UTF-8, token ids in a "
            f".safetensors file, or the word {RANDOM}"
        ) from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            root, local_files_only=True, trust_remote_code=False
        )
        return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    except (AttributeError, ImportError, KeyError, OSError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"{shown(root)} has no tokenizer that transformers reads ({type(error).__name__}); copy its "
            "files there, or give token ids"
        ) from error
