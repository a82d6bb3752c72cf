"""The command as a process of its own: signals, closed pipes, its entry points."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.checkpoint.written import digests
from tests.cli.checkpoints import write_llama
from tests.oracles import synthetic_llama

from zeropoint import __version__
from zeropoint.checkpoint.read.file_names import JOURNAL
from zeropoint.cli.main import main

pytestmark = pytest.mark.rotating

# The real command, but each part of a weight takes so long that there is time for a signal.
SLOW = """
import sys, time
from zeropoint.checkpoint.measure.tiles import Scratch
quantize = Scratch.quantize
def slow(*arguments):
    time.sleep(0.2)
    return quantize(*arguments)
Scratch.quantize = slow
from zeropoint.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
PATIENCE = 180


def wait_for(condition: object, process: subprocess.Popen[str]) -> None:
    """Wait until ``condition`` holds; fail when the process ends before."""
    end = time.monotonic() + PATIENCE
    assert callable(condition)
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (signal.SIGINT, 130, "interrupted"),
        pytest.param(signal.SIGTERM, 143, "interrupted by SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_quantize_publishes_nothing_and_resumes(
    tmp_path: Path, number: signal.Signals, status: int, said: str
) -> None:
    model = write_llama(tmp_path / "model", layers=30)
    before = {path.name: path.stat().st_mtime_ns for path in model.iterdir()}
    out = tmp_path / "new" / "out"
    command = [
        sys.executable,
        "-c",
        SLOW,
        "quantize",
        str(model),
        str(out),
        "--to",
        "w4a16",
        "--workers",
        "2",
    ]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    journal = out / JOURNAL
    wait_for(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 1, process)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == status
    assert stdout == ""
    assert stderr.startswith(f"error: {said}; the work so far is kept in ")
    assert stderr.endswith("; run the same command again to resume\n")
    assert {path.name[0] for path in out.iterdir()} == {"."}
    assert {path.name: path.stat().st_mtime_ns for path in model.iterdir()} == before
    assert main(command[3:]) == 0
    assert main([*command[3:5], str(tmp_path / "fresh"), *command[6:]]) == 0
    assert digests(out) == digests(tmp_path / "fresh")


def test_a_reader_that_goes_away_ends_the_command_quietly(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "zeropoint", "formats", "--json"], stdout=write, stderr=subprocess.PIPE,
            text=True, check=False,
        )  # fmt: skip
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_report_for_which_there_is_no_room_is_an_error_that_says_so() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "zeropoint", "formats"], stdout=full, stderr=subprocess.PIPE,
            text=True, check=False,
        )  # fmt: skip
    message = "error: the report cannot be written to stdout: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_both_entry_points_are_the_same_command() -> None:
    script = Path(sys.executable).with_name("zeropoint")
    for command in ([sys.executable, "-m", "zeropoint"], [str(script)]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"zeropoint {__version__}\n", "")


def test_an_error_is_one_line_and_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zeropoint", "inspect", str(tmp_path / "nowhere")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_command_leaves_scipy_alone(tmp_path: Path) -> None:
    pytest.importorskip("scipy.linalg")
    model, command = write_llama(tmp_path / "model"), [sys.executable, "-X", "importtime", "-m", "zeropoint"]
    # Kernels that are not compiled yet are compiled here; numba asks for scipy then.
    assert main(["quantize", str(model), str(tmp_path / "compiled"), "--to", "w4a16"]) == 0
    done = subprocess.run(
        [*command, "quantize", str(model), str(tmp_path / "loaded"), "--to", "w4a16"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "zeropoint.kernels.cpu.encode.rows" in loaded
    assert "scipy.linalg" not in loaded


def test_commands_that_run_the_model_find_what_transformers_needs(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="extra `hf`")
    source, data = synthetic_llama.write(tmp_path / "in"), tmp_path / "ids.safetensors"
    save_file({"ids": torch.arange(48).reshape(2, 24)}, data)
    quantized = [str(source), str(tmp_path / "out"), "--to", "w4a16", "--method", "mse_weighted"]
    done = subprocess.run(
        [sys.executable, "-m", "zeropoint", "quantize", *quantized, "--calibration", str(data)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_without_unicode_gets_all_that_it_can_show(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "zeropoint", "inspect", str(model)], capture_output=True, check=False,
        env={**os.environ, **plain},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"not quantized" in done.stdout
    assert b"?" in done.stdout


def test_a_process_that_compiles_nothing_takes_plain_torch() -> None:
    code = "import zeropoint as zp, torch; print(zp.explain(torch.ones(4), 'int8'))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, text=True,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
    )  # fmt: skip
    assert "reference runs" in done.stdout, done.stderr
    assert "NUMBA_DISABLE_JIT is set" in done.stdout
