"""Files of data that models run on: what is read of them, and what is refused."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from zeropoint.checkpoint.model.tokens import TEXT_BYTES, read_ids, read_text
from zeropoint.errors import CalibrationError
from zeropoint.eval.cloze import cloze_items

REMEDY = "give another"


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.uint64]
)
def test_token_ids_of_all_integers_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"ids": torch.arange(8).reshape(2, 4).to(dtype)}, tmp_path / "ids.safetensors")
    found = read_ids(tmp_path / "ids.safetensors", remedy=REMEDY)
    assert found.dtype is torch.int64
    assert torch.equal(found, torch.arange(8).reshape(2, 4))


@pytest.mark.parametrize(
    "ids", [torch.zeros(2, 2), torch.tensor(1), torch.ones(3) > 0, torch.zeros(1, 1, 1).long()]
)
def test_other_tensors_are_refused(tmp_path: Path, ids: torch.Tensor) -> None:
    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    with pytest.raises(CalibrationError, match="must be token ids: integers of shape"):
        read_ids(tmp_path / "ids.safetensors", remedy=REMEDY)


def test_a_long_text_is_read_up_to_a_bound_and_cut_between_characters(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(("\u20ac" * 10).encode())
    assert read_text(path, remedy=REMEDY, most=10) == "\u20ac" * 3
    assert read_text(path, remedy=REMEDY) == "\u20ac" * 10
    path.write_bytes("\u20ac".encode()[:2])
    with pytest.raises(CalibrationError, match=r"cannot be read: .*unexpected end of data; give another"):
        read_text(path, remedy=REMEDY)
    with path.open("wb") as file:
        file.truncate(1 << 33)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read_text(path, remedy=REMEDY) == "\0" * TEXT_BYTES
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_what_is_no_regular_file_is_refused_without_a_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.safetensors")
    for path in (tmp_path / "fifo.safetensors", Path("/dev/zero"), Path("/dev/full"), tmp_path):
        for read in (read_text, read_ids):
            with pytest.raises(CalibrationError, match=r"must be a regular file.*give another"):
                read(path, remedy=REMEDY)
        with pytest.raises(CalibrationError, match="must be a regular file"):
            cloze_items(path, 3)
