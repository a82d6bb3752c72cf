"""Names of devices, and the settings under which a GPU computes."""

from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from tests.stand_in_device import standing_in

from zeropoint.errors import OptionError, UnsupportedError
from zeropoint.ops.devices import device_named, device_of, exact_products

GPU = torch.device("cuda", 0)
"""Where it is: nothing is computed there."""


@pytest.mark.parametrize("given", [None, "cpu", torch.device("cpu")])
def test_the_processor_is_what_runs_models_where_nothing_else_is_said(given: torch.device | str) -> None:
    assert device_named(given) == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU")
def test_a_gpu_that_is_not_there_is_refused_in_one_sentence() -> None:
    with pytest.raises(UnsupportedError, match=r"^device='cuda' needs a GPU, and torch .* leave it out, or"):
        device_named("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_has_its_number() -> None:
    assert device_named("cuda") == torch.device("cuda", 0)
    with pytest.raises(UnsupportedError, match="device='cuda:99' is not among the GPUs here"):
        device_named("cuda:99")


@pytest.mark.parametrize(("given", "why"), [("gpu", "is no device of torch"), ("meta", "run on here")])
def test_other_words_are_refused(given: str, why: str) -> None:
    with pytest.raises(OptionError, match=f"^device='{given}' .*{why}; use cpu, cuda, or cuda:1"):
        device_named(given)


def _settings() -> tuple[object, ...]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        matmul.allow_tf32, cudnn.allow_tf32, matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction, matmul.fp32_precision,
    )  # fmt: skip


@pytest.fixture(params=[False, True])
def before(request: pytest.FixtureRequest) -> Iterator[tuple[object, ...]]:
    """Settings with narrow products of float32, and without."""
    matmul = torch.backends.cuda.matmul
    own = matmul.fp32_precision
    matmul.allow_tf32 = request.param
    yield _settings()
    matmul.allow_tf32 = False
    matmul.fp32_precision = own


def test_products_are_exact_meanwhile_and_settings_are_put_back(before: tuple[object, ...]) -> None:
    with suppress(KeyError), exact_products(GPU):
        assert _settings() == (False, False, False, False, "ieee")
        raise KeyError
    assert _settings() == before
    with exact_products(torch.device("cpu")):
        assert _settings() == before


def test_a_setting_that_torch_refuses_to_tell_by_its_older_name_is_put_back_by_the_newer() -> None:
    matmul = torch.backends.cuda.matmul
    matmul.fp32_precision = "tf32"
    try:
        with exact_products(GPU):
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = "none"


def test_a_model_is_where_its_parameters_are() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert device_of(model) == torch.device("cpu")
    with standing_in() as device:
        model[1].weight = torch.nn.Parameter(model[1].weight.detach().to(device))
        assert device_of(model) == device
