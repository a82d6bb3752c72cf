"""Units cover every byte once, whatever the limits; their records are written without loss."""

import hashlib
import json
import math
import pickle
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from tests.checkpoint.interrupted import plan_of
from tests.checkpoint.written import LINEAR, save, weight
from tests.oracles import synthetic_llama

from zeropoint.checkpoint.measure.tensor_error import TensorError, exact_sum
from zeropoint.checkpoint.plan.identity import stamps
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.run.unit_results import Hashes, UnitResult, UnitResults
from zeropoint.checkpoint.run.units import Groups, Units


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("to", ["nvfp4a16", "w4a16_asym", "fp8_block", "mxfp8", "int3:g32:asym"])
def test_units_cover_every_byte_behind_the_headers_once(to: str, tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in", moe=True)
    (source / "vocab.txt").write_text("a" * 120_000)
    plan = plan_of(source, to)
    covered: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for unit in Units(plan):
        for span in unit.spans:
            assert span.file == unit.file
            covered[span.file].append((span.begin, span.begin + span.size))
    begins = {shard.name: len(shard.header) for shard in plan.shards}
    sizes = {shard.name: shard.size for shard in plan.shards} | {
        str(p): n for p, n in plan.companions.items()
    }
    for file, spans in covered.items():
        at = begins.get(file, 0)
        for begin, end in sorted(spans):
            assert begin == at
            at = end
        assert at == sizes[file]
    assert covered.keys() >= begins.keys()


def test_the_last_unit_writes_what_rows_give_that_fill_no_word(tmp_path: Path) -> None:
    """Of 40 zero points of 4 bits, a column in words of 32 bits, the last 8 fill one word alone."""
    plan = plan_of(save(tmp_path / "in", {LINEAR: weight(40, 64)}), "int4:g32:asym")
    (unit,) = (unit for unit in Units(plan) if unit.output.to is not None)
    sizes = {tensor.name: tensor.nbytes for tensor in unit.output.tensors}
    assert {span.tensor: span.size for span in unit.spans} == sizes
    assert sizes[f"{LINEAR.removesuffix('.weight')}.weight_zero_point"] == 5 * 2 * 4


def test_units_follow_from_the_plan_and_not_from_its_limits(tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in")
    found = [
        [(unit.number, unit.name, unit.spans) for unit in Units(plan_of(source, limits=limits))]
        for limits in (Limits(workers=1), Limits(workers=5, tile_values=1000))
    ]
    assert found[0] == found[1]
    assert [number for number, _, _ in found[0]] == list(range(len(found[0])))


def test_units_can_be_sent_to_another_process(tmp_path: Path) -> None:
    plan = plan_of(save(tmp_path / "in", {LINEAR: weight(64, 128), "a.bias": weight(9)}))
    found = tuple(Units(plan))
    assert pickle.loads(pickle.dumps(found)) == found


def test_units_name_the_files_whose_states_are_kept(tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in")
    (source / "original").mkdir()
    (source / "original" / "params.json").write_text("{}")
    plan = plan_of(source)
    named = {name for unit in Units(plan) for name in unit.output.stamps}
    assert named == stamps(plan).keys() >= {"original/params.json"}


def test_sets_with_one_tensor_scale_are_scanned_together(tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in")
    for members in Groups(Units(plan_of(source, "nvfp4a16"))).values():
        modules = {unit.output.module.rpartition(".")[2] for unit in members}
        assert modules in (
            {"q_proj", "k_proj", "v_proj"},
            {"gate_proj", "up_proj"},
            {"o_proj"},
            {"down_proj"},
        )
    assert Groups(Units(plan_of(source, "w4a16"))) == {}


def test_the_record_of_a_unit_is_written_without_loss(tmp_path: Path) -> None:
    found = Units(plan_of(save(tmp_path / "in", {LINEAR: weight(64, 128), "a.bias": weight(9)})))
    rows = next(unit for unit in found if unit.output.to is not None)
    whole = next(unit for unit in found if unit.output.to is None)
    error = TensorError(
        values=rows.count * 128, squares=exact_sum([0.1, 1e-300, 1e20]), errors=(5e-324,), largest=1 / 3,
        clipped=1, zero_blocks=2, lost_blocks=3,
    )  # fmt: skip
    for done in (
        UnitResult(number=rows.number, digests=("ab", "cd"), error=error),
        UnitResult(number=whole.number, digests=("",), error=None),
    ):
        assert UnitResult.parse(json.loads(json.dumps(done.document())), found) == done


def test_a_run_keeps_the_hash_that_it_reads_back_with_and_no_record_does(tmp_path: Path) -> None:
    found = Units(plan_of(save(tmp_path / "in", {LINEAR: weight(64, 128)})))
    hashes = Hashes()
    hashes.update(memoryview(b"some "))
    hashes.update(memoryview(b"bytes"))
    done = UnitResult.of(found[0], [hashes, Hashes()])
    assert done.digests[0] == hashlib.sha256(b"some bytes").hexdigest()
    assert done.checks[0] == xxhash.xxh3_128(b"some bytes").hexdigest()
    assert UnitResults(len(found), {0: done})[0] == done
    assert "xxh3" not in json.dumps(done.document())
    assert replace(done, checks=()).document() == done.document()


def test_exact_sums_depend_on_no_order_and_no_grouping() -> None:
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-30, 30, (999,), generator=generator)
    numbers = (torch.randn(999, generator=generator, dtype=torch.float64) * 2.0**powers).tolist()
    whole = exact_sum(numbers)
    assert exact_sum(reversed(numbers)) == whole
    for cut in (1, 10, 500):
        assert exact_sum([*exact_sum(numbers[:cut]), *exact_sum(numbers[cut:])]) == whole
    assert sum(map(Fraction, whole)) == sum(map(Fraction, numbers))
    assert exact_sum(np.array(numbers)) == whole


@pytest.mark.parametrize("scale", [1.0, 5e-324, 2.0**-1022, 2.0**900])
def test_the_sum_of_an_array_is_that_of_its_numbers(scale: float) -> None:
    generator = np.random.default_rng(1)
    numbers = generator.integers(-(1 << 53), 1 << 53, 5000) * scale * 2.0 ** generator.integers(0, 3, 5000)
    numbers[::7] = 0.0
    assert exact_sum(numbers) == exact_sum(numbers.tolist())


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_a_sum_that_is_not_finite_is_one_part(number: float) -> None:
    (part,) = exact_sum(np.array([1.0] * 99 + [number]))
    assert not math.isfinite(part)


@pytest.mark.usefixtures("small_units")
def test_a_unit_holds_whole_rows_of_the_layout(tmp_path: Path) -> None:
    plan = plan_of(save(tmp_path / "in", {LINEAR: weight(1000, 128)}), "fp8_block")
    rows = [unit.count for unit in Units(plan) if unit.output.to is not None]
    assert rows == [256, 256, 256, 232]
