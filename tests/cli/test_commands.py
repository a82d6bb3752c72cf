"""Each command does what its help says, in words and as JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.cli.conftest import Call, Called
from typer.testing import CliRunner

from zeropoint import __version__
from zeropoint.cli.app import app
from zeropoint.codecs.compressed_tensors import CODEC
from zeropoint.codecs.registry import CODECS
from zeropoint.formats import CATALOG
from zeropoint.methods import OF_CODES, OF_TABLES, ROTATING, methods, steps
from zeropoint.schemes import PRESETS

COMMANDS = ("plan", "quantize", "convert", "rotate", "distill", "kv-scales", "inspect", "verify", "formats")


def document(called: Called) -> dict[str, Any]:
    """Return the JSON document on stdout, which must be all there is, and without NaN or Infinity."""
    assert called.status == 0
    assert called.err == ""

    def refuse(text: str) -> float:
        raise ValueError(text)

    found = json.loads(called.out, parse_constant=refuse)
    assert isinstance(found, dict)
    return found


def test_what_no_engine_loads_is_refused_unless_forced(call: Call, model: Path, tmp_path: Path) -> None:
    line = ("quantize", model, tmp_path / "out", "--to", "w8a8", "--include", "*embed_tokens")
    refused = call(*line)
    assert refused.status == 1
    assert "quantized embeddings and routers are read where weights alone are quantized" in refused.err
    assert "add --force" in refused.err
    assert not (tmp_path / "out").exists()
    forced = call(*line, "--force")
    assert forced.status == 0
    assert "transformers: does not load it, since quantized embeddings" in " ".join(forced.out.split())


def test_a_model_that_nobody_has_loaded_is_said_to_be_unchecked(
    call: Call, model: Path, tmp_path: Path
) -> None:
    text = "transformers: not checked for this architecture"
    known = call("quantize", model, tmp_path / "known", "--to", "w8a16")
    assert "transformers" not in known.out
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "unheard_of"}))
    assert text in call("quantize", model, tmp_path / "out", "--to", "w8a16").out
    assert "not checked for this architecture" in " ".join(call("plan", model, "--to", "w8a16").out.split())


@pytest.mark.parametrize("name", ["adapter_config.json", "lora"])
def test_an_adapter_is_no_model(name: str, call: Call, tmp_path: Path) -> None:
    folder, weights = tmp_path / "adapter", torch.zeros(8, 32)
    folder.mkdir()
    module = "base_model.model.layers.0.mlp.up_proj" + (".lora_A" if name == "lora" else "")
    save_file({f"{module}.weight": weights}, folder / "adapter_model.safetensors")
    if name != "lora":
        (folder / name).write_text("{}")
    called = call("quantize", folder, tmp_path / "out", "--to", "w8a8")
    assert called.status == 1
    assert "is an adapter (it holds " in called.err
    assert "merge it into its base model first" in called.err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"Examples:\n    zeropoint {command}" in result.output
    assert "\b" not in result.output


@pytest.mark.parametrize(
    ("command", "options"),
    [("eval", {"--against", "--text"}), ("search", {"--budget"}), ("distill", {"--calibration"})],
)
def test_help_has_required_options_in_a_group_of_their_own(command: str, options: set[str]) -> None:
    shown = CliRunner().invoke(app, [command, "--help"]).stdout
    group = shown.partition("\nRequired:\n")[2].partition("\n\n")[0]
    assert {word for word in group.split() if word.startswith("--")} >= options
    assert "[required]" not in shown.replace(group, "").partition("\n\nRequired")[2]


def test_help_names_every_method_of_checkpoints() -> None:
    shown = CliRunner().invoke(app, ["quantize", "--help"]).stdout
    said = " ".join(shown.split()).partition("The method and its data:")[2].partition(".")[0]
    assert {word.strip(",") for word in said.split()} >= methods().keys() - {*OF_CODES, *OF_TABLES, ROTATING}
    before = " ".join(shown.split()).partition("Steps stand before a method:")[2].partition(", such as")[0]
    assert {word.strip(",") for word in before.split()} == steps().keys() - {"bias", "lowrank"}


def test_a_slip_in_the_name_of_a_method_brings_up_those_that_checkpoints_take(tmp_path: Path) -> None:
    for slip in ("kmean", "loseless", "hadamrd", "zzz"):
        call = ["quantize", str(tmp_path), str(tmp_path / "out"), "--to", "int4:g128", "--method", slip]
        said = CliRunner().invoke(app, call).stderr
        assert f"method '{slip}' is unknown; " in said
        assert not any(name in said.partition(";")[2] for name in (*OF_CODES, *OF_TABLES, ROTATING))


def test_help_of_the_whole_names_every_command_and_fits_80_columns() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(f"  {command} " in result.output for command in COMMANDS)
    assert "zeropoint quantize MODEL OUT --to w4a16" in result.output
    assert max(map(len, result.output.splitlines())) <= 80
    assert "..." not in result.output.replace("[ARGS]...", "")


def test_no_command_at_all_shows_the_help(call: Call) -> None:
    called = call()
    assert (called.status, called.err) == (0, "")
    assert called.out.startswith("Usage: zeropoint")


def test_version_is_the_one_of_the_package(call: Call) -> None:
    assert call("--version") == Called(0, f"zeropoint {__version__}\n", "")


def test_quantize_says_what_happened_to_each_tensor_and_why(call: Call, model: Path, tmp_path: Path) -> None:
    called = call("quantize", model, tmp_path / "out", "--to", "w4a16")
    assert (called.status, called.err) == (0, "")
    assert "quantized to w4a16: a linear weight" in called.out
    assert "kept: an embedding" in called.out
    assert "model.layers.*.mlp.down_proj" in called.out
    folded, _, single = called.out.partition("the worst\n")
    assert "model.layers.0" not in folded
    assert single.count("  model.layers.") == 5
    assert (tmp_path / "out" / "model.safetensors").exists()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"
    lines = called.out.splitlines()
    assert all(line == line.rstrip() for line in lines)


def test_a_file_of_codes_alone_is_not_called_unquantized(call: Call, model: Path, tmp_path: Path) -> None:
    assert call("quantize", model, tmp_path / "out", "--to", "w4a16").status == 0
    called = call("inspect", tmp_path / "out" / "model.safetensors")
    assert called.status == 0
    assert (
        "quantized, but no configuration says how, so values are not counted; pass the directory whose"
        in called.out
    )
    assert "not quantized" not in called.out
    assert "not quantized" in call("inspect", model / "model.safetensors").out


def test_all_shows_every_tensor(call: Call, model: Path, tmp_path: Path) -> None:
    called = call("quantize", model, tmp_path / "out", "--to", "w4a16", "--all")
    assert called.status == 0
    assert "model.layers.0.mlp.down_proj" in called.out
    assert "*" not in called.out


@pytest.mark.rotating
@pytest.mark.parametrize("scheme", [name for name, preset in CODEC.presets.items() if not preset.static])
def test_every_preset_is_quantized_and_proven(call: Call, model: Path, tmp_path: Path, scheme: str) -> None:
    made = document(call("quantize", model, tmp_path / "out", "--to", scheme, "--json"))
    assert [s["name"] for s in made["schemes"]] == [scheme]
    assert len(made["weights"]) == 14
    assert 0 < made["error"]["relative"] < 0.2
    assert {t["action"] for t in made["tensors"]} == {"quantized", "kept"}
    proof = document(call("verify", tmp_path / "out", "--against", model, "--json"))
    assert proof["ok"] is True
    assert proof["problems"] == []
    assert max(layer["of_bound"] for layer in proof["layers"]) <= 1


def test_a_scheme_of_ones_own_is_taken(call: Call, model: Path, tmp_path: Path) -> None:
    made = document(call("quantize", model, tmp_path / "out", "--to", "int6:g64:asym", "--json"))
    assert made["schemes"][0]["weight"].startswith("int6:g64")


def test_include_and_ignore_decide(call: Call, model: Path, tmp_path: Path) -> None:
    patterns = ("--include", "lm_head", "--ignore", "*.down_proj", "--ignore", "re:.*layers.0.*")
    made = document(call("quantize", model, tmp_path / "out", "--to", "w8a8", *patterns, "--json"))
    actions = {t["name"]: (t["action"], t["why"]) for t in made["tensors"]}
    assert actions["lm_head.weight"] == ("quantized", "user")
    assert actions["model.layers.1.mlp.down_proj.weight"] == ("kept", "user")
    assert actions["model.layers.0.self_attn.q_proj.weight"] == ("kept", "user")
    assert actions["model.layers.1.self_attn.q_proj.weight"] == ("quantized", "linear")


def test_workers_and_memory_change_no_byte(call: Call, model: Path, tmp_path: Path) -> None:
    for out, options in (("a", ()), ("b", ("--workers", 1, "--max-memory", "600M"))):
        assert call("quantize", model, tmp_path / out, "--to", "nvfp4a16", *options).status == 0
    files = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("a", "b")]
    assert files[0] == files[1]


def test_overwrite_replaces_an_output(call: Call, model: Path, tmp_path: Path) -> None:
    assert call("quantize", model, tmp_path / "out", "--to", "w4a16").status == 0
    assert call("quantize", model, tmp_path / "out", "--to", "mxfp4", "--overwrite").status == 0
    found = document(call("inspect", tmp_path / "out", "--json"))
    assert [s["layout"] for s in found["schemes"]] == ["mxfp4-pack-quantized"]


def test_inspect_tells_an_original_from_a_quantized_one(call: Call, model: Path, tmp_path: Path) -> None:
    assert call("quantize", model, tmp_path / "out", "--to", "fp8_dynamic").status == 0
    before, after = call("inspect", model), call("inspect", tmp_path / "out")
    assert "not quantized" in before.out
    assert "quantized by compressed-tensors" in after.out
    assert "float-quantized" in after.out
    found = document(call("inspect", model, "--json"))
    assert found["quantization"] is None
    assert sum(t["bytes"] for t in found["tensors"]) == found["bytes"]


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_an_output_is_not_complained_about(command: str, call: Call, model: Path, tmp_path: Path) -> None:
    assert call("quantize", model, tmp_path / "out", "--to", "w4a16").status == 0
    called = call(command, tmp_path / "out")
    assert called.status == 0
    assert "note:" not in called.out + called.err
    assert "problem" not in called.out.replace("no problem found", "")


def test_inspect_says_who_packed_what_it_does_not_read(call: Call, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "spqr", "bits": 4}
    (model / "config.json").write_text(json.dumps(config))
    shown = call("inspect", model)
    assert shown.status == 0
    assert "packed by SpQR (quant_method is 'spqr'), 4 bits a weight; " in shown.out
    assert "values are not counted" in shown.out
    found = document(call("inspect", model, "--json"))
    assert (found["values"], found["bits_per_value"], found["bits"]) == (None, None, 4)


def test_verify_fails_when_a_byte_is_wrong(call: Call, model: Path, tmp_path: Path) -> None:
    assert call("quantize", model, tmp_path / "out", "--to", "w8a8").status == 0
    shard = tmp_path / "out" / "model.safetensors"
    data = bytearray(shard.read_bytes())
    where = len(data) - 1  # the codes lie last
    data[where] ^= 0x55
    shard.write_bytes(data)
    called = call("verify", tmp_path / "out", "--against", model)
    assert called.status == 1
    assert "problem: " in called.out
    assert called.err.startswith("error: 2 problems found in ")
    assert "the first: 'model." in called.err
    assert called.err.count("\n") == 1
    as_json = call("verify", tmp_path / "out", "--against", model, "--json")
    assert as_json.status == 1
    assert json.loads(as_json.out)["ok"] is False


def test_verify_without_the_original_decodes_only(call: Call, model: Path, tmp_path: Path) -> None:
    assert call("quantize", model, tmp_path / "out", "--to", "mxfp8").status == 0
    called = call("verify", tmp_path / "out")
    assert called.status == 0
    assert "every byte hashed no problem found, in " in " ".join(called.out.split())
    (tmp_path / "out" / "zeropoint_manifest.json").unlink()
    called = call("verify", tmp_path / "out")
    assert called.status == 0
    assert "note: there is no zeropoint_manifest.json" in " ".join(called.out.split())
    assert "hashed" not in called.out


def test_verify_names_where_each_problem_is(call: Call, model: Path, tmp_path: Path) -> None:
    """In the report, in the line of the error, and in the document; the exit status is 1 for each."""
    assert call("quantize", model, tmp_path / "out", "--to", "mxfp8").status == 0
    (tmp_path / "out" / "config.json").write_text((tmp_path / "out" / "config.json").read_text() + " ")
    called = call("verify", tmp_path / "out")
    assert called.status == 1
    assert "problem: 'config.json': it has " in " ".join(called.out.split())
    assert called.err.startswith(
        f"error: 1 problem found in '{tmp_path / 'out'}', the first: 'config.json': it has "
    )
    as_json = call("verify", tmp_path / "out", "--json")
    assert as_json.status == 1
    (problem,) = json.loads(as_json.out)["problems"]
    assert problem["where"] == "config.json"
    assert problem["what"].startswith("it has ")
    assert json.loads(as_json.out)["hashed"] is True


def test_formats_lists_formats_and_presets(call: Call) -> None:
    called = call("formats")
    assert called.status == 0
    assert all(name in called.out for name in ("float8_e4m3fn", "nf4", "mx9_element", *PRESETS))
    found = document(call("formats", "--json"))
    assert [f["name"] for f in found["formats"]] == list(CATALOG)
    assert [p["name"] for p in found["presets"]] == list(PRESETS)


@pytest.mark.crossed
@pytest.mark.parametrize(
    "name", [*CATALOG, "e4m3", "e3m4", "uint5", *PRESETS, "codebook[1,2,3]", "int4:g64:asym"]
)
def test_every_name_has_a_page_and_a_document(call: Call, name: str) -> None:
    called = call("formats", name)
    assert (called.status, called.err) == (0, "")
    assert "name" in document(call("formats", name, "--json"))


def test_the_page_of_a_scheme_says_its_parts(call: Call) -> None:
    found = document(call("formats", "INT4:g64:scale=bfloat16", "--json"))
    assert (found["kind"], found["element"], found["scales"]) == ("scheme", "int4", ["bfloat16@g64"])
    assert found["bits_per_value"] == 4.25
    wrong = call("formats", "int4:g64:color=red")
    assert (wrong.status, wrong.out) == (2, "")
    assert "option 'color=red' of scheme 'int4:g64:color=red' is unknown" in wrong.err


def test_the_page_of_a_small_format_lists_every_value(call: Call) -> None:
    called = call("formats", "fp4")
    assert all(f"0x{code:X} " in called.out for code in range(16))
    values = document(call("formats", "fp4", "--json"))["values"]
    assert values[:8] == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert str(values[8]) == "-0.0"
    assert document(call("formats", "e4m3", "--json"))["values"][0x7F] == "nan"
    assert "values" not in document(call("formats", "float16", "--json"))


@pytest.mark.parametrize(
    ("name", "to"), [("gptq", "int4:g32"), ("fp8-block", "float8_e4m3fn:block32x32"), ("gguf", "int8:g32")]
)
def test_a_format_is_written_recognized_and_verified(
    name: str, to: str, call: Call, model: Path, tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    assert call("quantize", str(model), out, "--to", to, "--format", name).status == 0
    assert call("verify", out, "--against", str(model)).status == 0
    assert f"quantized by {CODECS[name].methods[0]}" in call("inspect", out).out


def test_an_unknown_format_lists_those_that_there_are(call: Call, model: Path, tmp_path: Path) -> None:
    called = call("quantize", str(model), str(tmp_path / "out"), "--to", "w4a16", "--format", "gptqq")
    assert called.status == 2
    assert "format 'gptqq' is unknown; did you mean gptq or" in called.err
    called = call("quantize", str(model), str(tmp_path / "out"), "--to", "w4a16", "--format", "zzz")
    assert all(name in called.err for name in CODECS)
    assert call("plan", model, "--to", "w4a16", "--format", "GPTQ").status == 0
    named = call("quantize", str(model), str(tmp_path / "out"), "--to", "gptq")
    assert "--format chooses the layout" in named.err
