"""Help has options and commands in groups, and each of them in one."""

import typer
from tests.cli.conftest import Call

from zeropoint.cli.app import COMMAND_GROUPS, OPTION_GROUPS, app

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_each_command_is_in_one_group() -> None:
    grouped = [name for names in COMMAND_GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(COMMANDS)


def test_each_option_is_in_one_group_and_each_of_a_long_command_in_some() -> None:
    grouped = [name for names in OPTION_GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped))
    of = {
        name: {
            max(p.opts, key=len).removeprefix("--") for p in command.params if p.param_type_name == "option"
        }
        for name, command in COMMANDS.items()
    }
    assert of["quantize"] - set(grouped) == set()
    assert set(grouped) - set().union(*of.values()) == {"help"}


def test_options_stand_under_their_titles(call: Call) -> None:
    text = call("quantize", "--help").out
    places = [text.index(f"\n{title}:") for title in ("Arguments", *OPTION_GROUPS)]
    assert places == sorted(places)
    assert places[1] < text.index("--to SCHEME") < places[2] < text.index("--method NAME") < places[3]
    assert "SRC...  " in text
    assert "\nOptions:" in call("doctor", "--help").out
