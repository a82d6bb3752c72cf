"""The command line and Python are two doors to one thing: each option of a command is one of its function."""

import ast
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.cli.checkpoints import write_llama
from tests.cli.conftest import Call

import zeropoint as zp
from zeropoint.cli.app import app
from zeropoint.codecs.names import MODULES, NAMES
from zeropoint.codecs.registry import CODECS
from zeropoint.recipes import parse_recipe
from zeropoint.results import Result

FUNCTIONS = {
    "quantize": "quantize_checkpoint",
    "plan": "plan_checkpoint",
    "search": "search_checkpoint",
    "dequantize": "dequantize_checkpoint",
    "compare": "compare_checkpoints",
    "eval": "evaluate_checkpoint",
    "kv-scales": "add_kv_scales",
    "statistics": "gather_statistics",
    "convert": "convert_checkpoint",
    "rotate": "rotate_checkpoint",
    "distill": "distill_checkpoint",
    "inspect": "inspect_checkpoint",
    "verify": "verify_checkpoint",
    "report": "report_checkpoint",
    "formats": None,
    "warmup": None,
    "demo": None,
    "doctor": None,
    "bench": None,
}
"""Command to the function of ``zeropoint`` that it calls, or None."""
OF_A_TERMINAL = {
    "all": "a result holds every tensor",
    "json": "result.to_json(), result.to_dict()",
    "sort": "sorted(result.outcomes, key=lambda outcome: -outcome.error.relative)",
    "require": "found.equality.of_bits",
    "schema": "zp.recipes.recipe_schema()",
}
"""Option of a command to what stands in its place in Python."""
OF_PYTHON = {"progress": "the command always shows it"}
"""Argument of a function that no option is, and why."""

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def options_of(command: str) -> set[str]:
    """Return the words of a command, as they are written: arguments by their place, options by their name."""
    found = set()
    for parameter in COMMANDS[command].params:
        long = [name.removeprefix("--") for name in parameter.opts if name.startswith("--")]
        found |= {name.replace("-", "_") for name in long} or {parameter.name}
    return found - {"help"}


def test_every_command_has_its_function() -> None:
    assert set(FUNCTIONS) == set(COMMANDS)
    assert all(callable(getattr(zp, name, None)) for name in FUNCTIONS.values() if name is not None)


@pytest.mark.parametrize("command", [name for name, function in FUNCTIONS.items() if function is not None])
def test_both_doors_have_the_same_options(command: str) -> None:
    names = set(inspect.signature(getattr(zp, str(FUNCTIONS[command]))).parameters)
    assert options_of(command) - OF_A_TERMINAL.keys() == names - OF_PYTHON.keys()


def test_what_one_door_alone_has_is_used() -> None:
    of_commands = {option for command in FUNCTIONS for option in options_of(command)}
    assert OF_A_TERMINAL.keys() <= of_commands
    of_functions = {
        name
        for function in FUNCTIONS.values()
        if function is not None
        for name in inspect.signature(getattr(zp, function)).parameters
    }
    assert OF_PYTHON.keys() <= of_functions


def test_the_names_of_formats_are_those_of_the_registry() -> None:
    assert tuple(CODECS) == NAMES
    assert {name: found.container for name, found in MODULES.items()} == {
        name: codec.container for name, codec in CODECS.items()
    }


def both(call: Call, command: str, *words: object, **options: object) -> tuple[Any, Any]:
    """Return the documents of a command and of its function."""
    given = [str(w) for w in words]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        given += [flag] if value is True else [flag, str(value)]
    called = call(command, *given, "--json")
    assert called.status == 0, called.err
    found = json.loads(called.out)
    found.pop("seconds", None)
    result: Result = getattr(zp, str(FUNCTIONS[command]))(*words, **options)
    return found, json.loads(result.to_json())


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("plan", {"to": "w8a8", "ignore": "*.down_proj", "strict": True, "workers": 1, "max_memory": "1G"}),
        ("plan", {"recipe": "llama", "method": "mse"}),
        (
            "search",
            {"budget": "5bpw", "candidates": "w4a16,w8a16", "ignore": "*.up_proj", "max_memory": "1G"},
        ),
        ("inspect", {}),
    ],
)
def test_a_command_and_its_function_give_one_document(
    call: Call, model: Path, command: str, options: dict[str, object]
) -> None:
    of_command, of_function = both(call, command, model, **options)
    for document in (of_command, of_function):
        document.get("request", {}).get("recipe", {}).pop("name", None)
    assert of_command == of_function


RECIPE = "default: w4a16\nrules: [{name: '*.down_proj', preset: w8a16}]\n"


@pytest.mark.parametrize(
    "given",
    [
        lambda folder: folder / "recipe.yaml",
        lambda folder: str(folder / "recipe.yaml"),
        lambda _: RECIPE,
        lambda _: parse_recipe(RECIPE),
        lambda folder: zp.recipes.load_recipe(folder / "recipe.yaml"),  # type: ignore[attr-defined]
    ],
)
def test_a_recipe_is_a_path_a_text_or_an_object(
    model: Path, tmp_path: Path, given: Callable[[Path], Any]
) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    recipe = given(tmp_path)
    schemes = lambda plan: {str(w.layer.weight).partition(":scale")[0] for w in plan.weights}
    assert schemes(zp.plan_checkpoint(model, recipe=recipe)) == {"int4:g128", "int8:g128"}
    if not isinstance(recipe, str):
        assert schemes(zp.plan_checkpoint(model, recipe)) == {"int4:g128", "int8:g128"}


def test_a_family_and_the_recipe_of_a_search_are_recipes(model: Path, tmp_path: Path) -> None:
    assert zp.plan_checkpoint(model, recipe="llama").weights
    found = zp.search_checkpoint(model, "6bpw", out=tmp_path / "r.yaml", plot=tmp_path / "p.svg")
    assert zp.plan_checkpoint(model, recipe=found.recipe).summary == found.plan.summary
    assert zp.plan_checkpoint(model, recipe=tmp_path / "r.yaml").summary == found.plan.summary
    assert (tmp_path / "p.svg").read_text().startswith("<svg")
    assert (tmp_path / "r.yaml.search").exists()


def test_errors_name_options_as_the_reader_writes_them(call: Call, model: Path, tmp_path: Path) -> None:
    zp.quantize_checkpoint(model, tmp_path / "out", "w4a16")
    with pytest.raises(zp.CheckpointError, match=r"overwrite=True$"):
        zp.quantize_checkpoint(model, tmp_path / "out", "w8a16")
    assert call("quantize", model, tmp_path / "out", "--to", "w8a16").err.endswith("--overwrite\n")
    with pytest.raises(zp.CheckpointError, match=r"max_memory='1M' is too little"):
        zp.plan_checkpoint(model, "w4a16", max_memory="1M")
    assert "--max-memory 1M is too little" in call("plan", model, "--to", "w4a16", "--max-memory", "1M").err
    with pytest.raises(zp.OptionError, match="size 'lots' must be a positive number with K, M, G or T"):
        zp.verify_checkpoint(tmp_path / "out", max_memory="lots")
    long = call("plan", model, "--to", "w4a16", "--max-memory", "9" * 400).err
    assert f"size '{'9' * 199}...' (400 characters) must be a positive number with K" in long
    with pytest.raises(zp.SchemeError, match="int4 has one scale for a whole weight"):
        zp.quantize_checkpoint(model, tmp_path / "other", "int4")


def test_progress_is_a_bar_or_a_function(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, int, str]] = []
    for number, progress in enumerate((lambda *step: seen.append(step), True, False)):
        zp.quantize_checkpoint(model, tmp_path / f"{number}", "w4a16", progress=progress)
    assert seen[-1][0] == seen[-1][1] > 0
    zp.verify_checkpoint(tmp_path / "0", model, progress=lambda *step: seen.append(step))
    zp.compare_checkpoints(tmp_path / "0", model, progress=lambda *step: seen.append(step))
    assert capsys.readouterr().err == ""


def test_a_plan_file_and_a_run_that_is_dequantized_go_by_python(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source")
    zp.plan_checkpoint(source, "w8a16", out=tmp_path / "plan.json")
    run = zp.quantize_checkpoint(source, tmp_path / "out", plan=tmp_path / "plan.json", workers=1)
    assert {str(layer) for layer in run.plan.layers} == {"w8a16"}
    zp.dequantize_checkpoint(tmp_path / "out", tmp_path / "floats", dtype="float32")
    assert zp.compare_checkpoints(tmp_path / "out", tmp_path / "floats").equality.of_bits
    again = zp.quantize_checkpoint(tmp_path / "out", tmp_path / "two", "w4a16", dequantize_first=True)
    assert again.plan.weights
    with pytest.raises(zp.OptionError, match="a plan has its own method="):
        zp.quantize_checkpoint(source, tmp_path / "x", plan=tmp_path / "plan.json", ignore="*")


OTHER_TOOLS = (
    "hf download",
    "--local-dir",
    "ray start",
    "optimum-cli",
    "zeropoint plan --out",
    " --against ",
    "(other names: --all",
)
"""What sentences say of commands of other tools, of a command that is named, and of reports alone."""


def sentences(path: Path) -> list[str]:
    """Return the texts of a module that are no docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = (
        node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return [node.value for node in texts if id(node) not in docs]


def test_sentences_below_the_command_line_name_options_by_the_function_for_it() -> None:
    source = Path(zp.__file__).parent
    found = {
        (str(path.relative_to(source)), text)
        for path in source.rglob("*.py")
        if path.parts[len(source.parts)] not in ("cli", "errors.py")
        for text in sentences(path)
        if re.search(r"(?<![\w-])--[a-z]", text) and not any(tool in text for tool in OTHER_TOOLS)
    }
    assert found == set()
