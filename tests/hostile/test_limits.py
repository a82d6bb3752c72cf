"""The whole corpus, decided by processes that the operating system keeps small."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.hostile.gguf_files import GGUF_FILES
from tests.hostile.layouts import LAYOUT_CASES
from tests.hostile.quantized import QUANTIZED
from tests.hostile.test_files import said
from tests.hostile.write_corpus import CORPUS, write_corpus

ROOT = Path(__file__).parents[2]


def child(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with one arena for all allocations, so that its address space is what it uses."""
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )


def test_the_whole_corpus_takes_little_memory_and_processor_time(tmp_path: Path) -> None:
    expected = write_corpus(tmp_path)
    assert len(expected) == len(CORPUS)
    done = child("-m", "tests.hostile.limited", str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    decided = json.loads(done.stdout)
    assert len(decided) == len(expected)
    for case, (planned, inspected, verified) in zip(CORPUS, decided, strict=True):
        if case in (*QUANTIZED, *LAYOUT_CASES, *GGUF_FILES):
            assert said(case.refusal, verified), (str(case), verified)
        elif case.refusal is not None:
            assert all(said(case.refusal, error) for error in (planned, inspected, verified)), str(case)
        else:
            unread = "is not quantized" if case.is_directory else "is one file, without a configuration"
            assert (inspected, said(unread, verified)) == (None, True), (str(case), verified)


START = "from tests.hostile import limited; limited.limit({})\n"


def test_what_allocates_past_the_limit_ends_with_an_error() -> None:
    assert "MemoryError" in child("-c", START.format(9) + "bytearray(2 * limited.MORE_BYTES)").stderr


def test_what_computes_past_the_limit_ends_with_the_signal() -> None:
    assert child("-c", START.format(1) + "while True: pass").returncode == -signal.SIGXCPU
