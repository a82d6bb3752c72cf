"""What a terminal sees while a run works, and what stands in a log."""

import io
import re
import time
from pathlib import Path

import pytest
from rich.console import Console
from tests.cli.conftest import Call

from zeropoint.progress import bar, lines


def test_a_run_without_a_terminal_says_once_a_minute_how_far_it_is() -> None:
    now, said = [0.0], list[str]()
    move = lines("quantizing", lambda: now[0], write=said.append)
    for second in range(0, 150, 10):
        now[0] = float(second)
        move(second << 20, 200 << 20, "a.weight")
    assert said == [
        "quantizing: 60 MiB of 200 MiB (30%), 1 MiB/s, about 140 s left\n",
        "quantizing: 120 MiB of 200 MiB (60%), 1 MiB/s, about 80 s left\n",
    ]


def test_of_what_is_counted_no_time_is_estimated_since_parts_take_times_of_their_own() -> None:
    now, said = [0.0], list[str]()
    move = lines("compiling", lambda: now[0], write=said.append, amount=str)
    for second in (61, 122):
        now[0] = float(second)
        move(second // 6, 40, "q4_k")
    assert said == ["compiling: 10 of 40 (25%)\n", "compiling: 20 of 40 (50%)\n"]


def frames(width: int, done: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the lines that a terminal of some columns shows one after the other, the last for a second."""
    screen = io.StringIO()

    def console(**_: object) -> Console:
        return Console(file=screen, force_terminal=True, width=width, color_system=None, legacy_windows=False)

    monkeypatch.setattr("rich.console.Console", console)
    with bar("quantizing") as move:
        move(done << 20, 123 << 30, "a.weight")
        time.sleep(1.2)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\r", screen.getvalue())
    return [line for line in re.split(r"[\r\n]+", text) if "quan" in line]


@pytest.mark.rotating
@pytest.mark.parametrize("width", [50, 60, 80, 99, 100, 140])
def test_the_bar_shows_its_share_and_the_time_left_whole_in_every_width(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = frames(width, 63 << 10, monkeypatch)
    assert all(len(line.rstrip("\n")) <= width for line in shown)
    assert "…" not in "".join(shown)
    assert "51%" in shown[-1]
    assert " s left 0:00:01" in shown[-1]
    assert ("63 GiB of 123 GiB (51%), " in shown[-1]) is (width >= 100)


def test_the_bar_keeps_moving_while_a_run_finishes(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = frames(80, 123 << 10, monkeypatch)
    assert "100%, finishing 0:00:01" in shown[-1]
    spinners = {line[0] for line in shown if "finishing" in line}
    assert len(spinners) > 2
    assert " " not in spinners


def test_the_last_part_is_named_for_what_it_is() -> None:
    now, said = [0.0], list[str]()
    move = lines("quantizing", lambda: now[0], write=said.append)
    now[0] = 60.0
    move(1 << 30, 1 << 30, "a.weight")
    assert said == ["quantizing: 1 GiB, finishing\n"]


@pytest.mark.parametrize("command", ["inspect", "plan", "quantize"])
def test_names_stay_whole_where_the_output_is_no_terminal(
    call: Call, model: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    options = {
        "inspect": (),
        "plan": ("--to", "nvfp4a16"),
        "quantize": (tmp_path / "out", "--to", "nvfp4a16"),
    }
    called = call(command, model, *options[command])
    assert called.status == 0
    name = "model.layers.*.self_attn.q_proj.weight"  # longer than a line of such a terminal
    assert any(name in line for line in called.out.splitlines())


def test_a_directory_that_was_made_for_the_output_is_said(call: Call, model: Path, tmp_path: Path) -> None:
    called = call("quantize", model, tmp_path / "no" / "such" / "out", "--to", "w8a8", "--json")
    assert called.status == 0
    assert called.err == f"note: the directory '{tmp_path}/no/such' did not exist and was created\n"
