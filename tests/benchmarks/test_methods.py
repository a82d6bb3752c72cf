"""Tables of methods that learn from data: rows, pairs, what is unknown, and runs that resume."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file
from tests.oracles import tiny_models

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
NEEDED = ("facts", "methods")


@pytest.fixture
def methods(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The program, which imports others by bare names."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield [__import__(name) for name in NEEDED][-1]
    for name in NEEDED:
        sys.modules.pop(name, None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tiny_models.write(folder, "llama", dtype=torch.float32)
    own = torch.Generator().manual_seed(0)
    save_file({"input_ids": torch.randint(0, 100, (4, 32), generator=own)}, folder / "calib.safetensors")
    save_file({"input_ids": torch.randint(0, 100, (1024,), generator=own)}, folder / "eval.safetensors")
    return folder


def run(methods: ModuleType, monkeypatch: pytest.MonkeyPatch, model: Path, *more: str) -> None:
    given = ["--model", str(model), "--windows", "1", "--cache", str(model.parent / "cache.json")]
    threads = ["--threads", str(torch.get_num_threads())]
    monkeypatch.setattr(sys, "argv", ["methods", *given, *threads, *more])
    methods.main()


@pytest.mark.slow  # three processes that load torch
def test_a_row_is_made_once_and_an_unknown_method_is_said(
    methods: ModuleType, monkeypatch: pytest.MonkeyPatch, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--schemes", "int4:g32", "--methods", "nearest,no_such_method", "--oracle")
    run(methods, monkeypatch, model, *asked)
    first = capsys.readouterr()
    assert "unknown method" in first.out
    assert first.err.count("int4:g32 ") == 4
    for name in ("nearest", "oracle gptq", "oracle gptaq"):
        assert any(name in line and "±" in line for line in first.out.splitlines()), name
    run(methods, monkeypatch, model, *asked)
    again = capsys.readouterr()
    assert "int4:g32 " not in again.err
    rows = [line for line in first.out.splitlines() if "│" in line]
    assert rows == [line for line in again.out.splitlines() if "│" in line]


def test_the_float_model_is_at_no_distance_from_itself(methods: ModuleType, model: Path) -> None:
    reference = methods.Reference.of(model, 1)
    found = reference.scores(reference.log_p)
    assert len(found["kld"]) == 256
    assert max(map(abs, found["kld"])) == 0
    assert set(found["same_top"]) == {1.0}


def test_pairs_have_the_error_of_the_difference(methods: ModuleType) -> None:
    rows = {
        "nearest": {"kld": [1.0, 2.0, 3.0]}, "mse": {"kld": [0.5, 1.5, 2.5]}, "new": {"unknown": "no"},
        "oracle gptq": {"kld": [0.0, 2.0, 4.0]},
    }  # fmt: skip
    assert list(methods.pairs(rows)) == ["less nearest", "less oracle gptq"]
    found = methods.less(rows["mse"], rows["nearest"])
    assert (found.value, found.error) == (-0.5, 0.0)
    assert methods.less(rows["new"], rows["nearest"]) is None
    assert methods.less(rows["nearest"], rows["nearest"]) is None
    assert methods.less(rows["oracle gptq"], rows["nearest"]).error == pytest.approx(3**-0.5)
