"""A wrong input gives one line that says what to do, an exit status, and no traceback."""

import json
import pickle
import signal
from pathlib import Path

import pytest
from tests.cli.conftest import Call, Called

from zeropoint.cli.main import Interrupted, interruptible, main
from zeropoint.errors import ZeropointError
from zeropoint.schemes import PRESETS


def assert_one_line(called: Called, status: int, *parts: str) -> None:
    assert called.status == status
    assert called.out == ""
    assert called.err.startswith("error: ")
    assert called.err.endswith("\n")
    assert called.err.count("\n") == 1
    assert "Traceback" not in called.err
    for part in parts:
        assert part in called.err


USAGE = [
    (["bogus"], "bogus"),
    (["quantize"], "SRC"),
    (["quantize", "a", "b"], "none is given, for example --to w4a16"),
    (["quantize", "a", "b", "w4a16"], "w4a16 is a scheme; did you mean --to w4a16?"),
    (["verify", "a", "b"], "unexpected argument 'b'; did you mean --against b?"),
    (["inspect", "a", "b"], "unexpected extra argument"),
    (["quantize", "", "b", "--to", "w4a16"], "Invalid value for 'SRC': it is empty"),
    (["quantize", "a", " ", "--to", "w4a16"], "Invalid value for 'OUT': it is empty"),
    (["verify", "a", "--against", ""], "Invalid value for '--against': it is empty"),
    (["quantize", "a", "b.safetensors", "--to", "w4a16"], "'b.safetensors' is the name of a file; give the"),
    (
        ["quantize", "a", "b", "--to", "w4a16", "--executor", "spark"],
        "'--executor': 'spark' is not one of 'local', 'ray'",
    ),
    (
        ["quantize", "a", "b", "--to", "q4_k_m", "--format", "awq"],
        "q4_k_m is a mixture of types of GGUF; add --format gguf",
    ),
    (["quantize", "a", "b", "--to", "q6_x"], "w4a16 is the int4 that vLLM and transformers read"),
    (["quantize", "a", "b", "--to", "AWQ"], "AWQ is not a scheme; --format"),
    (
        ["quantize", "a", "b", "--to", "nf4", "--format", "compressed-tensors"],
        "elements that no layout stores",
    ),
    (["quantize", "a", "b", "--to", "xyzzy"], "w4a16 and fp8_dynamic are among the presets"),
    (["quantize", "a", "b", "c", "--to", "w4a16"], "'SRC': 'a' does not exist; check the path"),
    (["inspect", "a", "--depth", "2"], "--depth"),
    (["quantize", "a", "b", "--to", "w4a16", "--workers", "0"], "'0' must be a whole number from 1 on"),
    (
        ["quantize", "a", "b", "--to", "w4a16", "--workers", "two"],
        "'--workers': number of threads 'two' must",
    ),
    (["verify", "a", "--workers", "1.5"], "'1.5' must be a whole number"),
    (["plan", "a", "--recipe", "b.yaml"], "'b.yaml' cannot be read: No such file or directory; check"),
    (["plan", "a", "--recipe", "."], "'.' cannot be read: Is a directory; check the file"),
    (["quantize", "a", "b", "--to", "w4a16", "--max-memory", "2X"], "for example 2G or 512M"),
    (["quantize", "a", "b", "--to", "w4a16", "--max-memory", "-1G"], "for example 2G or 512M"),
    (["quantize", "a", "b", "--to", "w4a16", "--max-memory", "0"], "positive"),
    (["quantize", "a", "b", "--to", "w4a15"], "did you mean w4a16"),
    (
        ["quantize", "a", "b", "--to", "llm_int8", "--format", "compressed-tensors"],
        "llm_int8 is a preset of other layouts; add --format llm-int8",
    ),
    (["quantize", "a", "b", "--to", "int8wo", "--format", "gptq"], "add --format torchao"),
    (["quantize", "a", "b", "--to", "mxpf4"], "mxfp4"),
    (["quantize", "a", "b", "--to", ""], "is empty"),
    (["quantize", "a", "b", "--to", "int4:g0"], "group size (=0)"),
    (["quantize", "a", "b", "--to", "int4:g128:assym"], "did you mean asym?"),
    (["quantize", "a", "b", "--to", "e99m3"], "e99m3"),
    (["quantize", "a", "b", "--to", "nf4:g64", "--format", "compressed-tensors"], "no layout stores"),
    (["quantize", "a", "b", "--to", "w4a16:cast"], "cast"),
    (["quantize", "a", "b", "--to", "nvfp4:scale=serch"], "format 'serch' is unknown; did you mean search?"),
    (["quantize", "a", "b", "--to", "fp8:round=flor"], "round (='flor') is unknown"),
]


@pytest.mark.parametrize(("arguments", "part"), USAGE, ids=[" ".join(a) for a, _ in USAGE])
def test_a_command_line_without_sense_is_a_usage_error(call: Call, arguments: list[str], part: str) -> None:
    assert_one_line(call(*arguments), 2, part)


@pytest.mark.parametrize("preset", [name for name, p in PRESETS.items() if p.static])
def test_a_preset_that_needs_calibration_is_refused_with_its_alternative(call: Call, preset: str) -> None:
    alternative = PRESETS[preset].without_data
    assert alternative is not None
    assert_one_line(call("quantize", "a", "b", "--to", preset), 2, "observed on data", alternative)


def test_a_name_that_is_no_format_is_refused_with_the_closest(call: Call) -> None:
    assert_one_line(call("formats", "float8_e4m3fm"), 2, "did you mean float8_e4m3fn")
    assert_one_line(call("formats", "w4a61"), 2, "w4a16")
    assert_one_line(call("formats", "zzzz"), 2, "format 'zzzz' is unknown; zeropoint formats lists all")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("inspect", "nowhere"), 1),
        (("plan", "a", "--to", "w4a61"), 2),
        (("verify", "nowhere"), 1),
        (("formats", "zz"), 2),
    ],
)
def test_an_error_is_a_document_where_one_was_asked_for(
    call: Call, arguments: tuple[str, ...], status: int
) -> None:
    plain, called = call(*arguments), call(*arguments, "--json")
    assert (called.status, called.err) == (status, plain.err)
    assert json.loads(called.out) == {"error": called.err.removeprefix("error: ").rstrip()}
    assert plain.out == ""


@pytest.mark.parametrize("name", ["awq", "AWQ"])
def test_a_step_alone_names_a_chain(call: Call, name: str) -> None:
    said = "'awq' names no method, which rounds weights after its steps; write awq+mse_weighted"
    assert_one_line(call("quantize", "a", "b", "--to", "w4a16", "--method", name), 2, said)


@pytest.mark.parametrize("name", ["mlx", "MLX"])
def test_a_layout_in_the_place_of_a_method_names_its_option_and_the_closest_method(
    call: Call, name: str
) -> None:
    said = f"--format {name.lower()} writes, and its own method is not here; --method shift+gptq"
    assert_one_line(call("quantize", "a", "b", "--to", "w4a16", "--method", name), 2, said)


@pytest.mark.parametrize("command", ["quantize", "inspect", "verify"])
def test_a_directory_that_is_not_there_is_named(call: Call, tmp_path: Path, command: str) -> None:
    extra = (tmp_path / "out", "--to", "w4a16") if command == "quantize" else ()
    nowhere = call(command, tmp_path / "nowhere", *extra)
    assert_one_line(nowhere, 1, "nowhere' cannot be opened: No such file", "hf download ORG/NAME")
    assert not (tmp_path / "out").exists()


def test_a_directory_without_weights_is_no_model(call: Call, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_one_line(call("inspect", tmp_path / "empty"), 1, "safetensors")


def test_a_pickle_is_never_opened(call: Call, model: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "pytorch_model.bin"):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_bytes(pickle.dumps({"weight": [1.0]}))
        assert_one_line(call("quantize", folder, tmp_path / "out", "--to", "w4a16"), 1, "safetensors")
    assert not (tmp_path / "out").exists()


def test_an_output_with_files_is_kept(call: Call, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("keep me")
    assert_one_line(call("quantize", model, out, "--to", "w4a16"), 1, "precious", "overwrite")
    assert [path.name for path in out.iterdir()] == ["precious"]


def test_the_source_is_no_output(call: Call, model: Path) -> None:
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    assert_one_line(call("quantize", model, model, "--to", "w4a16", "--overwrite"), 1, "is the source")
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


def test_a_quantized_checkpoint_is_not_quantized_again(call: Call, model: Path, tmp_path: Path) -> None:
    assert call("quantize", model, tmp_path / "out", "--to", "w4a16").status == 0
    assert_one_line(
        call("quantize", tmp_path / "out", tmp_path / "again", "--to", "w4a16"), 1, "quantized already"
    )
    assert_one_line(call("verify", model), 1, "is not quantized", "pass the output of zeropoint quantize")
    one = call("verify", tmp_path / "out" / "model.safetensors", "--against", model)
    assert_one_line(one, 1, "model.safetensors' is one file, without a configuration; pass its directory")


def test_a_pattern_that_names_nothing_is_a_slip(call: Call, model: Path, tmp_path: Path) -> None:
    called = call("quantize", model, tmp_path / "out", "--to", "w4a16", "--ignore", "*.down_prj")
    assert_one_line(called, 1, "down_prj", "matches no tensor")


@pytest.mark.parametrize("pattern", ["re:(?:.?.?)*!", "re:(?:aa?)*b"])
def test_a_pattern_that_could_take_forever_is_refused_wherever_it_stands(
    pattern: str, call: Call, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text(
        f"default: w4a16\nrules:\n  - name: {json.dumps(pattern)}\n    keep: true\n"
    )
    assert call("plan", model, "--to", "w4a16", "--out", tmp_path / "plan.json").status == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    plan["request"]["ignore"] = [pattern]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    for status, *option in (
        (1, "--to", "w4a16", "--include", pattern),
        (1, "--to", "w4a16", "--ignore", pattern),
        (2, "--recipe", tmp_path / "recipe.yaml"),
        (2, "--plan", tmp_path / "plan.json"),
    ):
        called = call("quantize", model, tmp_path / "out", *option)
        assert_one_line(called, status, "is refused: a group that repeats holds repeats")
    assert not (tmp_path / "out").exists()


def test_strict_refuses_what_would_be_kept_for_its_shape(call: Call, model: Path, tmp_path: Path) -> None:
    relaxed = call("quantize", model, tmp_path / "a", "--to", "int4:g256")
    assert relaxed.status == 0
    assert "is not a multiple of the group" in " ".join(relaxed.out.split())
    assert_one_line(
        call("quantize", model, tmp_path / "b", "--to", "int4:g256", "--strict"), 1, "would stay unquantized"
    )


def test_too_little_memory_is_said_before_anything_is_written(
    call: Call, model: Path, tmp_path: Path
) -> None:
    called = call("quantize", model, tmp_path / "out", "--to", "w4a16", "--max-memory", "1M")
    assert_one_line(called, 1, "--max-memory 1M is too little: Python and torch alone need 400M")
    assert not (tmp_path / "out").exists()


def test_a_name_that_would_drive_the_terminal_is_escaped(call: Call, model: Path) -> None:
    evil = "\x1b[31mred\x1b[0m\nerror: fake"
    assert_one_line(call("inspect", model / evil), 1)
    assert "\x1b" not in call("formats", evil).err


def test_a_configuration_that_cannot_be_read_is_an_error(call: Call, model: Path, tmp_path: Path) -> None:
    (model / "config.json").write_text(json.dumps({"a": 1})[:-1])
    called = call("quantize", model, tmp_path / "out", "--to", "w4a16")
    assert_one_line(called, 1)
    assert "is not a valid configuration" in called.err
    assert not (tmp_path / "out").exists()
    assert "is not a valid configuration" in " ".join(call("inspect", model).out.split())


@pytest.mark.parametrize("error", [MemoryError(), OSError("the disk is gone"), ZeropointError("no")])
def test_an_error_of_any_kind_is_one_line_and_the_status_of_failure(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(arguments: object) -> int:
        raise error

    monkeypatch.setattr("zeropoint.cli.app.call", fails)
    assert main(["formats"]) == 1
    said = str(error) or "out of memory; use --max-memory or fewer --workers"
    assert capsys.readouterr() == ("", f"error: {said}\n")


def test_a_second_signal_ends_the_process_at_once() -> None:
    handlers: list[object] = []

    def interrupted() -> None:
        with interruptible():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                handlers.extend(map(signal.getsignal, (signal.SIGINT, signal.SIGTERM)))

    with pytest.raises(Interrupted):
        interrupted()
    assert handlers == [signal.SIG_DFL] * 2
