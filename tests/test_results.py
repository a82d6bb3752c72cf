"""Results of calls: a screen of text, and documents that any reader of JSON takes."""

import json

import pytest
from tests.cli.checkpoints import write_llama

import zeropoint as zp
from zeropoint.results import Result, screen


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """A result of each kind, for a model of so many layers that their names fill pages."""
    folder = tmp_path_factory.mktemp("results")
    model, out = write_llama(folder / "model", layers=12), folder / "out"
    return {
        "plan": zp.plan_checkpoint(model, "w4a16"),
        "run": zp.quantize_checkpoint(model, out, "w4a16"),
        "verification": zp.verify_checkpoint(out, model),
        "comparison": zp.compare_checkpoints(model, out),
        "inspection": zp.inspect_checkpoint(out),
        "search": zp.search_checkpoint(model, "5bpw"),
    }


@pytest.mark.parametrize("kind", ["plan", "run", "verification", "comparison", "inspection", "search"])
def test_a_result_is_a_screen_of_text_and_a_document(results: dict[str, Result], kind: str) -> None:
    result = results[kind]
    lines = repr(result).splitlines()
    assert 0 < len(lines) <= 25
    assert max(map(len, lines)) <= 120
    assert json.loads(result.to_json()) == json.loads(json.dumps(result.to_dict()))
    assert len(result.to_dict()) > 5


def test_results_of_single_weights_are_a_line(results: dict[str, Result]) -> None:
    run, verification, comparison = (results[k] for k in ("run", "verification", "comparison"))
    for item in (run.outcomes[0], verification.layers[0], comparison.tensors[1]):  # type: ignore[attr-defined]
        assert len(repr(item)) < 120
        assert repr(item).startswith("model.layers.0.") or "relative error" in repr(item)


def test_what_exceeds_a_screen_is_cut_and_counted() -> None:
    text = screen(["first", *(f"problem {n}" for n in range(100)), "x" * 1000])
    assert len(text.splitlines()) == 25
    assert text.endswith("... and 78 lines")
    assert screen(["x" * 121]) == "x" * 117 + "..."
    assert screen(["a\nb"]) == "a\nb"
