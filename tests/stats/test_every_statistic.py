import math
from functools import reduce
from typing import Any

import pytest
import torch
from tests import processes
from tests.stats.every_statistic import ALL, CHANNELS, EXACT, name_of
from tests.stats.states import assert_same
from tests.tensors import normal
from torch.testing._internal.two_tensor import TwoTensor

from zeropoint import DtypeError, Granularity, Scheme, SchemeError, ShapeError, choose_params
from zeropoint.errors import CalibrationError
from zeropoint.stats import MinMax, Observer, State, Statistic
from zeropoint.stats.statistic import calibrated_shape

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SCHEMES = (
    "int8", "int4:tensor:narrow", "uint8:tensor:asym", "uint4:tensor:asym=real", "float8_e4m3fn",
    "nf4:tensor", "float4_e2m1fn:tensor:scale=even", "float8_e4m3fn:tensor:scale=bfloat16",
    "table4:tensor",
)  # fmt: skip


def after(statistic: Statistic, *batches: torch.Tensor) -> State:
    return reduce(statistic.update, batches, statistic.start())


@pytest.mark.parametrize("statistic", [*ALL, *CHANNELS], ids=name_of)
def test_a_state_keeps_its_names_shapes_and_dtypes(statistic: Statistic) -> None:
    start, state = statistic.start(), after(statistic, normal(50, 6))
    assert {k: (v.shape, v.dtype) for k, v in start.items()} == {
        k: (v.shape, v.dtype) for k, v in state.items()
    }
    assert int(state["seen"]) == 300


@pytest.mark.parametrize("statistic", [*ALL, *CHANNELS], ids=name_of)
def test_an_update_modifies_neither_state_nor_data(statistic: Statistic) -> None:
    first = after(statistic, normal(5, 6))
    kept, x = {name: tensor.clone() for name, tensor in first.items()}, normal(5, 6, seed=1)
    data = x.clone()
    statistic.update(first, x)
    assert_same(first, kept)
    assert torch.equal(x, data)


@pytest.mark.crossed
@pytest.mark.parametrize("statistic", [*EXACT, *CHANNELS[:-1]], ids=name_of)
@pytest.mark.parametrize("parts", [(1, 99), (50, 50), (33, 66, 1)])
def test_parts_merge_to_the_state_of_one_pass_in_any_order(
    statistic: Statistic, parts: tuple[int, ...]
) -> None:
    # Magnitudes far apart: any rounded sum would show the order.
    x = (
        normal(100, 6)
        * torch.logspace(-30, 30, 100)[torch.randperm(100, generator=torch.Generator())][:, None]
    )
    states = [after(statistic, part) for part in x.split(parts)]
    whole = after(statistic, x)
    assert_same(reduce(statistic.merge, states), whole)
    assert_same(reduce(statistic.merge, reversed(states)), whole)
    assert_same(after(statistic, *x.split(parts)), whole)


@pytest.mark.crossed
@pytest.mark.parametrize("statistic", [*ALL, *CHANNELS], ids=name_of)
@pytest.mark.parametrize("spoiled", [False, True])
def test_several_batches_at_once_teach_what_one_after_the_other_do(
    statistic: Statistic, spoiled: bool
) -> None:
    batches = [normal(rows, 6, seed=rows) * 10**rows for rows in (3, 1, 4, 0, 2)]
    if spoiled:
        batches[2][0, 1] = torch.nan
    whole = [normal(6, 7, seed=9).T.to(torch.bfloat16)]
    for data in (batches, batches[:3], whole, []):
        state = after(statistic, normal(2, 6))
        assert_same(statistic.update_all(statistic.start(), data), after(statistic, *data))
        assert_same(statistic.update_all(state, data), reduce(statistic.update, data, state))


@pytest.mark.parametrize("statistic", ALL, ids=name_of)
def test_batches_of_several_dtypes_teach_what_one_after_the_other_do(statistic: Statistic) -> None:
    batches = [normal(5, 6, seed=seed).to(dtype) for seed, dtype in enumerate(DTYPES)]
    assert_same(statistic.update_all(statistic.start(), batches), after(statistic, *batches))


@pytest.mark.crossed
@pytest.mark.parametrize("statistic", ALL, ids=name_of)
@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (torch.ones(2, 3), r"batches \(a Tensor\) must be a list or tuple of tensors; pass \[x\]"),
        ([torch.ones(3), torch.arange(3)], r"x \(dtype torch.int64\) must be one of"),
        ([torch.arange(3), torch.arange(3)], r"x \(dtype torch.int64\) must be one of"),
        (["a", "b"], r"x \(a str\) must be a torch.Tensor"),
    ],
)
def test_what_is_no_list_of_batches_is_refused(statistic: Statistic, batches: Any, message: str) -> None:
    with pytest.raises(DtypeError, match=message):
        statistic.update_all(statistic.start(), batches)
    observer = Observer(statistic)
    with pytest.raises(DtypeError, match=message):
        observer.update_all(batches)
    assert_same(observer.state(), statistic.start())


FLUSHING = """
import torch
torch.set_num_threads(2)
torch.set_flush_denormal(True)
torch.randn(1 << 22).exp().sum()  # threads that begin now flush as well
from zeropoint.stats import MinMax, MovingAverage
bits = torch.arange(1, (1 << 20) + 1, dtype=torch.int32)
x = bits.view(torch.float32)
for statistic in (MinMax(), MovingAverage()):
    start = statistic.start()
    for state in (statistic.update(start, x), statistic.update_all(start, [x, x])):
        print([float.hex(end.item()) for end in statistic.range(state)])
"""


def test_extremes_are_exact_where_the_threads_of_torch_flush_subnormal_numbers() -> None:
    done = processes.run(FLUSHING)
    assert done.returncode == 0, done.stderr
    ends = [float.hex(2.0**-149), float.hex(2.0**-129)]
    assert done.stdout.splitlines() == [str(ends)] * 4


def test_a_statistic_made_of_one_that_may_join_batches_does_not_join_them() -> None:
    class LargestMedian(MinMax):
        def measure(self, x: torch.Tensor) -> State:
            return super().measure(x.median())

    data = [torch.tensor([1.0, 1.0, 9.0]), torch.tensor([9.0, 9.0, 9.0]), torch.tensor([1.0, 1.0, 1.0])]
    statistic = LargestMedian()
    assert MinMax.batch_free
    assert not LargestMedian.batch_free
    assert statistic.update_all(statistic.start(), data)["maximum"].item() == 9
    assert statistic.measure(torch.cat(data))["maximum"].item() == 1


@pytest.mark.crossed
@pytest.mark.parametrize("statistic", ALL, ids=name_of)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_statistic_gives_valid_parameters_for_every_scheme(statistic: Statistic, scheme: str) -> None:
    params = statistic.params(after(statistic, normal(64, 6)), scheme)
    params.validate()
    assert params.scheme == Scheme.parse(scheme)


@pytest.mark.parametrize("statistic", CHANNELS, ids=name_of)
def test_a_channel_of_a_tensor_is_judged_as_a_tensor_of_its_own(statistic: Statistic) -> None:
    x = normal(40, 6) * torch.tensor([1.0, 10.0, 0.1, 3.0, 1e-3, 1e4])
    low, high = statistic.range(after(statistic, x))
    alone = next(s for s in ALL if name_of(s) == name_of(statistic))
    for channel in range(6):
        ends = alone.range(after(alone, x[:, channel]))
        assert (low[channel], high[channel]) == (ends[0].item(), ends[1].item())


@pytest.mark.crossed
@pytest.mark.parametrize("statistic", [*ALL, *CHANNELS], ids=name_of)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_counted_and_change_nothing_else(
    statistic: Statistic, poison: float
) -> None:
    x = normal(30, 6)
    clean = after(statistic, x[:10], x[10:])
    extra = torch.full((2, 6), poison)
    state = after(statistic, torch.cat([extra, x[:10]]), torch.cat([x[10:], extra]))
    assert int(state["left_out"]) == 24
    assert_same({**state, "left_out": clean["left_out"]}, clean)


@pytest.mark.crossed
@pytest.mark.parametrize("statistic", [*ALL, *CHANNELS], ids=name_of)
@pytest.mark.parametrize("empty", [torch.zeros(0, 6), torch.full((3, 6), math.nan)], ids=["none", "nan"])
def test_a_batch_without_finite_numbers_changes_no_range(statistic: Statistic, empty: torch.Tensor) -> None:
    x = normal(30, 6)
    state = after(statistic, empty, x, empty)
    assert int(state["left_out"]) == 2 * empty.numel()
    assert_same({**state, "left_out": torch.zeros((), dtype=torch.int64)}, after(statistic, x))


@pytest.mark.parametrize("statistic", ALL, ids=name_of)
def test_calibration_without_data_is_an_error_that_names_what_was_observed(statistic: Statistic) -> None:
    with pytest.raises(CalibrationError) as caught:
        statistic.params(statistic.start(), "int8", name="layers.3.q_proj")
    assert str(caught.value) == (
        "layers.3.q_proj received no calibration data; run calibration "
        "data through it before asking for parameters"
    )
    only_nan = after(statistic, torch.tensor([math.nan, math.inf]))
    with pytest.raises(CalibrationError, match=r"received no finite number \(2 non-finite left"):
        statistic.params(only_nan, "int8")


@pytest.mark.parametrize("statistic", CHANNELS, ids=name_of)
def test_a_channel_without_finite_numbers_is_named(statistic: Statistic) -> None:
    x = normal(4, 6)
    x[:, 4] = math.nan
    with pytest.raises(
        CalibrationError, match=r"received no finite number \(4 non-finite left out\) in block \(4,\)"
    ):
        statistic.params(after(statistic, x), "int8:channel-1")


@pytest.mark.crossed
@pytest.mark.parametrize("statistic", ALL, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_strides_and_gradients_do_not_matter(statistic: Statistic, dtype: torch.dtype) -> None:
    x = normal(16, 6).to(torch.bfloat16).to(dtype)
    state = after(statistic, x)
    assert_same(state, after(statistic, normal(16, 6).bfloat16().float()))
    assert_same(state, after(statistic, x.t()))
    assert_same(state, after(statistic, x.clone().requires_grad_()))
    spaced = torch.zeros(16, 12, dtype=dtype)
    spaced[:, ::2] = x
    assert_same(state, after(statistic, spaced[:, ::2]))
    assert not any(tensor.requires_grad for tensor in state.values())


@pytest.mark.parametrize("statistic", ALL, ids=name_of)
def test_data_of_zeros_alone_have_the_range_zero(statistic: Statistic) -> None:
    low, high = statistic.range(after(statistic, torch.zeros(10)))
    assert (low.item(), high.item()) == (0.0, 0.0)


@pytest.mark.parametrize("statistic", [*ALL, *CHANNELS], ids=name_of)
def test_a_thread_that_flushes_subnormal_numbers_learns_the_same(statistic: Statistic) -> None:
    x = normal(20, 6) * 2.0**-130
    kept = after(statistic, x)
    torch.set_flush_denormal(True)
    try:
        flushed = statistic.measure(x)
    finally:
        torch.set_flush_denormal(False)
    assert_same(flushed, statistic.measure(x))
    assert 0 < float(kept["maximum"].max()) < 2.0**-126


@pytest.mark.parametrize("statistic", ALL, ids=name_of)
def test_ranks_may_vary_per_tensor(statistic: Statistic) -> None:
    x = normal(24)
    batches = [x[:6].reshape(1, 2, 3), x[6], x[7:].reshape(17, 1)]
    assert int(after(statistic, *batches)["seen"]) == 24


@pytest.mark.parametrize(
    ("text", "shape", "batch"),
    [
        ("int8:channel", (5, 64), (5, 3, 7)),
        ("int8:channel1", (1, 5), (9, 5, 2)),
        ("int8:channel-2", (5, 1), (2, 4, 5, 8)),
        ("int4:g32", (4, 70), (4, 70)),
        ("uint8:token:asym", (6, 5), (6, 99)),
        ("float8_e4m3fn:block4x4", (10, 9), (10, 9)),
        ("nvfp4", (2, 40), (2, 40)),
        ("mx9", (3, 32), (3, 32)),
    ],
)
def test_extremes_give_the_parameters_of_the_data_themselves(
    text: str, shape: tuple[int, ...], batch: tuple[int, ...]
) -> None:
    x = normal(*batch)
    statistic = MinMax(granularity=Scheme.parse(text).granularity, shape=shape)
    params, own = statistic.params(after(statistic, x), text), choose_params(x, text)
    for learned, chosen in zip(params.scales, own.scales, strict=True):
        bytes_of = (t.reshape(-1).view(torch.uint8) for t in (learned, chosen))
        assert torch.equal(*bytes_of)
    if own.zero_point is not None:
        assert params.zero_point is not None
        assert torch.equal(params.zero_point.reshape(-1), own.zero_point.reshape(-1))


@pytest.mark.parametrize(
    ("granularity", "shape", "want"),
    [
        (Granularity.tensor(), (3, 4), (1,)),
        (Granularity.channel(0), (3, 4, 5), (3,)),
        (Granularity.channel(1), (3, 4, 5), (1, 4)),
        (Granularity.channel(-2), (3, 4, 5), (4, 1)),
        (Granularity.token(), (3, 4), (3, 1)),
        (Granularity.group(2), (3, 5), (3, 5)),
    ],
)
def test_only_axes_that_are_cut_into_blocks_are_kept(
    granularity: Granularity, shape: tuple[int, ...], want: tuple[int, ...]
) -> None:
    assert calibrated_shape(granularity, shape) == want


def test_data_that_cannot_be_summed_up_are_refused() -> None:
    with pytest.raises(DtypeError, match=r"x \(dtype torch.int64\) must be one of torch.float32"):
        after(MinMax(), torch.arange(3))
    with pytest.raises(DtypeError, match=r"x \(device meta\) must hold data"):
        after(MinMax(), torch.zeros(3, device="meta"))
    with pytest.raises(DtypeError, match=r"x \(a list\) must be a torch.Tensor"):
        after(MinMax(), [1.0])  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match=r"x \(a TwoTensor\) must be a plain tensor; take its local"):
        after(MinMax(), TwoTensor(normal(3), normal(3)))
    wrong = MinMax(granularity=Granularity.channel(-1), shape=(6,))
    with pytest.raises(
        ShapeError, match=r"x \(shape \(2, 5\)\) must have blocks channel-1 of a tensor of shape"
    ):
        after(wrong, normal(2, 5))
    with pytest.raises(SchemeError, match="has blocks channel, but statistics were taken per channel-1"):
        wrong.params(after(wrong, normal(2, 6)), "int8:channel")
