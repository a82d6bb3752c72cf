from dataclasses import dataclass

import torch

from zeropoint import Granularity
from zeropoint.stats import Batch, Observer, State, Statistic


@dataclass(frozen=True, kw_only=True)
class ThreeSigma(Statistic):
    """Three standard deviations around zero, as a user would write it."""

    def empty(self) -> State:
        return {name: torch.zeros(self.grid, dtype=torch.float64) for name in ("count", "squares")}

    def take(self, batch: Batch) -> State:
        values = batch.values().double()
        return {"count": batch.sums(torch.ones_like(values)), "squares": batch.sums(values**2)}

    def range(self, state: State) -> tuple[torch.Tensor, torch.Tensor]:
        reach = 3 * (state["squares"] / state["count"]).sqrt()
        return -reach, reach


def test_a_statistic_of_a_few_lines_is_observed_merged_and_converted_to_parameters() -> None:
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    x[3, 2] = torch.nan
    statistic = ThreeSigma(granularity=Granularity.channel(-1), shape=(5,))
    observer, other = Observer(statistic), Observer(statistic)
    observer(x[:20])
    other(x[20:])
    observer.merge(other)
    want = 3 * (x.double() ** 2).nanmean(0).sqrt()
    torch.testing.assert_close(observer.range()[1], want)
    params = observer.params("int8:channel-1:narrow")
    torch.testing.assert_close(params.scales[0], (want / 127).float())


def test_a_custom_statistic_per_tensor_needs_no_shape() -> None:
    observer = Observer(ThreeSigma())
    observer(torch.tensor([[1.0, -1.0], [torch.inf, 1.0]]))
    assert observer.range()[1].tolist() == [3.0]
