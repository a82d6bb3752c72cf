"""The notebooks show what their cells give: they are executed, and compared with what is checked in."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
OWN_PLACES = re.compile(r"/(?:tmp|home|root|work|Users)/")
GPTQ = "calibrate_and_search.ipynb"
NOTEBOOKS = [
    pytest.param("invent_a_format.ipynb"),
    pytest.param("first_checkpoint.ipynb", marks=pytest.mark.slow),  # three runs over a model of 22 million
    pytest.param(GPTQ, marks=pytest.mark.slow),  # the model runs, and so do three others
]


def executor() -> ModuleType:
    spec = importlib.util.spec_from_file_location("execute_notebooks", FOLDER / "execute.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outputs(notebook: dict[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """Return the code of each cell, and what it shows by its kind."""
    found = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            shown = {}
            for output in cell["outputs"]:
                texts = output.get("data", {"stdout": output.get("text", ())})
                shown |= {kind: "".join(lines) for kind, lines in texts.items()}
            found.append(("".join(cell["source"]), shown))
    return found


SMALL = """
import torch
import zeropoint as zp
print(zp.get_format("e2m1").bits)
x = torch.ones(4, requires_grad=True)
zp.fake_quantize(x, "int8:tensor").sum().backward()
x.grad.tolist(), str(__import__("pathlib").Path.cwd() / "file")
"""


def test_a_cell_shows_what_it_prints_and_its_last_value(tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "source": SMALL.splitlines(keepends=True)}, {"cell_type": "markdown"}]
    path = tmp_path / "small.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    (first, second) = executor().executed(path, tmp_path)["cells"]
    printed, value = first["outputs"]
    assert printed["text"] == ["4\n"]
    assert value["data"] == {"text/plain": ["([1.0, 1.0, 1.0, 1.0], './file')"]}
    assert "outputs" not in second


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_shows_what_it_gives(name: str, tmp_path: Path) -> None:
    checked_in = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    now = executor().executed(FOLDER / name, tmp_path)
    # Float32 products of a model, and Python's own texts, differ by processor and version.
    compared = masked if name == GPTQ else dict
    for (source, before), (_, after) in zip(outputs(checked_in), outputs(now), strict=True):
        assert compared(after) == compared(before), source


def test_the_plan_that_a_notebook_shows_is_made_by_this_version(tmp_path: Path) -> None:
    """Plans name what engines load, which changes more often than the slow test of the notebook runs."""
    checked_in = json.loads((FOLDER / "first_checkpoint.ipynb").read_text(encoding="utf-8"))
    plan = next(n for n, cell in enumerate(checked_in["cells"]) if "plan_checkpoint(" in cell["source"][0])
    checked_in["cells"] = checked_in["cells"][: plan + 1]
    path = tmp_path / "plan.ipynb"
    path.write_text(json.dumps(checked_in), encoding="utf-8")
    before, now = outputs(checked_in)[-1], outputs(executor().executed(path, tmp_path))[-1]
    assert {"text/html", "text/plain"} <= now[1].keys()
    assert now == before


def masked(shown: dict[str, str]) -> dict[str, str]:
    """Return what is printed without its numbers; of pictures and tables, that they are there."""
    found = {kind: text for kind, text in shown.items() if text}
    return {kind: re.sub(r"[\d.,]+", "#", text) if kind == "stdout" else kind for kind, text in found.items()}


def test_notebooks_are_whole_and_name_no_place_of_a_machine() -> None:
    names = sorted(path.name for path in FOLDER.glob("*.ipynb"))
    assert names == sorted(str(each.values[0]) for each in NOTEBOOKS)
    for name in names:
        text = (FOLDER / name).read_text(encoding="utf-8")
        notebook = json.loads(text)
        assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
        assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
        assert executor().text_of(notebook) == text
        assert not OWN_PLACES.search(text)
        assert len(text) < 120_000
        kinds = {kind for _, shown in outputs(notebook) for kind in shown}
        assert {"text/plain", "text/html", "image/svg+xml", "stdout"} <= kinds
