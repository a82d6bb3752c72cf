"""Calibration windows of token ids: from files, random, or generated.

Text is cut by the tokenizer of the checkpoint, without special tokens, into windows of equal length that
follow each other; what is left at the end is dropped. Code of a checkpoint is never executed.

Data files are regular files, read up to a bound and never mapped: a FIFO would be waited for without end, and
a device has none.
"""

from __future__ import annotations

import codecs
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ...codecs.registry import codec_of
from ...declared_models import transformers_package
from ...errors import CalibrationError, CheckpointError, OptionError, UnsupportedError, count, option, size_of
from ...libraries import quiet, reading
from ...own_files import reason_of
from ..read.decoding import read_tensor
from ..read.safetensors_file import parse_header
from ..read.source import CONFIG, Source
from ..read.storage import OpenFiles, open_regular, read_small, shown

WINDOW, MOST = 512, 128
"""Tokens of a window, and windows, as in llama.cpp's imatrix, and in GPTQ (arXiv:2210.17323)."""
RANDOM, OWN = "random", "self"
"""The words for random tokens, and for those that the model generates, in place of a file."""
TEXT_OF_IDS = ".safetensors"
TEXT_BYTES = 4 << 20
"""Limit of the calibration text in bytes: 64 for each of the 65,536 tokens that are used at most."""
_IDS_BYTES = 1 << 28
_WINDOWS = {RANDOM: 8, OWN: 32}
"""Windows of tokens that no file bounds, where nobody says how many."""
_MOST_TOKENS = 1 << 24
_TOKEN_BYTES = 64
"""Bytes of text that are read for each token that is wanted."""


Data: TypeAlias = torch.Tensor | Mapping[str, torch.Tensor] | Path | str
"""What users pass as calibration."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Windows:
    """Windows of tokens, as users ask for them.

    given: (windows, length) or (tokens,) integers; a .safetensors file that holds one such tensor; a file of
    text in UTF-8; :data:`RANDOM` or :data:`OWN`; or inputs of the model by name (samples.py). samples: how
    many windows. length: their tokens. Raises OptionError for numbers that are out of range.
    """

    given: Data
    samples: int | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        for name, number in (("samples", self.samples), ("length", self.length)):
            if number is not None and number < 1:
                raise OptionError(f"{option(name, number)} must be at least 1")
        tokens = (self.samples or 1) * (self.length or 1)
        if tokens > _MOST_TOKENS:
            raise OptionError(
                f"{self._asked} are {tokens} tokens, above the limit of {_MOST_TOKENS}; ask for fewer"
            )

    @staticmethod
    def of(given: Given) -> Windows:
        """Return the windows of ``given``, which may be data alone."""
        return given if isinstance(given, Windows) else Windows(given=given)

    @property
    def is_random(self) -> bool:
        """Whether random tokens are asked for."""
        return isinstance(self.given, str) and self.given == RANDOM

    @property
    def is_own(self) -> bool:
        """Whether tokens are asked for that the model generates."""
        return isinstance(self.given, str) and self.given == OWN

    @property
    def _asked(self) -> str:
        """The numbers that are asked for, as options."""
        numbers = (("samples", self.samples), ("length", self.length))
        return " and ".join(option(name, number) for name, number in numbers if number is not None)

    def window(self, longest: int) -> int:
        """Return the tokens of a window; raises CalibrationError above the limit.

        longest: most tokens that the model takes at once.
        """
        if self.length is None:
            return min(WINDOW, longest)
        if self.length > longest:
            raise CalibrationError(
                f"{option('length', self.length)} is more than the {longest} tokens that the model takes at "
                f"once; use {option('length', longest)} or less"
            )
        return self.length

    def cut(self, ids: torch.Tensor, length: int, name: str) -> torch.Tensor:
        """Return windows, (samples, length), cut from the start of ids.

        ids: (tokens,), or (windows, tokens). length: of a window. name: of the ids, for messages. Raises
        CalibrationError where there are fewer windows than are asked for, and for windows that have another
        number and length already.
        """
        if ids.ndim == 2:
            if self._asked:
                raise CalibrationError(
                    f"{name} holds {count(len(ids), 'window')} of {ids.shape[1]} tokens each, which "
                    f"{self._asked} cannot change; leave it out, or give ids in one row"
                )
            return ids
        found = len(ids) // length
        if self.samples is not None and 0 < found < self.samples:
            raise CalibrationError(
                f"{name} has {len(ids)} tokens, {count(found, 'window')} of {length}, and "
                f"{option('samples', self.samples)} asks for more; give more text, or use "
                f"{option('samples', found)}"
            )
        return ids[: found * length][: (self.samples or MOST) * length].reshape(-1, length)


Given: TypeAlias = Data | Windows
"""Calibration data, with or without the number and length of windows."""


def random_tokens(vocabulary: int, windows: int, length: int) -> torch.Tensor:
    """Return random token ids, (windows, length) int64, the same ones each time.

    They are no data, and yet they show which inputs of a layer are large: norms and outliers of channels
    belong to the model.
    """
    return torch.randint(0, vocabulary, (windows, length), generator=torch.Generator().manual_seed(0))


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
            named = {*self._own.added_tokens_encoder, *self._own.all_special_tokens}
            known = len(self._own.get_vocab().keys() - named)
        if known < _FEWEST:  # transformers makes a tokenizer without its files, to which all text is unknown
            raise UnsupportedError(f"{shown(source.given)} has no files of a tokenizer; {_NO_TOKENIZER}")

    def __call__(self, text: str, **options: bool) -> Mapping[str, Any]:
        """Return a text's tokens as ``input_ids``, and other requested outputs."""
        with quiet(), reading(self._what, _NO_TOKENIZER, UnsupportedError):
            found: Mapping[str, Any] = self._own(text, verbose=False, **options)
            torch.tensor(found["input_ids"], dtype=torch.int64)
            return found


_FEWEST = 2
"""Tokens of a vocabulary besides special ones, at least: T5's has one without any file."""
_NO_TOKENIZER = f"copy its files there, or give token ids in a {TEXT_OF_IDS} file"


def windows_of(given: Given, source: Source, *, vocabulary: int, longest: int) -> list[torch.Tensor]:
    """Return windows of token ids, each (1, length) int64.

    Args:
        given: see :class:`Windows`. Of those that the model generates, each window begins with a random
            token, and its others are 0 (own_tokens.py).
        source: the checkpoint, for its tokenizer.
        vocabulary: number of tokens that the model knows.
        longest: most tokens that the model takes at once.

    Raises:
        CalibrationError: for what is no such thing, for ids that the model does not know, for less than one
            window or fewer than are asked for, and for longer windows than the model takes.
        UnsupportedError: where text is given and the checkpoint has no tokenizer.
    """
    asked = Windows.of(given)
    length = asked.window(longest)
    for word, windows in _WINDOWS.items():
        if isinstance(asked.given, str) and asked.given == word:
            ids = random_tokens(vocabulary, asked.samples or windows, length)
            if asked.is_own:
                ids[:, 1:] = 0
            return list(ids.unsqueeze(1))
    if isinstance(asked.given, torch.Tensor):
        name, ids = "calibration", as_ids(asked.given, "calibration")
    else:
        assert not isinstance(asked.given, Mapping)  # samples.py cuts these
        wanted = (asked.samples or MOST) * length
        name, ids = (
            shown(asked.given),
            _ids(Path(asked.given), source, max(TEXT_BYTES, _TOKEN_BYTES * wanted)),
        )
    ids = asked.cut(ids, length, name)
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


REMEDY = f"give text in UTF-8, token ids in a {TEXT_OF_IDS} file, or the word {RANDOM} or {OWN}"
"""What to give instead of data that cannot be read."""


def _ids(path: Path, source: Source, most: int) -> torch.Tensor:
    if path.suffix == TEXT_OF_IDS:
        return read_ids(path, what="calibration", remedy=REMEDY)
    text = read_text(path, what="calibration", remedy=REMEDY, most=most)
    return torch.tensor(CheckpointTokenizer(source)(text, add_special_tokens=False)["input_ids"])


@contextmanager
def model_folder(source: Source) -> Iterator[Path]:
    """Yield a directory with config.json and the tokenizer of a checkpoint.

    It is the checkpoint's own directory; for a URL, and for files that embed both, such as GGUF, a temporary
    one with their content, in which files next to the weights count more. Code is never among it.
    """
    indexed = source.container.indexed
    if indexed and isinstance(source.root, Path):
        yield source.root
        return
    said: Mapping[str, str] = {}
    if not indexed:
        said = codec_of(source.container.name).model_format.companions(source.metadata[source.shards[0]])
    with tempfile.TemporaryDirectory(prefix="zeropoint-") as name:
        folder = Path(name)
        texts = {CONFIG: source.config_text or "{}", **said}
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
        for path in source.companions:
            if len(path.parts) == 1 and path.suffix in _READ:
                (folder / path).write_bytes(read_small(source.root / path, limit=_LARGEST)[0])
        yield folder


_READ = frozenset((".json", ".txt", ".model", ".jinja"))
"""Suffixes of the files that configurations and tokenizers consist of."""
_LARGEST = 1 << 30
"""Bytes of such a file at most; the largest tokenizers have a few dozen MB."""


def read_text(path: Path | str, *, what: str = "text", remedy: str, most: int = TEXT_BYTES) -> str:
    """Return the begin of a file of text in UTF-8.

    what: of the file, in messages. remedy: what to give instead. most: bytes that are read; what follows is
    left out. Raises CalibrationError where the file cannot be read.
    """
    try:
        descriptor = open_regular(Path(path))
        with open(descriptor, "rb") as file:
            raw = file.read(min(most, os.fstat(descriptor).st_size))
            return codecs.getincrementaldecoder("utf-8")().decode(raw, final=len(raw) < most)
    except (OSError, CheckpointError, UnicodeDecodeError) as error:
        raise CalibrationError(
            f"{what} {shown(path)} cannot be read: {reason_of(error.__cause__ or error)}; {remedy}"
        ) from error


def read_ids(path: Path | str, *, what: str = "token ids", remedy: str) -> torch.Tensor:
    """Return the only tensor of token ids in a safetensors file, int64.

    The arguments are as for read_text. Raises CalibrationError for what is no such file.
    """
    found = read_tensors(path, what=what, most=_IDS_BYTES, remedy=remedy)
    if len(found) != 1:
        raise CalibrationError(f"{shown(path)} holds {len(found)} tensors; store the token ids alone")
    (ids,) = found.values()
    return as_ids(ids, shown(path))


def read_tensors(path: Path | str, *, what: str, most: int, remedy: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file by name.

    most: bytes of all tensors. The other arguments are as for read_text. Raises CalibrationError for what is
    no such file.
    """
    try:
        table = parse_header(Path(path)).table
        nbytes = sum(entry.nbytes for entry in table.values())
        if nbytes > most:
            raise CalibrationError(
                f"{shown(path)} holds {size_of(nbytes)} of {what}, above the limit of {size_of(most)}; "
                "store fewer"
            )
        with OpenFiles() as files:
            return {name: read_tensor(entry, files) for name, entry in table.items()}
    except CheckpointError as error:
        raise CalibrationError(f"{what} {shown(path)} cannot be read: {error}; {remedy}") from error


def as_ids(given: torch.Tensor, name: str) -> torch.Tensor:
    """Return token ids as int64; raises CalibrationError for any other tensor."""
    floats = given.is_floating_point() or given.is_complex()
    if floats or given.dtype is torch.bool or given.ndim not in (1, 2):
        raise CalibrationError(
            f"{name} ({given.dtype}, shape {tuple(given.shape)}) must be token ids: integers of shape "
            "(windows, length) or (tokens,)"
        )
    return given.to(torch.int64)
