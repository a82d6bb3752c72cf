"""The place where faults happen, and what must hold after each: the invariants.

I1  the source is untouched
I2  a complete checkpoint that is overwritten is seen whole, or not at all
I3  whatever has its final name holds its final bytes
I4  an index or a configuration is there only when all shards are
I5  the same command, run again, ends with the bytes of an undisturbed run
I6  nothing else is left after success
I7  a failure that can be survived has a status other than 0 and one line with file and reason
I8  no file that is not ours is touched
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from tests.faults.calls import Fault, Layer
from tests.faults.children import Job
from tests.faults.plants import planted
from tests.faults.tiny import SCHEME, small_units, write_tiny

from zeropoint.cli.main import main

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
GRAPH = "model.onnx"
JOURNAL, LOCK = ".zeropoint.journal", ".zeropoint.lock"
HIDDEN = (".partial", JOURNAL, LOCK)
NEIGHBOR = "neighbor.txt"
SOLVED = ".out.solved"
"""Keeps weights that are solved on data, next to an output that is not complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a command line ended in this process."""

    status: int
    out: str
    err: str


@dataclass
class Tally:
    """What a suite tried, for the line that it ends with."""

    points: int = 0
    faults: int = 0
    resumes: int = 0
    compared: int = 0

    def __str__(self) -> str:
        return (
            f"{self.points} points tried, {self.faults} faults struck, {self.resumes} resumes, "
            f"{self.compared} bytes compared: all equal"
        )


def run_here(arguments: tuple[str, ...]) -> Ran:
    """Carry out a command line in this process, with small units."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), small_units():
        status = main(arguments)
    return Ran(status=status, out=out.getvalue(), err=err.getvalue())


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder, by relative path."""
    files = sorted(path for path in folder.rglob("*") if not path.is_dir())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@dataclass
class Stage:
    """A source, a folder with the output and a file that is none of our business, and what must come out.

    command: what is done, and the option that the scheme belongs to. golden: SHA-256 of each file of an
    undisturbed run, by name. old: of what stood there before, if anything. options: with the report as JSON,
    because drawing its tables is a third of the time of a run. No page is written: test_own_files.py has the
    faults of files such as that one.
    """

    source: Path
    work: Path
    source_digests: dict[str, str]
    golden: dict[str, str]
    golden_bytes: int
    command: tuple[str, ...] = ("quantize", "--to")
    scheme: str = SCHEME
    options: tuple[str, ...] = ("--workers", "1", "--json")
    old: dict[str, str] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)

    @classmethod
    def built(cls, folder: Path, *, seed: int = 0) -> Stage:
        """Write the source and make the golden run."""
        return cls.of(write_tiny(folder / "source", seed=seed), folder / "work")

    @classmethod
    def of(cls, source: Path, work: Path, **asked: Any) -> Stage:
        """Make the golden run of what is asked of a source."""
        found = digests(source)
        stage = cls(source=source, work=work, source_digests=found, golden={}, golden_bytes=0, **asked)
        stage.clear()
        ran = run_here(stage.arguments)
        assert ran.status == 0, ran.err
        stage.golden = digests(stage.out)
        stage.golden_bytes = sum((stage.out / name).stat().st_size for name in stage.golden)
        for name in stage.golden:
            if name.endswith(".safetensors"):
                with safe_open(stage.out / name, "pt") as opened:  # another reader than ours
                    assert list(opened.keys())
        stage.clear()
        return stage

    @property
    def out(self) -> Path:
        """The output directory."""
        return self.work / "out"

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command line."""
        overwrite = ("--overwrite",) if self.old else ()
        verb, *asked = self.command
        page = ("--no-report",) if verb in {"quantize", "convert"} else ()
        what = (*asked, self.scheme, *self.options, *page, *overwrite)
        return (verb, str(self.source), str(self.out), *what)

    def job(self, **circumstances: object) -> Job:
        """Return the command line as a job for a child."""
        return Job(arguments=self.arguments, root=self.work, **circumstances)  # type: ignore[arg-type]

    def clear(self) -> None:
        """Put the folder back to how it is before a run."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        (self.work / NEIGHBOR).write_text("not yours")

    def run(self, fault: Fault | None = None, *, plant: str | None = None) -> tuple[Ran, Layer]:
        """Run in this process under a layer of calls."""
        layer = Layer(root=self.work, fault=fault)
        return self.run_under(layer, plant=plant), layer

    def run_under(self, layer: Layer, *, plant: str | None = None) -> Ran:
        """Run in this process under a layer that may have seen other runs."""
        with layer.installed(), planted(plant):
            return run_here(self.arguments)

    def check(self) -> None:
        """Assert I1, I2, I3, I4 and I8 of what is on disk now."""
        assert digests(self.source) == self.source_digests, "I1: the source has changed"
        found = digests(self.work)
        assert found.pop(NEIGHBOR) == hashlib.sha256(b"not yours").hexdigest(), "I8: a neighbor has changed"
        strange = [name for name in found if not name.startswith(("out/", SOLVED))]
        assert not strange, f"I8: files that nobody asked for: {strange}"
        found = {
            name.removeprefix("out/"): digest for name, digest in found.items() if name.startswith("out/")
        }
        final = {name: d for name, d in found.items() if not Path(name).name.startswith(".")}
        hidden = [name for name in found if name not in final]
        assert all(name.endswith((".partial", ".zeropoint.journal", ".zeropoint.lock")) for name in hidden), (
            hidden
        )
        wrong = [name for name, d in final.items() if d not in (self.golden.get(name), self.old.get(name))]
        assert not wrong, f"I3: final names with other bytes: {wrong}"
        for says in (name for name in (INDEX, CONFIG, GRAPH) if name in final):
            of = [each for each in (self.golden, self.old) if each.get(says) == final[says]]
            missing = [self._missing(final, generation) for generation in of]
            assert not all(missing), f"I2, I4: {says} stands there without {missing}"

    @staticmethod
    def _missing(final: dict[str, str], generation: dict[str, str]) -> list[str]:
        shards = (name for name in generation if name.endswith((".safetensors", ".gguf", ".onnx.data")))
        return [name for name in shards if final.get(name) != generation[name]]

    def check_failed(self, ran: Ran) -> None:
        """Assert I7 and what must hold of the disk."""
        assert ran.status not in (0, None), "I7: the command claims success"
        assert ran.err.startswith("error: "), ran.err
        assert ran.err.count("\n") == 1, f"I7: {ran.err}"
        places = map(str, (self.out, self.source, self.work / SOLVED))
        assert any(place in ran.err for place in places), f"I7: no file is named: {ran.err}"
        self.check()

    def check_resumed(self) -> None:
        """Run the same command again, undisturbed, and assert I5 and I6."""
        self.check()
        done = self.is_complete and not (self.out / JOURNAL).exists()
        ran = run_here(self.arguments)
        assert ran.status == 0, f"I5: {ran.err}"
        if done and not self.old:  # nothing was left to do, and what is complete is not written again
            assert "is complete already" in ran.out, ran
        self.check_complete()
        self.tally.resumes += 1

    def check_complete(self) -> None:
        """Assert that the output holds the golden bytes and nothing else."""
        self.check()
        left = [name for name in digests(self.work) if name.startswith(SOLVED)]
        assert not left, f"I8: files that nobody needs any more: {left}"
        found = digests(self.out)
        assert found == self.golden, f"I5, I6: {sorted(set(found.items()) ^ set(self.golden.items()))}"
        self.tally.compared += self.golden_bytes

    @property
    def is_complete(self) -> bool:
        """Whether everything is published, whatever hidden files remain."""
        return self.out.exists() and self.golden.items() <= digests(self.out).items()

    def index(self) -> dict[str, str]:
        """Return the weight map of the output."""
        weight_map: dict[str, str] = json.loads((self.out / INDEX).read_text())["weight_map"]
        return weight_map
