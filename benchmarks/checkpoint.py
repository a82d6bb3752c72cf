"""Time the whole job: `python benchmarks/checkpoint.py [--params-scale small] [--json FILE]`.

Makes a Llama-shaped checkpoint of 1.1 billion parameters, and runs in each round, as fresh processes on a
warm cache with nothing left to write back:

    zeropoint quantize SRC OUT --to SCHEME                       the job
    the same with --max-memory 512M                              the job in little memory
    plain_program.py SRC OUT BYTES                               reads SRC, writes as many bytes, synchronizes
    cp -r SRC OUT

in an order that changes from round to round. Prints wall times, ratios (medians over the rounds), the peak
resident memory and the share of the time that the job waited for the disk. What the job imports (torch, numba
and zeropoint itself) is measured in the same rounds and taken off it, as imports are for the peers; of the
ratio to `cp -r`, torch's import alone. Modules come from their bytecode, as where zeropoint is installed.
Peers (checkpoint_peers.py) run once a scheme where their environments exist. With `--shards N --size 20G` it
checks instead, from a cold cache, that time grows with the size and memory does not. Everything is made below
one temporary folder, which is removed at the end.

This process imports neither torch nor numpy on purpose: the kernel counts the memory of the process that
starts a command into the peak of that command.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from checkpoint_peers import PEERS, Peer, differences
from facts import machine
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
SCHEMES = ("mxfp4", "nvfp4a16", "w4a16", "fp8_dynamic")
NEEDED_BYTES = {"full": 9_000_000_000, "small": 150_000_000}
PLAIN_LIMIT, COPY_LIMIT, LIMITED_FACTOR, PEER_FACTOR = 2.0, 4.0, 1.3, 10.0
PEAK_LIMIT_GB, SYNC_SHARE = 0.7, 0.1
LITTLE = "512M"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
IMPORTS = (
    "zeropoint.cli.app, zeropoint.checkpoint.run.loop, zeropoint.checkpoint.verify.verification, "
    "zeropoint.report.tables, zeropoint.kernels.cpu, pydantic.type_adapter"
)
"""What the job imports: torch and numba are among it, and the last is what typer loads to read options."""
LAYER_BYTES = 88_100_000
"""Bytes of one layer of the full scale, from which the layers of --size follow."""
GROWTH = 1.25
"""How much longer than in proportion to its size the larger checkpoint may take."""
PEAK_GROWTH_GB = 0.1


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One command: its wall time and the most memory it held (pages of files it mapped included)."""

    seconds: float
    peak_gb: float
    output: str


@dataclass(kw_only=True)
class Job:
    """Runs of our command; one entry a round. sync: seconds in which it waited for the disk."""

    seconds: list[float] = field(default_factory=list)
    peak_gb: list[float] = field(default_factory=list)
    sync: list[float] = field(default_factory=list)

    def add(self, ran: Ran) -> None:
        """Take in a run whose output is the JSON report."""
        self.seconds.append(ran.seconds)
        self.peak_gb.append(ran.peak_gb)
        self.sync.append(json.loads(ran.output[ran.output.index("{") :])["sync_seconds"])


@dataclass(kw_only=True)
class Result:
    """What was measured for one scheme; lists have one entry a round."""

    scheme: str
    output_bytes: int = 0
    job: Job = field(default_factory=Job)
    limited: Job = field(default_factory=Job)
    plain: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)
    torch: list[float] = field(default_factory=list)
    imports: list[float] = field(default_factory=list)
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def working(self, job: Job) -> list[float]:
        """Seconds of each run, less the median of what its imports take."""
        return less(job.seconds, self.imports)

    def ratio(self, seconds: list[float], to: list[float]) -> float:
        """Return the median of the ratios of the rounds."""
        return statistics.median(a / b for a, b in zip(seconds, to, strict=True))

    @property
    def of_plain(self) -> float:
        """Time without imports over that of the plain program."""
        return self.ratio(self.working(self.job), self.plain)

    @property
    def of_copy(self) -> float:
        """Time with all imports but torch's over that of `cp -r`."""
        return self.ratio(less(self.job.seconds, self.torch), self.copy)

    @property
    def of_unlimited(self) -> float:
        """Time in little memory over that with the default limit, imports included in neither."""
        return self.ratio(self.working(self.limited), self.working(self.job))

    @property
    def sync_share(self) -> float:
        """Share of the job's time in which it waited for the disk."""
        return self.ratio(self.job.sync, self.working(self.job))


def less(seconds: list[float], loading: list[float]) -> list[float]:
    """Return what is left of each time without the median of loading."""
    apart = statistics.median(loading)
    return [each - apart for each in seconds]


def run(command: list[str], folder: Path) -> Ran:
    """Run ``command`` in a fresh process after earlier writes reached the disk; exit when it fails."""
    os.sync()
    with tempfile.TemporaryFile("w+", dir=folder) as log:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=ENVIRONMENT)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        output = log.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:6])} failed with {process.returncode}:\n{output[-2000:]}")
    unit = 1 if sys.platform == "darwin" else 1024
    return Ran(seconds=seconds, peak_gb=usage.ru_maxrss * unit / 1e9, output=output)


def warm(folder: Path) -> None:
    """Read every file, so that the next command finds it in memory."""
    block = bytearray(1 << 22)
    for path in sorted(folder.iterdir()):
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


def cool(folder: Path) -> None:
    """Forget every file, so that the next command reads it from the disk, however large it is."""
    os.sync()
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())


def ours(source: Path, out: Path, scheme: str, *options: str) -> list[str]:
    """Return our command line."""
    command = [sys.executable, "-m", "zeropoint", "quantize", str(source), str(out), "--to", scheme]
    return [*command, "--json", *options]


def measure_round(result: Result, source: Path, work: Path, *, turn: int) -> None:
    """Measure one round, beginning with another command each time."""
    out = work / "out"
    # --reflink=never, where cp knows it: a file system that shares blocks would copy nothing.
    never = ["--reflink=never"] if sys.platform == "linux" else []
    plain = [sys.executable, "-S", str(HERE / "plain_program.py"), str(source), str(out)]
    steps = [
        (ours(source, out, result.scheme), result.job.add),
        ([*plain, str(result.output_bytes)], lambda ran: result.plain.append(ran.seconds)),
        (ours(source, out, result.scheme, "--max-memory", LITTLE), result.limited.add),
        (["cp", "-r", *never, str(source), str(out)], lambda ran: result.copy.append(ran.seconds)),
    ]
    for modules, seconds in (("torch", result.torch), (IMPORTS, result.imports)):
        seconds.append(run([sys.executable, "-c", f"import {modules}"], work).seconds)
    for number in range(len(steps)):
        command, take = steps[(number + turn) % len(steps)]
        warm(source)
        take(run(command, work))
        shutil.rmtree(out)


def first_run(result: Result, source: Path, work: Path) -> None:
    """Run the job unmeasured: kernels are compiled, and the plain program learns how much to write."""
    out = work / "out"
    run(ours(source, out, result.scheme), work)
    result.output_bytes = size_of(out)
    shutil.rmtree(out)


def compare_with_peer(result: Result, peer: Peer, source: Path, work: Path) -> None:
    """Run a peer once, and compare its tensors with ours where they should be the same."""
    mine, theirs = work / "ours", work / "theirs"
    warm(source)
    run(ours(source, mine, result.scheme), work)
    workers = str(os.cpu_count() or 1)
    call = [str(peer.python), "-W", "ignore", "-c", peer.script, str(source), str(theirs)]
    ran = run([*call, peer.schemes[result.scheme], workers], work)
    words = next(line for line in reversed(ran.output.splitlines()) if line.startswith("seconds ")).split()
    result.peers[peer.name] = {
        "seconds": float(words[2]),
        "import_seconds": float(words[1]),
        "peak_gb": ran.peak_gb,
        "differences": differences(mine, theirs) if peer.same_bytes else None,
        "factor": float(words[2]) / min(result.working(result.job)),
    }
    shutil.rmtree(mine)
    shutil.rmtree(theirs)


def table(results: list[Result], size_gb: float) -> Table:
    """Return the results as a table."""
    out = Table(title=f"zeropoint quantize, {size_gb:.2f} GB in; best of rounds, ratios by rounds")
    columns = (
        "scheme", "whole\ns", "torch\ns", "imports\ns", "plain\ns", "of\nplain", "cp -r\ns",
        "of\ncp -r", f"{LITTLE}\ns", "of\nwhole", "peak\nGB", f"{LITTLE}\nGB", "waits",
    )  # fmt: skip
    for name in columns:
        out.add_column(name, justify="left" if name == "scheme" else "right", no_wrap=True)
    out.add_column("peers\nimports apart", no_wrap=True)
    for r in results:
        out.add_row(
            r.scheme, f"{min(r.job.seconds):.2f}", f"{statistics.median(r.torch):.2f}",
            f"{statistics.median(r.imports):.2f}", f"{min(r.plain):.2f}", f"{r.of_plain:.2f}",
            f"{min(r.copy):.2f}", f"{r.of_copy:.2f}", f"{min(r.limited.seconds):.2f}",
            f"{r.of_unlimited:.2f}", f"{max(r.job.peak_gb):.2f}", f"{max(r.limited.peak_gb):.2f}",
            f"{r.sync_share:.0%}",
            "\n".join(peer_line(name, peer) for name, peer in r.peers.items()),
        )  # fmt: skip
    return out


def peer_line(name: str, peer: dict[str, Any]) -> str:
    """Return what a peer took, and whether its bytes are ours."""
    line = f"{name} {peer['seconds']:.1f} s, {peer['peak_gb']:.1f} GB, {peer['factor']:.1f}x"
    if peer["differences"] is None:
        return line
    count = len(peer["differences"])
    return f"{line}; {f'{count} tensors differ' if count else 'bytes equal'}"


def missed(results: list[Result]) -> list[str]:
    """Return the targets that were missed, one line each."""
    lines = []
    for r in results:
        found = (
            (r.of_plain, PLAIN_LIMIT, "times the plain program, imports apart"),
            (r.of_copy, COPY_LIMIT, "times cp -r, the import of torch apart"),
            (r.of_unlimited, LIMITED_FACTOR, f"times as long with {LITTLE}"),
            (max(r.limited.peak_gb), PEAK_LIMIT_GB, f"GB at the peak with {LITTLE}"),
            (r.sync_share, SYNC_SHARE, "of the time waiting for the disk"),
        )
        lines += [
            f"{r.scheme}: {value:.2f} {what}, above {most}" for value, most, what in found if value > most
        ]
        for name, peer in r.peers.items():
            if peer["factor"] < PEER_FACTOR:
                lines.append(f"{r.scheme}: {peer['factor']:.1f} times {name}, below {PEER_FACTOR}")
            if peer["differences"]:
                lines.append(f"{r.scheme}: differs from {name}, first {peer['differences'][0]}")
    return lines


def make_source(work: Path, *options: str) -> Path:
    """Make a checkpoint and return its folder."""
    source = work / "source"
    shutil.rmtree(source, ignore_errors=True)
    run([sys.executable, str(HERE / "llama_checkpoint.py"), str(source), *options], work)
    return source


def require_room(work: Path, needed: int) -> None:
    """Exit when the disk has less room than is needed."""
    free = shutil.disk_usage(work).free
    if free < needed:
        raise SystemExit(f"{work} has {free / 1e9:.1f} GB free and needs {needed / 1e9:.1f}; pass --work")


def measure(args: argparse.Namespace, work: Path, console: Console) -> dict[str, Any]:
    """Measure every scheme, the plain program and the peers; return the figures to be kept."""
    require_room(work, NEEDED_BYTES[args.params_scale])
    source = make_source(work, "--params-scale", args.params_scale)
    size_gb = size_of(source) / 1e9
    results = [Result(scheme=scheme) for scheme in args.schemes]
    for result in results:
        first_run(result, source, work)
    for turn in range(args.rounds):
        for result in results:
            measure_round(result, source, work, turn=turn)
            said = f"{result.job.seconds[-1]:.2f} s, plain {result.plain[-1]:.2f} s"
            said += f", imports {result.imports[-1]:.2f} s"
            console.print(f"round {turn + 1}, {result.scheme}: {said}", highlight=False)
    for peer in PEERS:
        if args.no_peers or not peer.python.exists():
            continue
        for result in results:
            if result.scheme in peer.schemes:
                compare_with_peer(result, peer, source, work)
                console.print(
                    f"{result.scheme}: {peer_line(peer.name, result.peers[peer.name])}", highlight=False
                )
    console.print(table(results, size_gb))
    lines = missed(results)
    return {"source_gb": size_gb, "missed": lines, "results": [asdict(result) for result in results]}


def scale(args: argparse.Namespace, work: Path, console: Console) -> dict[str, Any]:
    """Quantize a checkpoint of a quarter of --size and one of all of it; return time and memory of both."""
    require_room(work, int(args.size * 1.7))
    found = []
    for part in (4, 1):
        layers = max(1, round(args.size / part / LAYER_BYTES))
        options = ("--layers", str(layers), "--shards", str(max(1, args.shards // part)))
        source, out = make_source(work, *options), work / "out"
        cool(source)
        ran = run(ours(source, out, args.schemes[0], "--max-memory", LITTLE), work)
        gb = size_of(source) / 1e9
        found.append({"gb": gb, "seconds": ran.seconds, "peak_gb": ran.peak_gb, "rate": gb / ran.seconds})
        console.print(
            f"{gb:.1f} GB in {len(list(source.glob('*.safetensors')))} shards: {ran.seconds:.1f} s, "
            f"{gb / ran.seconds:.2f} GB/s, peak {ran.peak_gb:.2f} GB", highlight=False,
        )  # fmt: skip
        shutil.rmtree(out)
    small, large = found
    growth = large["seconds"] / small["seconds"] / (large["gb"] / small["gb"])
    lines = []
    if growth > GROWTH:
        lines.append(f"time grows {growth:.2f} times as fast as the size, above {GROWTH}")
    if large["peak_gb"] > small["peak_gb"] + PEAK_GROWTH_GB:
        lines.append(f"the peak grows from {small['peak_gb']:.2f} to {large['peak_gb']:.2f} GB")
    return {"missed": lines, "scale": found, "growth": growth}


def in_bytes(text: str) -> int:
    """Return a size such as 20G in bytes; letters are powers of 1000 here."""
    powers = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    return int(float(text[:-1]) * powers[text[-1]]) if text[-1] in powers else int(text)


def arguments() -> argparse.Namespace:
    """Return the command line's choices."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--params-scale", choices=NEEDED_BYTES, default="full")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--shards", type=int, default=24, help="with --size: shards of the larger checkpoint")
    parser.add_argument("--size", type=in_bytes, help="check that time is linear up to so many bytes")
    parser.add_argument("--work", type=Path, help="where the temporary folder goes (default: the system's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark and clean up, also when it is interrupted."""
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console()
    if not console.is_terminal:
        console.width = 180
    with tempfile.TemporaryDirectory(prefix="zeropoint-benchmark-", dir=args.work) as folder:
        found = (measure if args.size is None else scale)(args, Path(folder), console)
    lines = found["missed"]
    console.print("\n".join(lines) if lines else "every target is met", highlight=False)
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")
    if lines and args.strict:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
