"""What a terminal sees while a run works, and what stands in a log."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Call

from zeropoint.cli.output import lines


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
