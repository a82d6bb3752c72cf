"""The range of an activation is the moving average of what was seen in training; nothing else moves it."""

import copy
import pickle

import pytest
import torch

import zeropoint as zp
from zeropoint.errors import SchemeError
from zeropoint.stats import MovingAverage
from zeropoint.training import FakeQuantize, MovingAverageFakeQuantize


def made(rate: float = 0.25, scheme: str = "uint8:tensor:asym") -> MovingAverageFakeQuantize:
    return MovingAverageFakeQuantize(zp.QuantizationParams.from_range(scheme, -1.0, 1.0), rate=rate)


def batches(count: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, 8, generator=generator) * (1 + n) for n in range(count)]


def test_parameters_are_those_of_the_averaged_extremes() -> None:
    quantizer, low, high = made(), 0.0, 0.0
    for n, x in enumerate(batches()):
        y = quantizer(x)
        rate = 1.0 if n == 0 else 0.25
        low += rate * (float(x.min()) - low)
        high += rate * (float(x.max()) - high)
        expected = zp.QuantizationParams.from_range("uint8:tensor:asym", low, high)
        assert quantizer.params == expected
        assert torch.equal(y, zp.fake_quantize(x, expected))


def test_they_start_at_those_given_and_stay_in_evaluation() -> None:
    quantizer = made().eval()
    start = zp.QuantizationParams.from_range("uint8:tensor:asym", -1.0, 1.0)
    for x in batches():
        assert torch.equal(quantizer(x), zp.fake_quantize(x, start))
    assert quantizer.params == start
    quantizer.train()(batches()[4])
    assert quantizer.params != start


def test_gradients_are_those_of_fixed_parameters() -> None:
    quantizer = made()
    first, *_, last = batches()
    quantizer(first)
    mine, theirs = (last.clone().requires_grad_() for _ in range(2))
    quantizer(mine).square().sum().backward()
    FakeQuantize(quantizer.params)(theirs).square().sum().backward()
    assert mine.grad is not None
    assert theirs.grad is not None
    assert torch.equal(mine.grad, theirs.grad)


def test_batches_without_numbers_change_nothing() -> None:
    quantizer = made()
    start = quantizer.params.scales[0].clone()
    quantizer(torch.full((2, 2), torch.nan))
    quantizer(torch.empty(0, 2))
    assert torch.equal(quantizer.params.scales[0], start)


def test_channels_follow_their_own_extremes() -> None:
    params = zp.QuantizationParams.from_range("int8:channel-1:narrow", -1.0, 1.0, shape=(8,))
    quantizer, x = MovingAverageFakeQuantize(params, rate=1.0), batches()[2]
    quantizer(x)
    assert torch.equal(quantizer.params.scales[0].reshape(-1), x.abs().amax(0) / 127)


def test_states_copies_and_pickles_continue_alike() -> None:
    quantizer, other = made(), made()
    for x in batches(3):
        quantizer(x)
    other.load_state_dict(quantizer.state_dict(), strict=True)
    last = batches()[4]
    copies = [other, copy.deepcopy(quantizer), pickle.loads(pickle.dumps(quantizer)).bfloat16()]
    expected = quantizer(last)
    assert all(torch.equal(each(last), expected) for each in copies)
    with pytest.raises(RuntimeError, match="scheme of the state"):
        made(scheme="int8:tensor").load_state_dict(quantizer.state_dict())


def test_new_seeds_reach_the_rounding() -> None:
    quantizer = made(scheme="int4:tensor:round=stochastic(3)").eval()
    x = torch.rand(64)
    first = quantizer(x)
    quantizer.reseed(4)
    assert not torch.equal(quantizer(x), first)
    with pytest.raises(SchemeError, match="needs a scheme that rounds stochastically"):
        made().reseed(1)


def test_the_rate_is_that_of_the_statistic() -> None:
    assert made(0.125).observer.statistic == MovingAverage(rate=0.125)
