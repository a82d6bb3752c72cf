"""What a command loads before it does anything: only what it may need."""

import operator
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
from tests.cli.checkpoints import write_llama

import zeropoint as zp
from zeropoint import __version__, names_elsewhere
from zeropoint.cli import lazy
from zeropoint.deferred_names import deferred_names

# A process of the command, distinguished from one that imports the library by its arguments.
SAYS_WHAT_IS_LOADED = """
import atexit, sys
atexit.register(lambda: print("loaded:", *sys.modules, file=sys.stderr))
import runpy
sys.orig_argv[:] = ["python", "-m", "zeropoint", *sys.argv[1:]]
runpy.run_module("zeropoint", run_name="__main__")
"""


def command(*arguments: str) -> tuple[int, str, str, set[str]]:
    """Return the exit status of a command, what it says, and the modules that it has loaded."""
    # Which shell started the tests must not matter to what is printed for bash.
    environment = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    child = subprocess.run(
        [sys.executable, "-c", SAYS_WHAT_IS_LOADED, *arguments],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said, _, loaded = child.stderr.partition("loaded:")
    return child.returncode, child.stdout, said, set(loaded.split())


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ([], 0, "Usage: zeropoint"),
        (["--help"], 0, "Usage: zeropoint"),
        (["-h"], 0, "Usage: zeropoint"),
        (["quantize", "--help"], 0, "--dequantize-first"),
        (["verify", "-h"], 0, "--against"),
        (["--version"], 0, f"zeropoint {__version__}"),
        (["--show-completion", "bash"], 0, "complete -o default"),
        (["quantise"], 2, "see zeropoint --help"),
        (["quantize"], 2, "Missing argument 'SRC' or 'OUT'; see zeropoint quantize --help"),
        (["quantize", "a", "b"], 2, "none is given, for example --to w4a16"),
        (["quantize", "a", "b", "--too", "w4a16"], 2, "No such option: --too"),
        (["quantize", "a", "b", "--to", "w4a61"], 2, "did you mean w4a16"),
        (["quantize", "a", "b", "w4a16"], 2, "did you mean --to w4a16?"),
        (["quantize", "a", "b", "--to", "gptq"], 2, "gptq is not a scheme; --format"),
        (["inspect", ""], 2, "is empty"),
    ],
)
def test_help_the_version_and_slips_are_answered_before_torch_is_loaded(
    arguments: list[str], status: int, said: str
) -> None:
    found, out, err, loaded = command(*arguments)
    assert (found, said in out + err) == (status, True), out + err
    assert "zeropoint.cli.app" in loaded
    assert {"torch", "numpy", "numba", "rich.table"}.isdisjoint(loaded)


def test_the_command_line_loads_neither_models_nor_kernels(tmp_path: Path) -> None:
    status, _, _, loaded = command("inspect", str(write_llama(tmp_path / "model")))
    assert status == 0
    assert "zeropoint.checkpoint.verify.inspection" in loaded
    parts = ("models", "prepared", "stats", "training", "kernels")
    assert [name for name in loaded if name.startswith(tuple(f"zeropoint.{part}" for part in parts))] == []
    assert {"numba", "transformers", "ray", "fsspec"}.isdisjoint(loaded)


def test_a_program_has_the_operators_as_soon_as_zeropoint_is_imported() -> None:
    code = "import zeropoint, torch; print(torch.ops.zeropoint.linear)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout == "zeropoint.linear\n"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_torch_is_loaded_is_one_line(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """Torch is loaded for the first word that needs it; here that sends the signal."""
    (tmp_path / "torch.py").write_text(
        f"import os, time\nos.kill(os.getpid(), {int(number)})\ntime.sleep(60)\n"
    )
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {SAYS_WHAT_IS_LOADED}"
    child = subprocess.run(
        [sys.executable, "-c", code, "inspect", "x"], capture_output=True, text=True, check=False
    )
    by = "" if number == signal.SIGINT else " by SIGTERM"
    assert (child.returncode, child.stdout, child.stderr) == (status, "", f"error: interrupted{by}\n")


def test_a_second_interrupt_at_the_end_is_one_line_too(tmp_path: Path) -> None:
    """After the work, while the report is written or the interpreter ends."""
    code = SAYS_WHAT_IS_LOADED.replace(
        'print("loaded:", *sys.modules, file=sys.stderr)',
        "(__import__('os').kill(__import__('os').getpid(), 2))",
    )
    started = time.monotonic()
    child = subprocess.run([sys.executable, "-c", code, "-V"], capture_output=True, text=True, check=False)
    assert (child.returncode, child.stderr) == (130, "error: interrupted\n")
    assert time.monotonic() - started < 60


def test_every_public_name_is_there_and_nothing_else_is_listed() -> None:
    assert {name for name in zp.__all__ if not hasattr(zp, name)} == set()
    parts = {"models", "prepared", "recipes", "stats", "training"}
    assert set(dir(zp)) == set(zp.__all__) | parts
    assert zp.stats is sys.modules["zeropoint.stats"]


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'zeropoint' has no attribute 'quantise'"):
        operator.attrgetter("quantise")(zp)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("QuantizationScheme", "it is zeropoint.params.burn.QuantizationScheme (docs/reference/"),
        ("QuantizedDType", "it is zeropoint.params.torsh.QuantizedDType"),
        ("Dtype", "it is zeropoint.recipes.Dtype"),
        ("LearnedScale", "it is zeropoint.training.LearnedScale"),
        ("Observer", "it is zeropoint.stats.Observer"),
        ("QuantizePerChannelPlan", 'plan("quantize", "int8:channel", shape) does its work'),
        ("MinMaxObserver", "see docs/migration/torch.md"),
        ("quantize_", "see docs/migration/torchao.md"),
        ("Unheard", "docs/coming_from.md says where the names of other libraries are"),
    ],
)  # fmt: skip
def test_names_of_other_libraries_are_pointed_to(name: str, place: str) -> None:
    for module in (zp, zp.models):
        with pytest.raises(AttributeError) as caught:
            operator.attrgetter(name)(module)
        assert str(caught.value).startswith(f"module {module.__name__!r} has no attribute '{name}'; ")
        assert place in str(caught.value)


def test_what_names_of_other_libraries_are_pointed_to_is_there() -> None:
    for module, names in names_elsewhere._OWN.items():
        assert [name for name in names if not hasattr(import_module(module), name)] == []
    folder = Path(__file__).parents[2] / "docs" / "migration"
    assert [page for page in names_elsewhere._PAGES if not (folder / f"{page}.md").is_file()] == []
    tables = [*folder.parent.glob("reference/tables/*.csv"), folder.parent / "reference/contracts.md"]
    listed = "".join(table.read_text(encoding="utf-8") for table in tables)
    assert [name for name in ("QTensorConfig", "KernelSku") if name not in listed] == []


def test_every_name_that_commands_import_late_is_there() -> None:
    # Types of these names come from ordinary imports, so a type checker does not see a module that moved.
    assert [name for name in deferred_names(lazy.__name__) if not hasattr(lazy, name)] == []
