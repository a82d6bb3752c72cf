"""Time writing and converting layouts: `python benchmarks/layouts.py [--params-scale small] [--json FILE]`.

Makes the checkpoint of benchmarks/checkpoint.py, and runs in each round, as fresh processes on a warm cache,

    zeropoint quantize SRC OUT --to SCHEME --format LAYOUT       for each layout
    zeropoint convert CODES OUT --format LAYOUT                  for some pairs, CODES in another layout
    plain_program.py SRC|CODES OUT BYTES                         reads as much, writes as much, synchronizes

Prints wall times and ratios (medians over the rounds); what the job imports is measured in the same rounds
and taken off it. Each conversion is checked first: its report must say that every value is what it was.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from facts import machine
from rich.console import Console
from rich.table import Table

from checkpoint import HERE, IMPORTS, NEEDED_BYTES, less, make_source, require_room, run, size_of, warm

LIMIT = 2.0
"""Most times that of the plain program."""
WRITTEN = (
    ("compressed-tensors", "w4a16"), ("gptq", "w4a16"), ("awq", "w4a16_asym"), ("fp8-block", "fp8_block"),
    ("modelopt", "nvfp4a16"), ("bitsandbytes", "nf4"), ("gguf", "q8_0"), ("gguf", "q4_0"), ("gguf", "q4_k"),
)  # fmt: skip
CONVERTED = (
    ("gptq", "w4a16", "compressed-tensors", None), ("awq", "w4a16_asym", "compressed-tensors", None),
    ("compressed-tensors", "w4a16", "gptq", None), ("compressed-tensors", "w4a16", "gguf", None),
    ("compressed-tensors", "mxfp4a16", "compressed-tensors", "nvfp4a16"),
    ("fp8-block", "fp8_block", "compressed-tensors", None), ("gguf", "q8_0", "compressed-tensors", None),
)  # fmt: skip
"""Layout and scheme of the source, layout and scheme of the result."""


@dataclass(kw_only=True)
class Timed:
    """A job in its rounds. command: what follows `zeropoint`, without source and output."""

    name: str
    source: Path
    command: list[str]
    output_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    peak_gb: float = 0.0

    def line(self, out: Path) -> list[str]:
        """Return the command line."""
        verb, *options = self.command
        return [sys.executable, "-m", "zeropoint", verb, str(self.source), str(out), *options, "--json"]

    def of_plain(self, imports: list[float]) -> float:
        """Return the time without imports over that of the plain program."""
        pairs = zip(less(self.seconds, imports), self.plain, strict=True)
        return statistics.median(mine / plain for mine, plain in pairs)


def prepared(work: Path, source: Path, only: str) -> list[Timed]:
    """Return the jobs whose names contain ``only``, with the sources of conversions made."""
    jobs = [
        Timed(
            name=f"{layout} {scheme}", source=source,
            command=["quantize", "--format", layout, "--to", scheme, "--force"],
        )
        for layout, scheme in WRITTEN
    ]  # fmt: skip
    for layout, scheme, target, to in CONVERTED:
        codes = work / f"{layout}-{scheme}"
        options = ["--format", target, "--force", *(["--to", to] if to else [])]
        name = f"{layout} {scheme} to {target} {to or ''}".strip()
        jobs.append(Timed(name=name, source=codes, command=["convert", *options]))
        if only in name and not codes.exists():
            made = Timed(
                name="", source=source, command=["quantize", "--format", layout, "--to", scheme, "--force"]
            )
            run(made.line(codes), work)
    return [job for job in jobs if only in job.name]


def first_run(job: Timed, work: Path) -> None:
    """Run a job unmeasured: kernels are compiled, a conversion is checked, and its bytes are counted."""
    out = work / "out"
    ran = run(job.line(out), work)
    report = json.loads(ran.output[ran.output.index("{") :])
    if job.command[0] == "convert" and report["error"]["largest"] != 0:
        raise SystemExit(f"{job.name}: values differ by up to {report['error']['largest']}")
    job.output_bytes = size_of(out)
    shutil.rmtree(out)


def measure_round(job: Timed, work: Path, *, turn: int) -> None:
    """Measure a job and the plain program once, in an order that changes."""
    out = work / "out"
    plain = [sys.executable, "-S", str(HERE / "plain_program.py"), str(job.source), str(out)]
    for step in (turn % 2, 1 - turn % 2):
        warm(job.source)
        if step:
            job.plain.append(run([*plain, str(job.output_bytes)], work).seconds)
        else:
            ran = run(job.line(out), work)
            job.seconds.append(ran.seconds)
            job.peak_gb = max(job.peak_gb, ran.peak_gb)
        shutil.rmtree(out)


def table(jobs: list[Timed], imports: list[float]) -> Table:
    """Return the results as a table."""
    out = Table(title=f"best of rounds, ratios by rounds; imports take {statistics.median(imports):.2f} s")
    for name in ("job", "GB in", "GB out", "whole s", "plain s", "of plain", "peak GB"):
        out.add_column(name, justify="left" if name == "job" else "right", no_wrap=True)
    for job in jobs:
        out.add_row(
            job.name, f"{size_of(job.source) / 1e9:.2f}", f"{job.output_bytes / 1e9:.2f}",
            f"{min(job.seconds):.2f}", f"{min(job.plain):.2f}", f"{job.of_plain(imports):.2f}",
            f"{job.peak_gb:.2f}",
        )  # fmt: skip
    return out


def main() -> None:
    """Run the benchmark and clean up, also when it is interrupted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params-scale", choices=NEEDED_BYTES, default="full")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", metavar="TEXT", help="jobs whose names contain it")
    parser.add_argument("--work", type=Path, help="where the temporary folder goes (default: the system's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    args = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console.width = 120
    with tempfile.TemporaryDirectory(prefix="zeropoint-benchmark-", dir=args.work) as folder:
        work = Path(folder)
        require_room(work, 2 * NEEDED_BYTES[args.params_scale])
        jobs = prepared(work, make_source(work, "--params-scale", args.params_scale), args.only)
        for job in jobs:
            first_run(job, work)
        imports: list[float] = []
        for turn in range(args.rounds):
            for job in jobs:
                imports.append(run([sys.executable, "-c", f"import {IMPORTS}"], work).seconds)
                measure_round(job, work, turn=turn)
        console.print(table(jobs, imports))
        slow = [job.name for job in jobs if job.of_plain(imports) > LIMIT]
        console.print(f"above {LIMIT} times the plain program: {', '.join(slow)}" if slow else "all met")
        if args.json is not None:
            found = [{**asdict(job), "source": job.source.name} for job in jobs]
            args.json.write_text(
                json.dumps({"machine": machine(), "imports": imports, "jobs": found}, indent=1)
            )


if __name__ == "__main__":
    main()
