"""How much `import zeropoint` adds to `import torch`: fresh processes in turns, medians.

Each round starts one process that imports torch and one that imports zeropoint (which imports torch); the
extra is the median difference of the pairs. Exit code 1 when it is half a second or more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from facts import machine
from rich.console import Console

LIMIT_SECONDS = 0.5


def process_seconds(code: str) -> float:
    """Return the wall time of a fresh interpreter that runs ``code``."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - begin


def main() -> None:
    """Measure and report."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    codes = {"python": "pass", "torch": "import torch", "zeropoint": "import zeropoint"}
    for code in codes.values():  # bytecode is written and files are in memory from here on
        process_seconds(code)
    seconds: dict[str, list[float]] = {name: [] for name in codes}
    for turn in range(args.rounds):
        for name in (list(codes), list(reversed(codes)))[turn % 2]:
            seconds[name].append(process_seconds(codes[name]))
    pairs = zip(seconds["zeropoint"], seconds["torch"], strict=True)
    extra = statistics.median(ours - torch for ours, torch in pairs)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        Console().print(f"{name:10s} {median:6.2f} s  (best {min(seconds[name]):.2f} s)", highlight=False)
    Console().print(f"zeropoint adds {extra:.3f} s to torch; the limit is {LIMIT_SECONDS} s", highlight=False)
    if args.json is not None:
        everything = {"machine": machine(), "extra": extra, "medians": medians, "seconds": seconds}
        args.json.write_text(json.dumps(everything, indent=1) + "\n")
    raise SystemExit(extra >= LIMIT_SECONDS)


if __name__ == "__main__":
    main()
