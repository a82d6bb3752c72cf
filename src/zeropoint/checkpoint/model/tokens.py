"""Calibration data of models: windows of token ids, from a tensor, a file of them, plain text, or at random.

Text is cut by the tokenizer of the checkpoint, without special tokens, into windows of equal length that
follow each other; what is left at the end is dropped. Code of a checkpoint is never executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...declared_models import transformers_package
from ...errors import CalibrationError, UnsupportedError
from ...libraries import quiet, reading
from ..read.source import Source
from ..read.storage import shown
from .data_files import TEXT_OF_IDS, as_ids, read_ids, read_text
from .model_folder import model_folder

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


class CheckpointTokenizer:
    """The tokenizer of a checkpoint, whose code is not executed.

    source: a local checkpoint. is_fast: whether it says where tokens lie in a text. Raises UnsupportedError
    where there is none that transformers reads, and where it fails on a text.
    """

    def __init__(self, source: Source) -> None:
        self._what = f"{shown(source.given)} has no tokenizer that transformers reads"
        transformers = transformers_package()
        with model_folder(source) as folder, quiet(), reading(self._what, _NO_TOKENIZER, UnsupportedError):
            self._own: Any = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            self.is_fast = self._own.is_fast is True

    def __call__(self, text: str, **options: bool) -> Mapping[str, Any]:
        """Return the tokens of a text under ``input_ids``, and what else options of transformers ask for."""
        with quiet(), reading(self._what, _NO_TOKENIZER, UnsupportedError):
            found: Mapping[str, Any] = self._own(text, verbose=False, **options)
            torch.tensor(found["input_ids"], dtype=torch.int64)
            return found


_NO_TOKENIZER = f"copy its files there, or give token ids in a {TEXT_OF_IDS} file"


def windows_of(
    given: torch.Tensor | Path | str, source: Source, *, vocabulary: int, longest: int
) -> list[torch.Tensor]:
    """Return windows of token ids, each (1, length) int64.

    Args:
        given: (windows, length) or (tokens,) integers; a .safetensors file that holds one such tensor; a file
            of text in UTF-8, of which the first :data:`~.data_files.TEXT_BYTES` are read; or :data:`RANDOM`.
        source: the checkpoint, for its tokenizer.
        vocabulary: number of tokens that the model knows.
        longest: most tokens that the model takes at once.

    Raises:
        CalibrationError: for what is no such thing, for ids that the model does not know, and for less than
            one window.
        UnsupportedError: where text is given and the checkpoint has no tokenizer.
    """
    length = min(WINDOW, longest)
    if is_random(given):
        return list(random_tokens(vocabulary, _RANDOM_WINDOWS, length).unsqueeze(1))
    name = "calibration" if isinstance(given, torch.Tensor) else shown(given)
    ids = as_ids(given, name) if isinstance(given, torch.Tensor) else _ids(Path(given), source)
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
    return list(ids.unsqueeze(1))


_REMEDY = f"give text in UTF-8, token ids in a {TEXT_OF_IDS} file, or the word {RANDOM}"


def _ids(path: Path, source: Source) -> torch.Tensor:
    if path.suffix == TEXT_OF_IDS:
        return read_ids(path, what="calibration", remedy=_REMEDY)
    text = read_text(path, what="calibration", remedy=_REMEDY)
    return torch.tensor(CheckpointTokenizer(source)(text, add_special_tokens=False)["input_ids"])
