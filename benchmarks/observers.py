"""Check, then time, every statistic: `python benchmarks/observers.py [--quick] [--json FILE]`.

First each statistic is compared with torch's and numpy's formulas; a difference ends the run with exit code
1. Then each is timed in turns with a plain read of the same bytes (their sum as int64, which torch computes
as fast as memory delivers) and with torch's own observer of that kind. GB/s is the bytes of the tensor over
the best time of one update of an observer, "of read" that figure over the one of the plain read; a star marks
less than half. Counting is bound by one load, addition and store for each number, not by memory.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from facts import describe, fail, machine, record
from rich.console import Console
from rich.table import Table
from torch.ao.quantization import observer as theirs

from zeropoint import Granularity, only_backend
from zeropoint.bench.timing import in_turns
from zeropoint.stats import AbsoluteMean, Histogram, MinMax, MovingAverage, Observer, Statistic
from zeropoint.stats.histogram import bin_edges

SIDE = 4096
READ_SHARE = 0.5
ROWS, COLUMNS = Granularity.channel(0), Granularity.channel(-1)
MOVING = theirs.MovingAveragePerChannelMinMaxObserver
PEERS: dict[str, Callable[[], torch.nn.Module]] = {
    "MinMax tensor": theirs.MinMaxObserver,
    "MinMax channel": lambda: theirs.PerChannelMinMaxObserver(ch_axis=0),
    "MinMax channel-1": lambda: theirs.PerChannelMinMaxObserver(ch_axis=1),
    "MovingAverage tensor": theirs.MovingAverageMinMaxObserver,
    "MovingAverage channel": lambda: MOVING(ch_axis=0),
    "MovingAverage channel-1": lambda: MOVING(ch_axis=1),
    "Histogram tensor": theirs.HistogramObserver,
}


@dataclass(kw_only=True)
class Row:
    """What was measured for one statistic: seconds of each round."""

    label: str
    dtype: torch.dtype
    threads: int
    nbytes: int
    seconds: list[float]
    read: list[float]
    peer: list[float] = field(default_factory=list)

    @property
    def of_read(self) -> float:
        """Bandwidth over that of a plain read."""
        return min(self.read) / min(self.seconds)

    @property
    def rate(self) -> float:
        """GB/s."""
        return self.nbytes / min(self.seconds) / 1e9

    @property
    def factor(self) -> float | None:
        """How many times faster than torch's observer."""
        return min(self.peer) / min(self.seconds) if self.peer else None

    def record(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "statistic": self.label,
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": self.threads,
            "bytes": self.nbytes,
            "gb_per_s": self.rate,
            "read_gb_per_s": self.nbytes / min(self.read) / 1e9,
            "of_read": self.of_read,
            "times_faster_than_torch": self.factor,
            "seconds": {"zeropoint": self.seconds, "read": self.read, "torch": self.peer},
        }


def statistics(rows: int, cols: int) -> dict[str, Statistic]:
    """Return the statistics of a matrix by their label."""
    shapes = ((Granularity.tensor(), (1,)), (ROWS, (rows, 1)), (COLUMNS, (cols,)))
    kinds: tuple[type[Statistic], ...] = (MinMax, MovingAverage, AbsoluteMean)
    found = {f"{k.__name__} {g}": k(granularity=g, shape=s) for k in kinds for g, s in shapes}
    found["Histogram tensor"] = Histogram()
    return found


def check(x: torch.Tensor) -> None:
    """Compare each statistic with a formula that is not ours, and the kernels with plain torch."""
    for dtype in (torch.float32, torch.bfloat16):
        data = x.to(dtype)
        for label, statistic in statistics(*x.shape).items():
            state = statistic.measure(data)
            with only_backend("reference"):
                plain = statistic.measure(data)
            if any(not torch.equal(state[name], plain[name]) for name in plain):
                fail(f"{label} of {dtype} differs from plain torch")
            axes = {"tensor": (0, 1), "channel": (1,), "channel-1": (0,)}[str(statistic.granularity)]
            wide = data.double()
            if not torch.equal(state["minimum"].reshape(-1), wide.amin(axes).reshape(-1)) or not torch.equal(
                state["maximum"].reshape(-1), wide.amax(axes).reshape(-1)
            ):
                fail(f"{label} of {dtype}: the extremes differ from torch.amin and torch.amax")
        _check_counts(data)


def _check_counts(data: torch.Tensor) -> None:
    values = data.double().reshape(-1).numpy()
    statistic = AbsoluteMean()
    if statistic.mean(statistic.measure(data)).item() != math.fsum(np.abs(values)) / len(values):
        fail(f"AbsoluteMean of {data.dtype} differs from math.fsum")
    positive, negative = Histogram().measure(data)["counts"][0].numpy()
    minus = np.signbit(values)
    edges = bin_edges(Histogram().mantissa_bits)
    for found, part in ((positive, values[~minus]), (negative, -values[minus])):
        if not np.array_equal(found, np.histogram(part, edges)[0]):
            fail(f"Histogram of {data.dtype} differs from numpy.histogram")


def measure(label: str, statistic: Statistic, x: torch.Tensor, rounds: int) -> Row:
    """Time one update in turns with the read and torch's observer."""
    words, observer = x.view(torch.int64), Observer(statistic)
    work: dict[str, Callable[[], object]] = {"zeropoint": lambda: observer(x), "read": words.sum}
    if label in PEERS and x.dtype == torch.float32:
        peer = PEERS[label]()
        work["torch"] = lambda: peer(x)
    with torch.no_grad():
        seconds = in_turns(work, rounds)
    return Row(
        label=label, dtype=x.dtype, threads=torch.get_num_threads(), nbytes=x.nbytes,
        seconds=seconds["zeropoint"], read=seconds["read"], peer=seconds.get("torch", []),
    )  # fmt: skip


def table(rows: list[Row], threads: int) -> Table:
    """Return one table of the rows on ``threads`` threads."""
    out = Table(title=f"{threads} thread{'s' if threads > 1 else ''}", title_justify="left")
    out.add_column("statistic", no_wrap=True)
    for name in ("GB/s", "read", "of read", "times faster than torch"):
        out.add_column(name, justify="right", no_wrap=True)
    for row in (r for r in rows if r.threads == threads):
        out.add_row(
            f"{row.label} {str(row.dtype).removeprefix('torch.')}",
            f"{row.rate:.1f}",
            f"{row.nbytes / min(row.read) / 1e9:.1f}",
            f"{row.of_read:.2f}{'*' * (row.of_read < READ_SHARE)}",
            "" if row.factor is None else f"{row.factor:.1f}",
        )
    return out


def arguments() -> argparse.Namespace:
    """Return the command line's choices."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--quick", action="store_true", help="five rounds of each case instead of twenty")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", default="", metavar="TEXT", help="only labels that contain TEXT")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark."""
    warnings.filterwarnings("ignore", message=".*(reduce_range|deprecated).*")
    args, console = arguments(), Console()
    if not console.is_terminal:
        console.width = 120
    facts = machine()
    console.print(describe(facts), highlight=False)
    x = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    check(x[: SIDE // 4, : SIDE // 4].contiguous())  # as many numbers as kernels take
    console.print("equal to torch, numpy and math.fsum: every statistic", highlight=False)
    rows = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        for dtype in (torch.float32, torch.bfloat16):
            data = x.repeat(4 // dtype.itemsize, 1).to(dtype)  # as many bytes, more than caches hold
            for label, statistic in statistics(*data.shape).items():
                if args.only in label:
                    rows.append(measure(label, statistic, data, 5 if args.quick else 20))
        console.print(table(rows, threads))
    record(args.json, facts, rows=[row.record() for row in rows])


if __name__ == "__main__":
    main()
