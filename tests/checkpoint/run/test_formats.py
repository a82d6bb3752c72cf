"""Other file layouts in the stream: the same bytes however a run goes, by columns too."""

from pathlib import Path

import pytest
import torch
from tests.checkpoint.interrupted import stop_after
from tests.checkpoint.written import digests, tensors_of
from tests.oracles import synthetic_llama

import zeropoint as zp
from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, make_plan
from zeropoint.checkpoint.plan.file import PlanFile, write_plan
from zeropoint.checkpoint.plan.limits import BASE_MEMORY, Limits
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.advice import error_warnings
from zeropoint.checkpoint.run.loop import run
from zeropoint.checkpoint.run.units import Units
from zeropoint.codecs.layer_schemes import layer_scheme
from zeropoint.codecs.registry import CODECS

pytestmark = [pytest.mark.usefixtures("small_units"), pytest.mark.rotating]

FORMATS = (
    ("gptq", "int4:g32"),
    ("gptq", "int4:g32:asym"),
    ("fp8-block", "float8_e4m3fn:block32x32"),
    ("gguf", "int4:g32"),
)
WAYS = (
    (Limits(workers=2, tile_values=3000), (2,)),
    (Limits(workers=1, max_memory=BASE_MEMORY + (4 << 20)), (0, 7)),
    (Limits(workers=3, tile_values=77_777), (1, 1, 5)),
)


def plan_of(source: Path, name: str, to: str, limits: Limits) -> CheckpointPlan:
    return make_plan(open_source(source), to, limits=limits, codec=CODECS[name])


@pytest.mark.parametrize(("name", "to"), FORMATS)
def test_every_file_has_the_same_bytes_however_a_run_goes(name: str, to: str, tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in")
    plan = plan_of(source, name, to, Limits(workers=1))
    run(plan, tmp_path / "golden")
    golden = digests(tmp_path / "golden")
    assert max(len(Units(plan).of_weight(n)) for n in range(len(plan.weights))) > 1  # some weight is cut
    for number, (limits, stops) in enumerate(WAYS):
        other, out = plan_of(source, name, to, limits), tmp_path / str(number)
        for count in stops:
            stop_after(other, out, count)
        run(other, out)
        assert digests(out) == golden
    assert zp.verify_checkpoint(tmp_path / "golden", source).ok


def test_columns_of_a_weight_are_the_lines_of_the_whole(tmp_path: Path) -> None:
    source, codec = synthetic_llama.write(tmp_path / "in"), CODECS["gptq"]
    plan = plan_of(source, "gptq", "int4:g32", Limits(workers=1, tile_values=3000))
    run(plan, tmp_path / "out")
    floats, written, layer = tensors_of(source), tensors_of(tmp_path / "out"), layer_scheme("int4:g32", codec)
    for weight in plan.weights:
        q = zp.quantize(floats[weight.source.name], layer.weight)
        for part, tensor in codec.encode(layer, q).items():
            assert torch.equal(written[f"{weight.module}.{part}"], tensor)


def test_a_plan_in_a_file_has_its_format(tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in")
    plan = plan_of(source, "gptq", "int4:g32", Limits(workers=1))
    write_plan(plan, tmp_path / "plan.json")
    again = PlanFile.read(tmp_path / "plan.json").remake(open_source(source))
    assert again.codec == CODECS["gptq"]
    assert again.outputs == plan.outputs


def test_rough_weights_get_a_finer_preset_of_their_own_format(tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in")
    plan = plan_of(source, "gptq", "int2:channel", Limits(workers=1))
    (said,) = error_warnings(run(plan, tmp_path / "out"))
    assert said.endswith("has less error")
