"""``zeropoint plan`` says beforehand what quantize does, and writes nothing but its file."""

import json
from pathlib import Path

import pytest
from tests.checkpoint.written import digests
from tests.cli.conftest import Call
from tests.cli.test_recipe import RECIPE

from zeropoint.recipes import recipe_schema


def test_the_report_has_actions_outputs_shards_engines_and_devices(call: Call, model: Path) -> None:
    before = digests(model)
    called = call("plan", model, "--to", "nvfp4a16")
    assert (called.status, called.err) == (0, "")
    said = " ".join(called.out.split())
    for part in (
        "quantized to nvfp4a16: a linear weight 14", "kept: an embedding 1",
        "model.layers.*.self_attn.q_proj 2 packed U8, scale F8_E4M3, global_scale F32 128 x 128 18.0 KiB",
        "model.safetensors ",
        "transformers yes reads every layout in it by our tests", "onnxruntime no it reads ONNX models",
        "not checked here", "tensor parallel weights that cannot be split",
        "model.layers.*.mlp.gate_proj, up_proj 2", "of memory with",
        "bits in compressed-tensors",
    ):  # fmt: skip
        assert part in said
    lines = called.out.splitlines()
    assert all(line == line.rstrip() for line in lines)
    assert digests(model) == before


def test_a_packed_weight_has_one_row_with_the_size_of_its_parts_together(call: Call, model: Path) -> None:
    lines = call("plan", model, "--to", "w4a16").out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("outputs "))
    rows = lines[first + 2 : lines.index("", first)]
    assert len(rows) == 7
    # 128 x 256 codes of 4 bits, two scales of 16 bits a row and a shape of 16 bytes, in each of two layers.
    assert " ".join(rows[0].split()) == (
        "model.layers.*.mlp.down_proj 2 packed I32, scale BF16, shape I64 128 x 256 33.0 KiB"
    )


def test_all_names_every_output_and_its_shard(call: Call, model: Path) -> None:
    called = call("plan", model, "--to", "w4a16", "--all")
    assert called.status == 0
    assert "*" not in called.out
    assert "model.layers.1.mlp.down_proj.weight_packed " in called.out
    assert "model.layers.1.mlp.down_proj.weight_scale " in called.out


def test_the_plan_has_the_sizes_that_come_out(call: Call, model: Path, tmp_path: Path) -> None:
    made = json.loads(call("plan", model, "--to", "w4a16_asym", "--json").out)
    assert call("quantize", model, tmp_path / "out", "--to", "w4a16_asym").status == 0
    assert made["shards"] == [
        {"name": "model.safetensors", "bytes": (tmp_path / "out" / "model.safetensors").stat().st_size}
    ]
    assert [s["name"] for s in made["schemes"]] == ["w4a16_asym"]


def test_a_plan_file_is_carried_out_to_the_same_bytes(call: Call, model: Path, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    asked = ("--recipe", tmp_path / "r.yaml", "--ignore", "*.o_proj")
    assert call("plan", model, *asked, "--out", tmp_path / "plan.json").status == 0
    assert call("quantize", model, tmp_path / "a", *asked).status == 0
    (tmp_path / "r.yaml").unlink()
    assert call("quantize", model, tmp_path / "b", "--plan", tmp_path / "plan.json").status == 0
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_a_plan_of_another_source_is_refused_in_one_line(call: Call, model: Path, tmp_path: Path) -> None:
    assert call("plan", model, "--to", "w8a8", "--out", tmp_path / "plan.json").status == 0
    config = model / "config.json"
    config.write_text(config.read_text().replace("false", "true"))
    called = call("quantize", model, tmp_path / "out", "--plan", tmp_path / "plan.json")
    assert (called.status, called.out) == (1, "")
    assert "plan.json' was made for another model, or for this one before it was changed: " in called.err
    assert called.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_plan_brings_its_own_selection(call: Call, model: Path, tmp_path: Path) -> None:
    assert call("plan", model, "--to", "w8a8", "--out", tmp_path / "plan.json").status == 0
    for option in (("--strict",), ("--ignore", "lm_head"), ("--include", "lm_head")):
        called = call("quantize", model, tmp_path / "out", "--plan", tmp_path / "plan.json", *option)
        assert called.status == 2
        assert "--fit, --kv-scales, --dequantize-first and --dequantize-kept; leave them out" in called.err
    both = call("quantize", model, tmp_path / "out", "--plan", tmp_path / "plan.json", "--to", "w8a8")
    assert both.status == 2
    assert "--to and --plan are given" in both.err


def test_a_plan_of_what_is_dequantized_first_is_carried_out(call: Call, model: Path, tmp_path: Path) -> None:
    assert call("quantize", model, tmp_path / "old", "--to", "w8a8").status == 0
    refused = call("plan", tmp_path / "old", "--to", "mxfp4")
    assert refused.status == 1
    assert "is quantized already" in refused.err
    asked = ("--to", "mxfp4", "--dequantize-first")
    assert call("plan", tmp_path / "old", *asked, "--out", tmp_path / "plan.json").status == 0
    assert call("quantize", tmp_path / "old", tmp_path / "a", *asked).status == 0
    assert call("quantize", tmp_path / "old", tmp_path / "b", "--plan", tmp_path / "plan.json").status == 0
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_what_is_no_plan_is_a_wrong_option(call: Call, model: Path, tmp_path: Path) -> None:
    called = call("quantize", model, tmp_path / "out", "--plan", model / "config.json")
    assert called.status == 2
    assert "zeropoint_plan is None, not 1" in called.err


def test_a_plan_is_not_written_over_something(call: Call, model: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("mine")
    called = call("plan", model, "--to", "w8a8", "--out", tmp_path / "plan.json")
    assert (called.status, called.out) == (1, "")
    assert "exists; name a new file" in called.err
    assert (tmp_path / "plan.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--to", "int4:g256"), "12 linear weights would stay unquantized"),
        (
            ("--to", "w8a8", "--ignore", "*.v_proj"),
            "is kept, but engines run them as one layer; and 1 more such set; give each set",
        ),
    ],
)
def test_strict_refuses_what_nobody_asked_for(
    call: Call, model: Path, options: tuple[str, ...], message: str
) -> None:
    assert call("plan", model, *options).status == 0
    called = call("plan", model, *options, "--strict")
    assert (called.status, called.out) == (1, "")
    assert message in called.err


def test_neither_scheme_nor_recipe_is_a_wrong_command_line(call: Call, model: Path) -> None:
    called = call("plan", model)
    assert called.status == 2
    assert "give exactly one of --to, --recipe; none is given" in called.err


def test_the_schema_of_recipes_is_printed(call: Call) -> None:
    called = call("plan", "--schema")
    assert (called.status, called.err) == (0, "")
    assert json.loads(called.out) == recipe_schema()


def test_sizes_and_engines_come_before_tensors(call: Call, model: Path) -> None:
    lines = call("plan", model, "--to", "w4a16").out.splitlines()
    assert " smaller)" in lines[0]
    assert lines[2].startswith("about ")
    engines, tensors = (
        next(n for n, line in enumerate(lines) if line.startswith(w)) for w in ("engine", "tensors")
    )
    assert 3 < engines < tensors
