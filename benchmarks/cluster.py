"""Measure one core, one driver and one disk, and compute a cluster: `python benchmarks/cluster.py`.

Measured here, on a warm cache: bytes of the source that one thread reads, quantizes, hashes and writes a
second; hashing alone (the proof before files get their names); what the driver spends on a batch that it
hands to Ray and takes back; what it spends on the record of a unit. Not measured, and options therefore: the
bandwidth of a node's network and of the storage that all share, the cores of a node, its price.

A run of S bytes on n nodes takes, by this model, the longest of
    cores      S / (n * cores * core rate)
    network    (reads * S + out) / (n * network)
    storage    (reads * S + out) / storage
    driver     batches * batch time + units * record time
and, before it, the start of the workers; after it, the proof: `out` bytes that the driver alone reads again.
`reads` is 2 for schemes whose scale needs the whole tensor first. Both directions of a network count as one.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import facts
from llama_checkpoint import SIZES
from llama_checkpoint import write as write_checkpoint
from rich.console import Console
from rich.table import Table

from zeropoint.checkpoint.cluster.ray import BATCH_BYTES
from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, make_plan
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.plan.output_tensors import UNIT_VALUES
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.executor import Job, Results, local
from zeropoint.checkpoint.run.journal import Journal
from zeropoint.checkpoint.run.loop import run
from zeropoint.checkpoint.run.unit_results import UnitResult
from zeropoint.checkpoint.run.units import Groups, Units

NODES = (1, 2, 4, 8, 16, 32, 64)
SOURCE_BYTES = 1.5e12
UNIT_SOURCE_BYTES = 2 * UNIT_VALUES  # of bfloat16
RECORDS, RECORDS_A_COMMIT = 20_000, 200
ROUNDS, CALLS = 3, 400


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What this machine does: bytes a second, and seconds."""

    scheme: str
    core: float
    hashing: float
    batch_seconds: float
    record_seconds: float
    start_seconds: float
    out_share: float
    reads: int


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """What a cluster is: cores of a node, bytes a second of its network and of the storage, price an hour."""

    cores: int
    network: float
    storage: float
    price: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds of a run on some nodes, by what they go to; the longest of the first four counts."""

    nodes: int
    cores: float
    network: float
    storage: float
    driver: float
    start: float
    proof: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return max(self.cores, self.network, self.storage, self.driver) + self.start + self.proof

    @property
    def bound(self) -> str:
        """What the units wait for."""
        return max(("cores", "network", "storage", "driver"), key=lambda name: float(getattr(self, name)))


def estimate(measured: Measured, assumed: Assumed, nodes: int, *, source: float = SOURCE_BYTES) -> Estimate:
    """Return what a run of ``source`` bytes takes."""
    out = source * measured.out_share
    moved = measured.reads * source + out
    batches, records = source / BATCH_BYTES, source / UNIT_SOURCE_BYTES
    return Estimate(
        nodes=nodes, cores=source / (nodes * assumed.cores * measured.core),
        network=moved / (nodes * assumed.network), storage=moved / assumed.storage,
        driver=batches * measured.reads * measured.batch_seconds + records * measured.record_seconds,
        start=measured.start_seconds,
        proof=max(out / (assumed.cores * measured.hashing), out / min(assumed.network, assumed.storage)),
    )  # fmt: skip


def measure_core(plan: CheckpointPlan, folder: Path) -> tuple[float, tuple[UnitResult, ...]]:
    """Return source bytes a second of one thread, and the results, of the best of some rounds."""
    best, found = 0.0, ()
    for number in range(ROUNDS):
        results: list[UnitResult] = []
        spent = 0.0

        def timed(job: Job, results: list[UnitResult] = results) -> Results:
            nonlocal spent
            start = time.perf_counter()
            for result in local(job):
                results += [result] if isinstance(result, UnitResult) else []
                yield result
            spent = time.perf_counter() - start

        run(plan, folder / str(number), executor=timed)
        best, found = max(best, plan.source_bytes / spent), tuple(results)
    return best, found


def measure_hashing() -> float:
    """Return bytes a second of SHA-256 on one core."""
    data = bytes(1 << 28)
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        hashlib.sha256(data).hexdigest()
        seconds.append(time.perf_counter() - start)
    return len(data) / min(seconds)


def measure_records(done: tuple[UnitResult, ...], folder: Path) -> float:
    """Return seconds that a unit's record takes to be written, synced with others as a run does."""
    journal = Journal(folder / "journal")
    start = time.perf_counter()
    for begin in range(0, RECORDS, RECORDS_A_COMMIT):
        journal.append(done[(begin + n) % len(done)].document() for n in range(RECORDS_A_COMMIT))
    seconds = time.perf_counter() - start
    journal.close()
    return seconds / RECORDS


def measure_batches(done: tuple[UnitResult, ...]) -> tuple[float, float]:
    """Return the driver's seconds for a batch that does nothing, and those until the first worker answers."""
    import ray

    size = BATCH_BYTES // UNIT_SOURCE_BYTES
    answer = list((done * size)[:size])

    @ray.remote(num_cpus=1)
    def nothing(found: list[UnitResult]) -> list[UnitResult]:
        importlib.import_module("zeropoint.checkpoint.cluster.worker")  # as before a worker's first unit
        return found

    start = time.perf_counter()
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.get([nothing.remote(answer) for _ in range(2)])
    first = time.perf_counter() - start
    pending: list[Any] = []
    start = time.perf_counter()
    for _ in range(CALLS):
        pending.append(nothing.remote(answer))
        if len(pending) >= 4:
            ready, pending = ray.wait(pending, num_returns=1)
            ray.get(ready)
    ray.get(pending)
    seconds = (time.perf_counter() - start) / CALLS
    ray.shutdown()
    return seconds, first


def measure(scheme: str, scale: str) -> Measured:
    """Measure everything on a checkpoint that is made for it and removed."""
    with tempfile.TemporaryDirectory(prefix="zeropoint-cluster-") as name:
        folder = Path(name)
        write_checkpoint(folder / "source", SIZES[scale])
        plan = make_plan(open_source(folder / "source"), scheme, limits=Limits(workers=1))
        core, done = measure_core(plan, folder)
        batch, first = measure_batches(done)
        return Measured(
            scheme=scheme, core=core, hashing=measure_hashing(), batch_seconds=batch,
            record_seconds=measure_records(done, folder), start_seconds=first,
            out_share=plan.output_bytes / plan.source_bytes, reads=2 if Groups(Units(plan)) else 1,
        )  # fmt: skip


def show(console: Console, measured: Measured, assumed: Assumed) -> list[Estimate]:
    """Print what was measured, what is assumed, and what follows."""
    console.print(
        f"{measured.scheme}: {measured.core / 1e9:.2f} GB/s of source on a core, SHA-256 "
        f"{measured.hashing / 1e9:.2f} GB/s; driver {1e3 * measured.batch_seconds:.2f} ms a batch of "
        f"{BATCH_BYTES >> 20} MiB and {1e6 * measured.record_seconds:.0f} us a record; workers start in "
        f"{measured.start_seconds:.0f} s; output {100 * measured.out_share:.0f} % of the source"
    )
    console.print(
        f"assumed: {assumed.cores} cores a node, {assumed.network / 1e9:g} GB/s of network a node, "
        f"{assumed.storage / 1e9:g} GB/s of shared storage, {assumed.price:g} $ a node and hour"
    )
    table = Table("nodes", "minutes", "waits for", "proof, minutes", "TB/h", "$")
    found = [estimate(measured, assumed, nodes) for nodes in NODES]
    for each in found:
        cost = each.nodes * assumed.price * each.seconds / 3600
        table.add_row(
            str(each.nodes), f"{each.seconds / 60:.1f}", each.bound, f"{each.proof / 60:.1f}",
            f"{SOURCE_BYTES / 1e12 / each.seconds * 3600:.1f}", f"{cost:.2f}",
        )  # fmt: skip
    console.print(table)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--schemes", nargs="+", default=["mxfp4", "nvfp4a16"])
    parser.add_argument("--params-scale", choices=SIZES, default="full")
    parser.add_argument("--cores", type=int, default=16, help="of a node")
    parser.add_argument(
        "--network", type=float, default=3e9, help="bytes a second of a node (25 Gbit/s: 3e9)"
    )
    parser.add_argument("--storage", type=float, default=40e9, help="bytes a second of what all nodes share")
    parser.add_argument("--price", type=float, default=0.8, help="dollars a node and hour")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    assumed = Assumed(cores=given.cores, network=given.network, storage=given.storage, price=given.price)
    console, figures = Console(), []
    for scheme in given.schemes:
        measured = measure(scheme, given.params_scale)
        estimates = show(console, measured, assumed)
        figures.append({"measured": asdict(measured), "estimates": [asdict(each) for each in estimates]})
    facts.record(given.json, facts.machine(), assumed=asdict(assumed), runs=figures)


if __name__ == "__main__":
    main()
