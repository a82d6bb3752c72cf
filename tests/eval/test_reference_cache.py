"""The cache of a reference: what of a file is believed, and what stays of files of others."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from zeropoint.errors import CheckpointError
from zeropoint.eval.reference_cache import ReferenceCache, ReferenceKey

KEY = ReferenceKey(model="m", text="t", dtype="float32", versions="v")
BATCHES = [{"input_ids": torch.zeros(2, 3, dtype=torch.int64)}]
VALUES = torch.arange(24.0).reshape(2, 3, 4)


def written(path: Path) -> ReferenceCache:
    cache = ReferenceCache(path)
    cache.write(KEY, [VALUES], torch.ones(2, 5, dtype=torch.int64))
    return cache


def test_what_was_written_is_read_and_any_flipped_bit_is_refused(tmp_path: Path) -> None:
    cache = written(tmp_path / "cache")
    (found,) = cache.read(KEY, BATCHES, 4)
    assert torch.equal(found, VALUES)
    assert os.listdir(tmp_path) == ["cache"]
    whole = bytearray(cache.path.read_bytes())
    for at in range(len(whole) - VALUES.nbytes - 80, len(whole), 7):
        damaged = whole.copy()
        damaged[at] ^= 1
        cache.path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"cannot be read: .*; delete it, or name another file"):
            assert cache.read(KEY, BATCHES, 4) is cache.sequences()


Change = Callable[[dict[str, torch.Tensor], dict[str, str]], object]
CHANGES: Mapping[str, Change] = {
    "a list for an object": lambda _, said: said.update({"zeropoint.reference": "[]"}),
    "no JSON": lambda _, said: said.update({"zeropoint.reference": "{"}),
    "deep": lambda _, said: said.update({"zeropoint.reference": "[" * 100_000}),
    "no digests": lambda _, said: said.pop("zeropoint.sha256"),
    "digests in a list": lambda _, said: said.update({"zeropoint.sha256": "[1]"}),
    "a wide tensor": lambda held, _: held.update({"0": torch.zeros(2, 3, 5)}),
    "a flat tensor": lambda held, _: held.update({"0": torch.zeros(24)}),
    "half floats": lambda held, _: held.update({"0": VALUES.half()}),
    "no tensor": lambda held, _: held.pop("0"),
    "a scalar": lambda held, _: held.update({"0": torch.tensor(1.0)}),
    "other numbers": lambda held, _: held.update({"0": VALUES + 1}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_crafted_cache_is_a_sentence(tmp_path: Path, change: Change) -> None:
    cache = written(tmp_path / "cache")
    with safe_open(cache.path, "pt") as file:
        held, said = {name: file.get_tensor(name) for name in ("0", "sequences")}, file.metadata()
    change(held, said)
    save_file(held, cache.path, metadata=said)
    with pytest.raises(CheckpointError, match="delete it, or name another file"):
        cache.read(KEY, BATCHES, 4)


@pytest.mark.parametrize("tokens", [torch.zeros(4), torch.zeros(4, dtype=torch.int64), -torch.ones(2, 5)])
def test_sequences_that_are_no_tokens_are_refused(tmp_path: Path, tokens: torch.Tensor) -> None:
    cache = ReferenceCache(tmp_path / "cache")
    cache.write(KEY, [VALUES], tokens.long() if tokens.ndim == 2 else tokens)
    with pytest.raises(CheckpointError, match="its sequences"):
        cache.sequences()


def test_files_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "cache.part").write_text("mine")
    (tmp_path / "source").mkdir()
    written(tmp_path / "cache")
    assert (tmp_path / "cache.part").read_text() == "mine"
    save_file({"mine": VALUES}, tmp_path / "mine", metadata={"of": "mine"})
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    for cache, message in (
        (ReferenceCache(tmp_path / "mine"), "exists and is no cache of zeropoint"),
        (ReferenceCache(tmp_path / "link"), "exists and is no cache of zeropoint"),
        (ReferenceCache(tmp_path / "source" / "cache", [tmp_path / "source"]), "lies in the checkpoint"),
        (ReferenceCache(tmp_path / "absent" / "cache"), "does not exist; create it first"),
    ):
        with pytest.raises(CheckpointError, match=message):
            cache.require_place()
    with pytest.raises(CheckpointError, match="exists; name a new file"):
        ReferenceCache(tmp_path / "cache").write(KEY, [VALUES + 1], None)
    assert json.dumps("zeropoint.reference").encode() in (tmp_path / "cache").read_bytes()
