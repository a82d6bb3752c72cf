"""What was measured, and how it is shown: rows, targets, tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import cases as c
from rich.table import Table

COPY_SHARE = 0.5
COPY_SCHEMES = ("int8", "int4", "float8", "mxfp4", "mxfp8", "float4_e2m1fn:g32")
TARGETS = {"torchao": 10, "compressed-tensors": 10}
"""How many times faster than a peer the kernels must be; once for any other."""


@dataclass(kw_only=True)
class Row:
    """What was measured for one case on one number of threads: seconds of each round.

    seconds: of calls that allocate their result; again: of those into memory that is already there.
    """

    case: c.Case
    threads: int
    nbytes: int
    elements: int
    seconds: list[float]
    again: list[float]
    copy: list[float]
    clone: list[float]
    peers: dict[str, list[float]] = field(default_factory=dict)

    @property
    def best(self) -> float:
        """Our best time."""
        return min(self.seconds)

    @property
    def of_copy(self) -> float:
        """Bandwidth over that of a plain copy of as many bytes."""
        return min(self.copy) / min(self.again)

    def rate(self, seconds: list[float]) -> float:
        """Billions of elements a second at the best of ``seconds``."""
        return self.elements / min(seconds) / 1e9

    def factor(self, peer: str) -> float:
        """How many times faster than ``peer``."""
        return min(self.peers[peer]) / self.best

    @property
    def has_copy_target(self) -> bool:
        """Whether the row must reach its share of copy bandwidth."""
        return self.case.operation != c.FAKE and self.case.scheme.startswith(COPY_SCHEMES)

    @property
    def below_copy(self) -> bool:
        """Whether it must and does not."""
        return self.has_copy_target and self.of_copy < COPY_SHARE

    @property
    def too_slow(self) -> list[str]:
        """Peers that are too close: where ten times is more than memory allows, the copy target is enough."""
        near = [name for name in self.peers if self.factor(name) < TARGETS.get(name, 1)]
        return [name for name in near if self.factor(name) < 1 or self.of_copy < COPY_SHARE]

    def record(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "operation": self.case.operation,
            "scheme": self.case.scheme,
            "rival": self.case.rival,
            "dtype": str(self.case.dtype).removeprefix("torch."),
            "threads": self.threads,
            "bytes": self.nbytes,
            "elements": self.elements,
            "gb_per_s": self.nbytes / min(self.again) / 1e9,
            "copy_gb_per_s": self.nbytes / min(self.copy) / 1e9,
            "copy_into_new_memory_gb_per_s": self.nbytes / min(self.clone) / 1e9,
            "of_copy": self.of_copy,
            "gelem_per_s": self.rate(self.seconds),
            "targets_missed": ["copy"] * self.below_copy + self.too_slow,
            "times_faster_than": {name: self.factor(name) for name in self.peers},
            "seconds": {
                "zeropoint": self.seconds,
                "zeropoint into out": self.again,
                "copy": self.copy,
                "clone": self.clone,
                **self.peers,
            },
        }


def table(rows: list[Row], threads: int) -> Table:
    """Return one table of the rows on ``threads`` threads."""
    out = Table(title=f"{threads} thread{'s' if threads > 1 else ''}", title_justify="left")
    out.add_column("case", no_wrap=True)
    for name in ("GB/s", "copy", "of copy", "of clone", "Gelem/s"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("peers, Gelem/s (how many times faster we are)")
    for row in (r for r in rows if r.threads == threads):
        peers = [
            f"{name} {row.rate(seconds):.3f} ({row.factor(name):.1f}x{'*' * (name in row.too_slow)})"
            for name, seconds in row.peers.items()
        ]
        out.add_row(
            row.case.label,
            f"{row.nbytes / min(row.again) / 1e9:.1f}",
            f"{row.nbytes / min(row.copy) / 1e9:.1f}",
            f"{row.of_copy:.2f}{'*' * row.below_copy}",
            f"{min(row.clone) / row.best:.2f}",
            f"{row.rate(row.seconds):.2f}",
            ", ".join(peers),
        )
    return out


def summary(rows: list[Row]) -> str:
    """Return how many rows miss their targets."""
    bound = [row for row in rows if row.has_copy_target]
    slow = sum(row.below_copy for row in bound)
    lines = [f"of copy: {len(bound) - slow} of {len(bound)} rows reach {COPY_SHARE}"]
    for peer in sorted({name for row in rows for name in row.peers}):
        raced = [row for row in rows if peer in row.peers]
        won = sum(peer not in row.too_slow for row in raced)
        factors = sorted(row.factor(peer) for row in raced)
        allowed = "" if peer not in TARGETS else " (or the copy target, where memory allows no more)"
        spread = f"least {factors[0]:.1f}, median {factors[len(factors) // 2]:.1f}"
        lines.append(
            f"{peer}: {won} of {len(raced)} rows reach {TARGETS.get(peer, 1)} times{allowed}; {spread}"
        )
    return "\n".join(lines)
