"""Hashes of a manifest: each byte that changed is found, and its tensor or file is named."""

import hashlib
import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint import manifests
from tests.checkpoint.written import quantize, save, weight

from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.verify.verification import verify
from zeropoint.errors import CheckpointError, ZeropointError

SHARD = "model.safetensors"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A small output with its manifest."""
    tensors = {"m.up.weight": weight(4, 32), "m.norm.weight": weight(8), "m.empty": torch.ones(0)}
    source = save(tmp_path / "in", tensors)
    (source / "tokenizer.json").write_text('{"a": 1}')
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")
    quantize(source, tmp_path / "out", "int4:g16")
    return tmp_path / "out"


def complaint_of(out: Path) -> tuple[set[str], str]:
    """Return what verify names, and all that it says."""
    try:
        problems = verify(out, limits=Limits(workers=1)).problems
    except ZeropointError as error:
        return set(), str(error)
    return {problem.where for problem in problems}, "; ".join(map(str, problems))


def test_the_manifest_of_a_run_has_the_hashes_that_hashlib_gives(out: Path) -> None:
    """A tensor as small as these is one part."""
    table = json.loads((out / manifests.NAME).read_text())
    assert {key: table[key] for key in ("files", "tensors")} == manifests.hashes(out)


def test_an_undamaged_output_is_hashed_and_has_no_problem(out: Path) -> None:
    verification = verify(out)
    assert verification.problems == ()
    assert verification.hashed
    (out / manifests.NAME).unlink()
    assert not verify(out).hashed


def flips(out: Path, step: int, seed: int) -> list[tuple[Path, int, int]]:
    """Return every step-th byte of each file, with a bit to flip in it."""
    rng = random.Random(seed)
    files = sorted(path for path in out.rglob("*") if path.is_file())
    return [(f, at, 1 << rng.randrange(8)) for f in files for at in range(0, f.stat().st_size, step)]


def blamed(out: Path, path: Path, at: int, bit: int) -> bool:
    """Flip one bit; return whether verify names the tensor or file that it belongs to, and no other."""
    owners = {
        name: place
        for name, place in (manifests.places(path) if path.suffix == ".safetensors" else {}).items()
        if place[0] <= at < sum(place)
    }
    raw = bytearray(path.read_bytes())
    raw[at] ^= bit
    path.write_bytes(raw)
    where, text = complaint_of(out)
    raw[at] ^= bit
    path.write_bytes(raw)
    expected = next(iter(owners), str(path.relative_to(out)))
    if not owners:
        return expected in where or expected in text
    # The layer may be named as well; the other tensors are whole, and said to be.
    return {expected} <= where <= {expected, expected.rpartition(".")[0]}


def test_each_flipped_byte_is_found_and_its_tensor_or_file_named(out: Path) -> None:
    assert [flip for flip in flips(out, step=23, seed=1) if not blamed(out, *flip)] == []


def test_a_layer_that_cannot_be_read_is_hashed_too(out: Path) -> None:
    begin, size = manifests.places(out / SHARD)["m.up.weight_shape"]
    assert [at for at in range(begin, begin + size) if not blamed(out, out / SHARD, at, 1)] == []


@pytest.mark.slow
def test_every_flipped_byte_is_found_and_its_tensor_or_file_named(out: Path) -> None:
    assert [flip for flip in flips(out, step=1, seed=2) if not blamed(out, *flip)] == []


def test_without_hashes_the_same_suite_fails(out: Path) -> None:
    """The control: a flipped bit of a kept norm is found by nothing else."""
    (out / manifests.NAME).unlink()
    begin, _ = manifests.places(out / SHARD)["m.norm.weight"]
    assert not blamed(out, out / SHARD, begin, 1)


def _change(text: Callable[[dict[str, object]], None]) -> Callable[[Path], None]:
    def change(out: Path) -> None:
        table = json.loads((out / manifests.NAME).read_text())
        text(table)
        table.pop("sha256")
        manifests.write(out, **table)

    return change


def _rename_shard(out: Path) -> None:
    tensors = load_file(out / SHARD)
    tensors["m.norm.bias"] = tensors.pop("m.norm.weight")
    save_file(tensors, out / SHARD)


def _parts(name: str, parts: list[list[object]]) -> Callable[[dict[str, object]], None]:
    return lambda table: table["tensors"][name].update(parts=parts)  # type: ignore[index]


@pytest.mark.parametrize(
    ("damage", "where", "what"),
    [
        (lambda out: (out / "tokenizer.json").unlink(), "tokenizer.json",
         "it is missing, but in the manifest"),
        (lambda out: (out / "1_Pooling/config.json").write_text("{ }"), "1_Pooling/config.json",
         "it has 3 bytes, but was written with 2"),
        (_rename_shard, "m.norm.bias", "the manifest does not name it"),
        (_rename_shard, "m.norm.weight", "it is missing, but in the manifest"),
        (lambda out: (out / manifests.NAME).write_text("{}"), manifests.NAME, "no manifest does (ValueError"),
        (lambda out: (out / manifests.NAME).write_text("["), manifests.NAME,
         "no manifest does (ValueError"),
        (_change(_parts("m.norm.weight", [[0, 8, "00" * 32]])), "m.norm.weight",
         "the parts of the manifest do"),
        (_change(_parts("m.norm.weight", [[-1, 8, "00"]])), manifests.NAME, "-1 is not a number of bytes"),
        (_change(_parts("m.norm.weight", [[0, 8]])), manifests.NAME, "no manifest does (ValueError"),
        (_change(lambda t: t["tensors"]["m.norm.weight"].update(file="x")), "m.norm.weight",  # type: ignore[index]
         "it lies in 'model.safetensors', but was written to 'x'"),
        (_change(lambda t: t["files"].update({"../../etc/passwd": {"size": 1, "header": "00"}})),  # type: ignore[attr-defined]
         "../../etc/passwd", "it is missing, but in the manifest"),
        (_change(lambda t: t["files"].pop(SHARD)), SHARD, "the manifest does not name it"),  # type: ignore[attr-defined]
    ],
)  # fmt: skip
def test_what_contradicts_the_manifest_is_a_problem(
    damage: Callable[[Path], None], where: str, what: str, out: Path
) -> None:
    damage(out)
    found = [problem.what for problem in verify(out).problems if problem.where == where]
    assert any(what in text for text in found), verify(out).problems


def test_parts_that_overlap_leave_bytes_out_and_are_a_problem(out: Path) -> None:
    begin, size = manifests.places(out / SHARD)["m.norm.weight"]
    half = (out / SHARD).read_bytes()[begin : begin + size // 2]
    part = [begin, size // 2, hashlib.sha256(half).hexdigest()]
    _change(_parts("m.norm.weight", [part, part]))(out)
    where, text = complaint_of(out)
    assert where == {"m.norm.weight"}
    assert "the parts of the manifest do not cover it" in text


def test_a_file_that_was_put_next_to_the_output_is_no_problem(out: Path) -> None:
    (out / "README.md").write_text("ours")
    assert verify(out).problems == ()


def test_a_manifest_of_other_bytes_is_distinguished_from_a_damaged_one(out: Path) -> None:
    path = out / manifests.NAME
    path.write_text(path.read_text().replace('"size": 8,', '"size": 9,'))
    assert any(
        p.where == manifests.NAME and "its last member, sha256" in p.what for p in verify(out).problems
    )


def test_a_damaged_configuration_is_named_where_it_hides_that_all_is_quantized(out: Path) -> None:
    path = out / "config.json"
    path.write_text(path.read_text().replace("quantization_config", "quantization_conf1g"))
    with pytest.raises(CheckpointError, match=r"'config\.json': bytes 0 to .* therefore .* is not quantized"):
        verify(out)


def test_tensors_of_any_number_of_parts_are_hashed_in_little_memory(tmp_path: Path) -> None:
    source = save(tmp_path / "in", {"m.up.weight": weight(64, 128), "a.bias": weight(3 << 20)})
    quantize(source, tmp_path / "out")
    table = manifests.hashes(tmp_path / "out")
    begin, size, _ = table["tensors"]["a.bias"]["parts"][0]
    raw = (tmp_path / "out" / SHARD).read_bytes()
    cuts = [*range(0, size, 5_000_001), size]
    table["tensors"]["a.bias"]["parts"] = [
        [begin + a, b - a, hashlib.sha256(raw[begin + a : begin + b]).hexdigest()] for a, b in pairwise(cuts)
    ]
    manifests.write(tmp_path / "out", tensors=table["tensors"])
    little = Limits(workers=1, max_memory=(400 << 20) + (1 << 20))
    assert verify(tmp_path / "out", limits=little).problems == ()
