"""Wrong types in calls about checkpoints: one sentence about the argument, whatever the function."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import zeropoint as zp
from zeropoint.signatures import by_signature, fits

from .tables import each

VERBS = [name for name in zp.__all__ if name.endswith(("_checkpoint", "_checkpoints", "_kv_scales"))]


@each("name", VERBS)
def test_a_wrong_type_of_any_argument_of_a_function_about_checkpoints_is_named(name: str) -> None:
    parameters = inspect.signature(getattr(zp, name)).parameters
    usual: dict[str, Any] = {
        key: nn.Linear(1, 1) if key == "model" else "no/such/file"
        for key, one in parameters.items()
        if one.default is one.empty
    }
    for wrong in parameters:
        with pytest.raises(zp.OptionError, match=rf"^{wrong}= is of type complex; pass "):
            getattr(zp, name)(**{**usual, wrong: 5j})


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: zp.quantize(torch.ones(4), [1, 2]), "scheme (=[1, 2]) must be a text"),
        (lambda: zp.quantize(torch.ones(4), 5), "scheme (=5) must be a text"),
        (lambda: zp.fake_quantize(torch.ones(4), {}), "scheme (={}) must be a text"),
        (lambda: zp.dequantize(5), "q (a int) must be a QuantizedTensor"),
        (lambda: zp.dequantize(torch.ones(4)), "q (a Tensor) must be a QuantizedTensor"),
        (lambda: zp.get_format(5), "format (=5) must be a name"),
        (lambda: zp.format_name(None), "format (=None) must be a name"),
        (lambda: zp.CodebookFormat(5), "values (=5) of a codebook must be numbers"),
        (lambda: zp.CodebookFormat("ab"), "values (='ab') of a codebook must be numbers"),
        (lambda: zp.CodebookFormat((1.0,)), "values (length 1) of a codebook must number 2..256"),
        (lambda: zp.CodebookFormat((1e39, 1e40)), "values of a codebook must be finite in float32"),
        (lambda: zp.plan("quantize", "int8", 4), "shape (=4) must be a tuple of lengths"),
    ],
)
def test_a_wrong_type_in_a_call_about_tensors_is_named(call: Callable[[], object], says: str) -> None:
    with pytest.raises(zp.ZeropointError) as failure:
        call()
    assert str(failure.value).startswith(says)


@each(
    "name, wrong",
    [
        ("quantize_model", {"fit": "yes"}),
        ("quantize_model", {"ignore": 5}),
        ("quantize_model", {"method": ["mse"]}),
        ("quantize_model", {"quality": {}}),
        ("quantize_model", {"inplace": 1}),
        ("prepare", {"ignore": [5]}),
        ("fold", {"inplace": None}),
        ("dequantize_model", {"inplace": "no"}),
    ],
)
def test_a_wrong_type_of_an_option_of_a_function_about_models_is_named(
    name: str, wrong: dict[str, Any]
) -> None:
    given = (nn.Linear(4, 4), "int8:channel")[: 2 if name in ("quantize_model", "prepare") else 1]
    with pytest.raises(zp.OptionError, match=rf"^{next(iter(wrong))}= is of type \w+; pass "):
        getattr(zp, name)(*given, **wrong)


def test_what_a_function_checks_by_itself_keeps_its_sentence() -> None:
    with pytest.raises(zp.DtypeError, match=r"^x \(a list\) must be a torch\.Tensor"):
        zp.compare([1.0], "int8")  # type: ignore[arg-type]
    with pytest.raises(zp.CalibrationError, match=r"^data \(a int\) must be an iterable of batches"):
        zp.quantize_model(nn.Linear(32, 32), "int4:g32", method="gptq", calibration=5)  # type: ignore[arg-type]
    with pytest.raises(zp.UnsupportedError, match=r"^op \(='yes'\) must be one of choose_params, "):
        zp.explain(torch.ones(2), "int8", op="yes")


def test_a_name_that_no_function_has_is_said_with_the_function() -> None:
    with pytest.raises(TypeError, match=r"repeat\(\) got an unexpected keyword argument 'x'"):
        _repeat("a", x=1)  # type: ignore[call-arg]
    assert _repeat("a", times=numpy.int64(3)) == "aaa"  # type: ignore[arg-type]


@by_signature
def _repeat(text: str, times: int = 2) -> str:
    return text * times


@each(
    "value, kind, good",
    [
        (True, int, False),
        (1, bool, False),
        (None, int | None, True),
        (1.5, int, False),
        (b"a", Iterable[str] | str, False),
        (["a", 5], Iterable[str] | str, False),
        (iter(["a"]), Iterable[str] | str, True),
        (print, bool | Callable[[int], None], True),
        ("x", bool | Callable[[int], None], False),
    ],
)
def test_annotations_decide_what_fits(value: object, kind: Any, good: bool) -> None:
    assert fits(value, kind) is good


def test_generations_below_zero_are_refused() -> None:
    with pytest.raises(zp.OptionError, match=r"^refine=-1 must be at least 0$"):
        zp.search_checkpoint("no/such/file", "4bpw", refine=-1)


def test_two_options_that_name_one_file_are_refused() -> None:
    for one, other in (("out", "plot"), ("out", "state"), ("plot", "state")):
        with pytest.raises(zp.OptionError, match=rf"^{one}= and {other}= both name 'x'; give each a file"):
            zp.search_checkpoint("no/such/file", "4bpw", **{one: "x", other: "x"})  # type: ignore[arg-type]
