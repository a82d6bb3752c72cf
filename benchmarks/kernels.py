"""Check, then time, every kernel: `python benchmarks/kernels.py [--quick] [--json FILE]`, or `make bench`.

First each case's bytes are compared with the reference backend's, and the peers' where they follow the same
rule; a difference ends the run with exit code 1. Then each case is timed in turns with a plain copy of the
same number of bytes (read plus written, scales counted) and with the peers that are installed. GB/s is that
number of bytes over the best time of the call with ``out=``, into memory that is already there, and "of copy"
is that figure over the one of a copy into such memory. "of clone" and the peers are compared with the call
that allocates its result, as theirs do: new memory costs a page fault every few kilobytes. fake_quantize has
no ``out=``. A star marks a figure below its target. torchao and
llama.cpp's C come from an environment of their own, made by benchmarks/peers.sh.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases as c
import every_preset
import ggml_peer
import torch
from facts import describe, fail, machine, record
from figures import Row, summary, table
from rich.console import Console
from torchao_process import Torchao

import zeropoint as zp
from zeropoint.bench.timing import Copies, in_turns

try:
    import compressed_tensors_peer
except ImportError:
    compressed_tensors_peer = None  # type: ignore[assignment]

HERE = Path(__file__).parent
CHECKED_ROWS = 19
"""Rows compared with the reference, which is slow; an odd number, so that no tile ends with them."""
SIDE = 4096
"""Rows and columns: 32 MiB of bfloat16; smaller matrices time the cache and the dispatch."""


def check(plan: list[c.Case], sources: dict[torch.dtype, torch.Tensor], threads: list[int]) -> None:
    """Compare each case with the reference on every number of threads; exit when one differs."""
    found = []
    for count in threads:
        torch.set_num_threads(count)
        for case in plan:
            found += c.disagreements(c.job(case, sources[case.dtype]), CHECKED_ROWS)
    if found:
        fail("\n".join(sorted(set(found))))


def check_peers(sources: dict[torch.dtype, torch.Tensor], ggml: ggml_peer.Ggml | None) -> list[str]:
    """Compare with the peers of this process; return what was found equal, and what has another rule."""
    wide, part = (sources[dtype][:CHECKED_ROWS] for dtype in (torch.float32, torch.bfloat16))
    lines = [_check_torch(wide)]
    if compressed_tensors_peer is not None:
        for name in c.PRESETS:
            scheme = c.NAMED[name].weight
            wrong = compressed_tensors_peer.disagreements(name, part, scheme)
            if wrong:
                fail(f"compressed-tensors {name}: {', '.join(wrong)} differ from ours")
        lines.append(f"compressed-tensors: bytes equal for {', '.join(c.PRESETS)} from bfloat16")
    if ggml is not None:
        lines += [f"ggml {name}: {ggml_peer.compared(ggml, name, wide)}" for name in ggml_peer.KINDS]
    return lines


def _check_torch(part: torch.Tensor) -> str:
    params = zp.choose_params(part * 0.9, "int8:channel:dialect=torch")
    leaf, slope = part.clone().requires_grad_(), part.clone()
    ours = c.fake_and_back(leaf, params, slope)
    theirs = _torch_fake(leaf, params, slope)
    # torch multiplies the slope by a mask, so that the zeros of its gradient carry the slope's sign.
    if not (c.same_bytes(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])):
        fail("torch.fake_quantize_per_channel_affine differs from ours under dialect torch")
    return "torch: fake_quantize equal under dialect=torch, forward bytes and gradient values"


def _torch_fake(leaf: torch.Tensor, params: zp.QuantizationParams, slope: torch.Tensor) -> Any:
    scale = params.scales[0].reshape(-1)
    zero = torch.zeros(len(scale), dtype=torch.int32)
    y = torch.fake_quantize_per_channel_affine(leaf, scale, zero, 0, -128, 127)
    (gradient,) = torch.autograd.grad(y, leaf, slope)
    return y.detach(), gradient


def rivals(job: c.TimedCase, ggml: ggml_peer.Ggml | None) -> dict[str, Callable[[], object]]:
    """Return how the peers of this process do the work of ``job``."""
    case, x = job.case, job.x
    if case.rival in ggml_peer.KINDS and case.dtype == torch.float32:
        if ggml is None:
            return {}
        name = case.rival
        if case.operation == c.DEQUANTIZE:
            return {"ggml": ggml.dequantize(name, ggml.quantize(name, x))}
        return {"ggml": lambda: ggml.quantize(name, x)}
    if case.rival is not None:
        if compressed_tensors_peer is None:
            return {}
        preset = compressed_tensors_peer.Preset(case.rival)
        if case.operation == c.QUANTIZE:
            return {"compressed-tensors": lambda: preset.compress(x)}
        state = preset.compress(x)
        return {"compressed-tensors": lambda: preset.decompress(state)}
    if case.dtype != torch.float32 or not case.scheme.startswith("int8:channel"):
        return {}
    params = zp.choose_params(x, case.scheme)
    if case.operation == c.FAKE:
        leaf, slope = x.clone().requires_grad_(), torch.ones_like(x)
        return {"torch": lambda: _torch_fake(leaf, params, slope)}
    scale = params.scales[0].reshape(-1)
    zero = torch.zeros(len(scale), dtype=torch.int64)
    call = lambda: torch.quantize_per_channel(x, scale, zero, 0, torch.qint8)
    return {"torch": call if case.operation == c.QUANTIZE else call().dequantize}


def measure(case: c.Case, x: torch.Tensor, args: argparse.Namespace, extra: dict[str, Any]) -> Row:
    """Time one case in turns with the copy and the peers. extra: the copy buffers, ggml, the thread count."""
    job = c.job(case, x)
    work = {
        "zeropoint": job.run,
        "again": job.again,
        "copy": extra["copies"].of(job.nbytes),
        "clone": extra["copies"].into_new_memory(job.nbytes),
        **rivals(job, extra["ggml"]),
    }
    seconds = in_turns(work, args.rounds)
    ours, again, copy, clone = (seconds.pop(name) for name in ("zeropoint", "again", "copy", "clone"))
    return Row(
        case=case, threads=extra["threads"], nbytes=job.nbytes, elements=x.numel(),
        seconds=ours, again=again, copy=copy, clone=clone, peers=seconds,
    )  # fmt: skip


def arguments() -> argparse.Namespace:
    """Return the command line's choices."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--quick", action="store_true", help="three rounds of each case instead of fifteen")
    parser.add_argument(
        "--all", action="store_true", help="every preset and type of GGUF; see every_preset.py"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, help="rounds of each case")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose label contains TEXT")
    parser.add_argument("--peers-python", type=Path, default=HERE / ".peers/bin/python")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    args = parser.parse_args()
    args.rounds = args.rounds or (3 if args.quick else 15)
    return args


def run(args: argparse.Namespace, console: Console) -> tuple[list[Row], list[str]]:
    """Check, then time; return the rows and what the checks of peers found."""
    x = c.weights(SIDE, SIDE)
    sources = {torch.float32: x, torch.bfloat16: x.bfloat16()}
    plan = [q for q in (*c.operator_cases(), *c.preset_cases(), *c.block_cases()) if args.only in q.label]
    python = None if args.no_peers or not args.peers_python.exists() else args.peers_python
    ggml = ggml_peer.find(python)
    check(plan, sources, args.threads)
    checked = f"{len(plan)} cases, {CHECKED_ROWS} rows each, threads {args.threads}"
    console.print(f"bytes equal to the reference: {checked}", highlight=False)
    found = [] if args.no_peers else check_peers(sources, ggml)
    torchao = (
        None
        if python is None
        else Torchao(python, x, threads=args.threads, rounds=args.rounds, kept_rows=CHECKED_ROWS)
    )
    if torchao is not None:
        found.append(torchao.check(sources))
    if ggml is None or torchao is None:
        found.append("torchao and llama.cpp's C are not measured; benchmarks/peers.sh installs them")
    for line in found:
        console.print(line, highlight=False)
    extra: dict[str, Any] = {"copies": Copies(math.ceil(2.6 * x.nbytes)), "ggml": ggml}
    rows = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        for case in plan:
            if case.rival in ggml_peer.KINDS and case.dtype == torch.float32 and threads > 1:
                continue  # ggml has one thread
            rows.append(measure(case, sources[case.dtype], args, extra | {"threads": threads}))
            theirs = None if torchao is None else torchao.seconds(rows[-1])
            if theirs is not None:
                rows[-1].peers["torchao"] = theirs
    return rows, found


def main() -> None:
    """Run the benchmark."""
    warnings.filterwarnings("ignore", message=".*quantize_per_channel.*deprecated.*")
    args = arguments()
    console = Console()
    if not console.is_terminal:
        console.width = 180
    facts = machine()
    console.print(describe(facts), highlight=False)
    if args.all:
        every_preset.run(console, side=SIDE, rounds=args.rounds, only=args.only, threads=args.threads)
        return
    rows, found = run(args, console)
    for threads in args.threads:
        console.print(table(rows, threads))
    console.print(summary(rows), highlight=False)
    settings = {"rows": SIDE, "cols": SIDE, "rounds": args.rounds, "threads": args.threads}
    record(args.json, facts, settings=settings, checks=found, rows=[row.record() for row in rows])
    if args.strict and any(row.below_copy or row.too_slow for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
