"""Time the whole job: `python benchmarks/checkpoint.py [--params-scale small] [--json FILE]`.

Makes a Llama-shaped checkpoint of 1.1 billion parameters, then runs `zeropoint quantize SRC OUT --to SCHEME`
and `cp -r SRC OUT` in pairs, each as a fresh process on a warm cache with nothing left to write back. Prints
the wall time of the whole command, the same without what `import torch` takes (measured in the same rounds),
the ratio of that to `cp -r` (median over the pairs) and the peak resident memory. llm-compressor's
model_free_ptq runs once a scheme when benchmarks/.peers exists, and its tensors are compared with ours byte
for byte. Everything is made below one temporary folder, which is removed at the end.

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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from facts import machine
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
SCHEMES = ("mxfp4", "w4a16", "nvfp4a16")
PEER_SCHEMES = ("mxfp4", "nvfp4a16")
NEEDED_BYTES = {"full": 7_000_000_000, "small": 100_000_000}
COPY_LIMIT, PEAK_LIMIT_GB, PEER_FACTOR = 4.0, 1.0, 10.0
MODEL_FREE_PTQ = """
import sys, time
begin = time.perf_counter()
from llmcompressor import model_free_ptq
loaded = time.perf_counter()
source, out, scheme, workers = sys.argv[1:]
ignore = ["lm_head", "re:.*embed_tokens$"]
model_free_ptq(source, out, scheme=scheme, ignore=ignore, max_workers=int(workers), device="cpu")
print(f"\\nseconds {loaded - begin} {time.perf_counter() - loaded}")
"""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One command: its wall time and the most memory it held (pages of files it mapped included)."""

    seconds: float
    peak_gb: float
    output: str


@dataclass(kw_only=True)
class Result:
    """What was measured for one scheme; lists have one entry a round."""

    scheme: str
    seconds: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)
    torch: list[float] = field(default_factory=list)
    peak_gb: list[float] = field(default_factory=list)
    peer: dict[str, Any] | None = None

    @property
    def without_torch(self) -> list[float]:
        """Seconds of each run, less the median of what importing torch takes."""
        loading = statistics.median(self.torch)
        return [seconds - loading for seconds in self.seconds]

    @property
    def of_copy(self) -> float:
        """Time without torch's import over that of ``cp -r``: the median of the pairs."""
        pairs = zip(self.without_torch, self.copy, strict=True)
        return statistics.median(ours / copy for ours, copy in pairs)


def run(command: list[str], folder: Path) -> Ran:
    """Run ``command`` in a fresh process after earlier writes reached the disk; exit when it fails."""
    os.sync()
    with tempfile.TemporaryFile("w+", dir=folder) as log:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
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


def pair(result: Result, source: Path, work: Path, *, ours_first: bool) -> None:
    """Measure one round: the job, the copy and the import, the order changing from round to round."""
    out, copied = work / f"out-{result.scheme}", work / "copied"
    # --reflink=never, where cp knows it: a file system that shares blocks would copy nothing.
    never = ["--reflink=never"] if sys.platform == "linux" else []
    job = [sys.executable, "-m", "zeropoint", "quantize", str(source), str(out), "--to", result.scheme]
    copy = ["cp", "-r", *never, str(source), str(copied)]
    result.torch.append(run([sys.executable, "-c", "import torch"], work).seconds)
    for command in (job, copy) if ours_first else (copy, job):
        for old in (out, copied):
            shutil.rmtree(old, ignore_errors=True)
        warm(source)
        ran = run(command, work)
        if command is copy:
            result.copy.append(ran.seconds)
        else:
            result.seconds.append(ran.seconds)
            result.peak_gb.append(ran.peak_gb)
    shutil.rmtree(copied, ignore_errors=True)
    shutil.rmtree(out, ignore_errors=True)


def beside_peer(result: Result, source: Path, work: Path, python: Path) -> None:
    """Run llm-compressor once and compare its tensors with ours."""
    ours, theirs = work / "ours", work / "theirs"
    warm(source)
    job = [sys.executable, "-m", "zeropoint", "quantize", str(source), str(ours), "--to", result.scheme]
    run(job, work)
    workers = str(os.cpu_count() or 1)
    call = [str(python), "-W", "ignore", "-c", MODEL_FREE_PTQ, str(source), str(theirs)]
    ran = run([*call, result.scheme.upper(), workers], work)
    loading, running = (float(word) for word in ran.output.splitlines()[-1].split()[1:])
    result.peer = {
        "seconds": running,
        "import_seconds": loading,
        "peak_gb": ran.peak_gb,
        "differences": differences(ours, theirs),
        "factor": running / min(result.without_torch),
    }
    shutil.rmtree(ours)
    shutil.rmtree(theirs)


def differences(ours: Path, theirs: Path) -> list[str]:
    """Return the names of tensors that are not the same bytes in the same shape in both checkpoints."""
    left, right = tensors(ours), tensors(theirs)
    found = [f"{name}: in one checkpoint only" for name in sorted(left.keys() ^ right.keys())]
    for name in sorted(left.keys() & right.keys()):
        (path, begin, shape), (other, start, wanted) = left[name], right[name]
        if shape != wanted:
            found.append(f"{name}: shape and bytes {shape}, theirs {wanted}")
        else:
            pairs = zip(pieces(path, begin, shape[1]), pieces(other, start, wanted[1]), strict=True)
            if any(a != b for a, b in pairs):
                found.append(f"{name}: other bytes")
    return found


def tensors(folder: Path) -> dict[str, tuple[Path, int, tuple[list[int], int]]]:
    """Return name to file, first byte, and (shape, bytes) of every tensor of a checkpoint."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            found[name] = path, 8 + length + begin, (entry["shape"], end - begin)
    return found


def pieces(path: Path, begin: int, length: int) -> Iterator[bytes]:
    """Yield the bytes of one tensor, a few megabytes at a time."""
    with path.open("rb") as file:
        file.seek(begin)
        for done in range(0, length, 1 << 22):
            yield file.read(min(1 << 22, length - done))


def table(results: list[Result], size_gb: float) -> Table:
    """Return the results as a table."""
    out = Table(title=f"zeropoint quantize, {size_gb:.2f} GB in; best of rounds, ratio by pairs")
    columns = ("scheme", "whole s", "import torch s", "without s", "cp -r s", "of cp -r", "peak GB")
    for name in columns:
        out.add_column(name, justify="left" if name == "scheme" else "right", no_wrap=True)
    out.add_column("llm-compressor (import apart)", no_wrap=True)
    for r in results:
        peer = "" if r.peer is None else (
            f"{r.peer['seconds']:.1f} s, {r.peer['peak_gb']:.1f} GB, {r.peer['factor']:.1f}x; "
            + (f"{len(r.peer['differences'])} tensors differ" if r.peer["differences"] else "bytes equal")
        )  # fmt: skip
        out.add_row(
            r.scheme, f"{min(r.seconds):.2f}", f"{statistics.median(r.torch):.2f}",
            f"{min(r.without_torch):.2f}", f"{min(r.copy):.2f}", f"{r.of_copy:.2f}",
            f"{max(r.peak_gb):.2f}", peer,
        )  # fmt: skip
    return out


def missed(results: list[Result]) -> list[str]:
    """Return the targets that were missed, one line each."""
    lines = []
    for r in results:
        if r.of_copy > COPY_LIMIT:
            lines.append(f"{r.scheme}: {r.of_copy:.1f} times cp -r, above {COPY_LIMIT}")
        if max(r.peak_gb) > PEAK_LIMIT_GB:
            lines.append(f"{r.scheme}: peak {max(r.peak_gb):.2f} GB, above {PEAK_LIMIT_GB}")
        if r.peer is not None and r.peer["factor"] < PEER_FACTOR:
            lines.append(f"{r.scheme}: {r.peer['factor']:.1f} times llm-compressor, below {PEER_FACTOR}")
        if r.peer is not None and r.peer["differences"]:
            lines.append(f"{r.scheme}: differs from llm-compressor, first {r.peer['differences'][0]}")
    return lines


def arguments() -> argparse.Namespace:
    """Return the command line's choices."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--params-scale", choices=NEEDED_BYTES, default="full")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--work", type=Path, help="where the temporary folder goes (default: the system's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--peers-python", type=Path, default=HERE / ".peers/bin/python")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    return parser.parse_args()


def measure(args: argparse.Namespace, work: Path, console: Console) -> tuple[list[Result], float]:
    """Make the checkpoint and measure; return the results and its size in GB."""
    free = shutil.disk_usage(work).free
    needed = NEEDED_BYTES[args.params_scale]
    if free < needed:
        raise SystemExit(f"{work} has {free / 1e9:.1f} GB free and needs {needed / 1e9:.1f}; pass --work")
    source = work / "source"
    maker = [sys.executable, str(HERE / "llama_checkpoint.py"), str(source)]
    run([*maker, "--params-scale", args.params_scale], work)
    size_gb = sum(path.stat().st_size for path in source.iterdir()) / 1e9
    results = [Result(scheme=scheme) for scheme in args.schemes]
    for turn in range(args.rounds):
        for result in results:
            pair(result, source, work, ours_first=turn % 2 == 0)
            said = (
                f"{result.seconds[-1]:.2f} s, cp -r {result.copy[-1]:.2f} s, import {result.torch[-1]:.2f} s"
            )
            console.print(f"round {turn + 1}, {result.scheme}: {said}", highlight=False)
    if not args.no_peers and args.peers_python.exists():
        for result in results:
            if result.scheme in PEER_SCHEMES:
                beside_peer(result, source, work, args.peers_python)
                console.print(f"llm-compressor, {result.scheme}: {result.peer}", highlight=False)
    return results, size_gb


def main() -> None:
    """Run the benchmark and clean up, also when it is interrupted."""
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console()
    if not console.is_terminal:
        console.width = 150
    with tempfile.TemporaryDirectory(prefix="zeropoint-benchmark-", dir=args.work) as folder:
        results, size_gb = measure(args, Path(folder), console)
    console.print(table(results, size_gb))
    lines = missed(results)
    console.print("\n".join(lines) if lines else "every target is met", highlight=False)
    if args.json is not None:
        everything = {"machine": machine(), "source_gb": size_gb, "missed": lines}
        everything["results"] = [asdict(result) for result in results]
        args.json.write_text(json.dumps(everything, indent=1) + "\n")
    if lines and args.strict:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
