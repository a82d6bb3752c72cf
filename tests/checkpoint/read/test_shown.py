"""Results print what they are about, in a few lines, not their fields."""

from pathlib import Path

from tests.checkpoint.written import LINEAR, save, weight

import zeropoint as zp
from zeropoint.checkpoint.read.storage import shown


def test_each_result_prints_sizes_bits_and_the_verdict(tmp_path: Path) -> None:
    source = save(tmp_path / "in", {LINEAR: weight(64, 128), "norm.weight": weight(64)})
    plan = zp.plan_checkpoint(source, "int8:channel")
    sizes, bits, memory = str(plan).splitlines()
    assert "x smaller)" in sizes
    assert bits == "8,192 values at 8.266 bits in compressed-tensors"
    assert memory.startswith("about ")
    result = zp.quantize_checkpoint(source, tmp_path / "out", "int8:channel")
    assert str(result).splitlines() == [
        shown(tmp_path / "out"), sizes, bits, str(result.error),
    ]  # fmt: skip
    assert str(result.error).startswith(f"relative error {result.error.relative:.4f}, SQNR ")
    assert str(zp.verify_checkpoint(result.path, source)).splitlines() == [
        "1 layer decoded (8,192 values), 1 other tensor, every byte hashed",
        "all within the proven bound (the largest error is 100.0% of its bound)",
    ]  # fmt: skip
    inspection = str(zp.inspect_checkpoint(result.path))
    assert inspection.splitlines()[1].endswith(" bits, quantized by compressed-tensors")


def test_a_verification_prints_what_is_wrong_first(tmp_path: Path) -> None:
    source = save(tmp_path / "in", {LINEAR: weight(64, 128)})
    result = zp.quantize_checkpoint(source, tmp_path / "out", "int8:channel")
    file = result.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    first, *_, last = repr(zp.verify_checkpoint(result.path)).splitlines()
    assert "model.safetensors" in first
    assert last.endswith("found")
