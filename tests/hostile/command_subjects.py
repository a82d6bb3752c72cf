"""What commands are fuzzed with: checkpoints and other files, one of which is changed, and command lines."""

import copy
import itertools
import json
import random
import shutil
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.cli.checkpoints import write_llama
from tests.codecs import onnx_models
from tests.hostile.mutations import mutate, mutate_file, mutate_numbers
from tests.hostile.target import Mutate
from tests.oracles import tiny_models, tiny_tokenizers
from tests.oracles.tiny_tokenizers import TEXT

from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.file import write_plan
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.read.tensor_entries import TensorEntry
from zeropoint.checkpoint.run.journal import Journal, journal_bytes
from zeropoint.cli.main import main
from zeropoint.codecs.registry import CODECS
from zeropoint.search.search_state import STATE

OUT = "OUT"
"""In a command line, a place that is new for each file."""
STRANGE: Sequence[Any] = (
    None, True, False, -1, 0, 1, 2, 10**6, 10**9, 10**18, 10**30, -(10**18), 0.5, 1e39, 1e308, "", "x",
    "re:(", "\ud800", "\0", "../../x", "a/b@0123", [], {}, [1], [None], ["x"], {"a": 1}, [[]], "1" * 5000,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A file that is changed at random.

    folder: what lies there is as it should be, but for the file. file: its name below the folder. commands:
    one is taken each time; a ``Path`` or OUT may be among the words.
    """

    name: str
    folder: Path
    file: str
    commands: Sequence[Sequence[object]]
    mutate: Mutate


def mutate_json(content: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Return JSON of which some values are others, or bytes are."""
    if rng.random() < 0.3:
        return mutate(content, rng, others)
    try:
        document = json.loads(content)
    except ValueError:
        return mutate(content, rng, others)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = list(_places(document))
        if not places:
            return json.dumps(_strange(rng)).encode()
        holder, key = rng.choice(places)
        change = rng.random()
        if change < 0.2 and isinstance(holder, dict):
            del holder[key]
        elif change < 0.2:
            holder.insert(key, _strange(rng))
        else:
            holder[key] = [holder[key]] if change < 0.3 else _strange(rng)
    return json.dumps(document).encode()


def _strange(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(STRANGE))


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the values of a document: of long lists and tables a few."""
    if isinstance(document, dict | list):
        keys = list(document if isinstance(document, dict) else range(len(document)))
        for key in keys[:40]:
            yield document, key
            yield from _places(document[key])


def mutate_weights(content: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Return a safetensors file of which the header is changed, or some numbers are."""
    begin = 8 + int.from_bytes(content[:8], "little")
    if rng.random() < 0.4:
        return content[:begin] + mutate_numbers(content[begin:], rng, others)[: len(content) - begin]
    if rng.random() < 0.5:
        raw = mutate_json(content[8:begin], rng, others)
        return len(raw).to_bytes(8, "little") + raw + content[begin:]
    return mutate_file(content, rng, others)


def mutate_state(content: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Return a journal of which a record is another one, with the checksums that then are right."""
    if rng.random() < 0.3:
        return mutate(content, rng, others)
    first, *records = (line[18:] for line in content.removeprefix(STATE.mark).splitlines())
    at = rng.randrange(len(records) + 1)
    lines = [first, *records]
    lines[at] = mutate_json(lines[at], rng, lines)
    kept = []
    for line in lines:
        try:
            kept.append(json.loads(line))
        except ValueError:
            continue
    path = Path("/dev/shm") / f"zeropoint-fuzz-{rng.randrange(1 << 40)}"
    try:
        path.write_bytes(journal_bytes(STATE.mark, kept[0]) if kept else STATE.mark)
        journal = Journal(path, STATE.mark)
        journal.append(kept[1:])
        journal.close()
        return path.read_bytes()
    finally:
        path.unlink()


def field(number: int, value: bytes) -> bytes:
    """Return a field of a message in protobuf."""
    return bytes([number << 3 | 2, len(value)]) + value


def _sentencepiece(kind: int) -> bytes:
    pieces = (("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("\u2581a", -1.5, 1), ("b", -2.0, 1))
    found = b"".join(
        field(
            1, field(1, text.encode()) + bytes([2 << 3 | 5]) + struct.pack("<f", score) + bytes([3 << 3, of])
        )
        for text, score, of in pieces
    )
    return field(2, bytes([3 << 3, kind])) + found + field(3, bytes([3 << 3, 0]))


class Subjects:
    """All subjects, whose files are made in a folder.

    layouts: of safetensors whose outputs are among them; compressed-tensors must be.
    Code that is fuzzed has no other door than the command line: it is what a stranger's file comes through.
    """

    def __init__(self, root: Path, layouts: Iterable[str] = CODECS) -> None:
        root.mkdir(exist_ok=True)
        self.root, self._wanted = root, frozenset(layouts)
        self.found: list[Subject] = []
        self.plain = root / "plain"
        tiny_models.write(self.plain, "llama")
        self.wide = write_llama(root / "wide")
        (root / "text.txt").write_text(TEXT * 3)
        self._models()
        self._tokenizers()
        self._layouts()
        self._containers()
        self._helpers()

    def _add(self, name: str, folder: Path, file: str, change: Mutate, *commands: Sequence[object]) -> None:
        self.found.append(Subject(name=name, folder=folder, file=file, mutate=change, commands=commands))

    def _copy(self, name: str, of: Path | None = None) -> Path:
        folder = self.root / name
        shutil.copytree(of or self.plain, folder)
        return folder

    def _calibrated(self, folder: Path, given: object = "random") -> tuple[object, ...]:
        return (
            "quantize",
            folder,
            OUT,
            "--to",
            "int4:g32",
            "--method",
            "mse_weighted",
            "--calibration",
            given,
        )

    def _models(self) -> None:
        folder, text = self._copy("config"), self.root / "text.txt"
        gguf = ("plan", folder, "--to", "q8_0", "--format", "gguf")
        self._add(
            "config.json", folder, "config.json", mutate_json, self._calibrated(folder), gguf,
            ("inspect", folder), ("plan", folder, "--to", "w8a16", "--include", "*"), ("rotate", folder, OUT),
            ("eval", folder, "--against", self.plain, "--text", text, "--context", "16", "--windows", "2",
             "--continuations", "0", "--no-noise-floor"),
        )  # fmt: skip
        folder = self._copy("weights")
        self._add(
            "weights of floats", folder, "model.safetensors", mutate_weights, ("inspect", folder),
            ("plan", folder, "--to", "w8a16"), ("quantize", folder, OUT, "--to", "int8:channel"),
            self._calibrated(folder),
        )  # fmt: skip

    def _tokenizers(self) -> None:
        for kind in ("byte_level", "sentencepiece", "word_pieces", "unigram"):
            folder = self._copy(f"tokenizer-{kind}")
            for file, data in tiny_tokenizers.files(kind).items():
                (folder / file).write_bytes(data)
            commands = (
                ("plan", folder, "--to", "q8_0", "--format", "gguf"),
                self._calibrated(folder, self.root / "text.txt"),
            )
            self._add(f"tokenizer.json, {kind}", folder, "tokenizer.json", mutate_json, *commands)
            if kind == "byte_level":
                folder = self._copy("tokenizer_config", folder)
                commands = (("plan", folder, *commands[0][2:]), ("quantize", folder, *commands[1][2:]))
                self._add("tokenizer_config.json", folder, "tokenizer_config.json", mutate_json, *commands)
        for name, kind in (("BPE", 2), ("Unigram", 1)):
            folder = self._copy(f"sentencepiece-{name}")
            (folder / "tokenizer.json").unlink()
            (folder / "tokenizer.model").write_bytes(_sentencepiece(kind))
            plan = ("plan", folder, "--to", "q8_0", "--format", "gguf")
            self._add(f"tokenizer.model, {name}", folder, "tokenizer.model", mutate, plan)

    def _layouts(self) -> None:
        """Outputs in each layout of safetensors: the configuration is changed, or the weights."""
        for name, codec in CODECS.items():
            if codec.container == "safetensors" and name in self._wanted:
                self._layout_of(name, codec.presets)

    def _layout_of(self, name: str, presets: Iterable[str]) -> None:
        made = self.root / f"of-{name}"
        for base, preset in itertools.product((self.plain, self.wide), presets):
            if main(["quantize", str(base), str(made), "--to", preset, "--format", name, "--force"]) == 0:
                self._layout(name, made, base)
                return
            shutil.rmtree(made, ignore_errors=True)

    def _layout(self, name: str, made: Path, base: Path) -> None:
        for file, change in (("config.json", mutate_json), ("model.safetensors", mutate_weights)):
            folder = self._copy(f"{name}-{file}", made)
            (folder / ".zeropoint.manifest.json").unlink(missing_ok=True)
            commands = (
                ("inspect", folder), ("verify", folder), ("verify", folder, "--against", base),
                ("report", folder, "--json"),
                ("dequantize", folder, OUT), ("convert", folder, OUT, "--format", "compressed-tensors"),
                ("quantize", folder, OUT, "--to", "w8a16", "--dequantize-first"),
            )  # fmt: skip
            self._add(f"{name}, {file}", folder, file, change, *commands)
        folder = self._copy(f"{name}-manifest", made)
        manifests = [path.name for path in folder.iterdir() if "zeropoint" in path.name]
        if name == "compressed-tensors" and manifests:
            commands = (("verify", folder), ("report", folder, "--json"))
            self._add("manifest", folder, manifests[0], mutate_json, *commands)

    def _containers(self) -> None:
        made = self.root / "of-gguf"
        assert main(["quantize", str(self.plain), str(made), "--to", "q4_0", "--format", "gguf"]) == 0
        folder, text = self._copy("gguf", made), self.root / "text.txt"
        model = folder / "model.gguf"
        self._add(
            "GGUF", folder, "model.gguf", mutate_numbers, ("inspect", model), ("dequantize", model, OUT),
            ("report", model, "--json"), ("verify", model),
            (*self._calibrated(model, text), "--dequantize-first"),
            ("quantize", model, OUT, "--to", "q8_0", "--format", "gguf", "--dequantize-first"),
        )  # fmt: skip
        for opset in (17, 21):
            folder = self.root / f"onnx-{opset}"
            onnx_models.save(onnx_models.model(opset=opset), folder)
            model = folder / "model.onnx"
            self._add(
                f"ONNX, operator set {opset}", folder, "model.onnx", mutate, ("inspect", model),
                ("quantize", model, OUT, "--to", "w8a16", "--format", "onnx"),
                ("quantize", model, OUT, "--to", "int4:g16", "--format", "onnx"),
            )  # fmt: skip

    def _helpers(self) -> None:
        """Files next to a checkpoint that is as it should be."""
        side = self.root / "side"
        side.mkdir()
        (side / "imatrix.dat").write_bytes(_imatrix(open_source(self.plain).entries.values()))
        weighted = ("quantize", self.plain, OUT, "--to", "int4:g32", "--method", "mse_weighted")
        self._add(
            "imatrix", side, "imatrix.dat", mutate_numbers, (*weighted, "--imatrix", side / "imatrix.dat")
        )
        (side / "recipe.yaml").write_text(
            "default: int8:channel\nmethod: mse\nrules:\n  - name: '*.up_proj'\n    keep: why\n"
            "  - {type: [Linear], shape: '...,%32', weight: 'int4:g32', dtype: bfloat16}\n"
        )
        self._add(
            "recipe", side, "recipe.yaml", mutate, ("plan", self.plain, "--recipe", side / "recipe.yaml")
        )
        write_plan(make_plan(open_source(self.plain), "int8:channel"), side / "plan.json")
        self._add(
            "plan",
            side,
            "plan.json",
            mutate_json,
            ("quantize", self.plain, OUT, "--plan", side / "plan.json"),
        )
        search = (
            "search",
            self.plain,
            "--budget",
            "6bpw",
            "--candidates",
            "int4:g32,int8:channel",
            "--state",
        )
        for name, more in (("equal", ()), ("linearity", ("--importance", "linearity", "--refine", "1"))):
            file = side / f"{name}.search"
            assert main([*map(str, (*search, file)), *more]) == 0
            self._add(f"search state, {name}", side, file.name, mutate_state, (*search, file, *more))
        self._data(side)

    def _data(self, side: Path) -> None:
        """Files of data that a model runs on, and the cache of an evaluation."""
        text, model = self.root / "text.txt", self.root / "of-compressed-tensors"
        run = (
            "eval", model, "--against", self.plain, "--context", "16", "--windows", "2", "--continuations",
            "1", "--no-noise-floor", "--text",
        )  # fmt: skip
        cache = side / "cache.safetensors"
        assert main([*map(str, (*run, text, "--cache", cache))]) == 0
        self._add("cache of eval", side, cache.name, mutate_weights, (*run, text, "--cache", cache))
        (side / "own.txt").write_text(TEXT)
        own = side / "own.txt"
        self._add("text", side, own.name, mutate, self._calibrated(self.plain, own), (*run, own))
        tagged = "the/at dog/nn barked/vbd at/in the/at cat/nn and/cc ran/vbd ./.\n" * 6
        (side / "tagged.txt").write_text(tagged + tagged.replace("dog", "cow").replace("ran", "sat"))
        self._add("cloze", side, "tagged.txt", mutate, (*run, text, "--cloze", side / "tagged.txt"))
        save_file({"ids": torch.arange(96, dtype=torch.int32) % 50}, side / "ids.safetensors")
        ids = side / "ids.safetensors"
        self._add("token ids", side, ids.name, mutate_weights, self._calibrated(self.plain, ids), (*run, ids))


def _imatrix(entries: Iterable[TensorEntry]) -> bytes:
    """Return an importance matrix of llama.cpp for the weights of linear layers."""
    found = [entry for entry in entries if entry.name.endswith("_proj.weight")]
    parts = [struct.pack("<i", len(found))]
    for entry in found:
        name, columns = entry.name.encode(), entry.shape[1]
        parts.append(struct.pack("<i", len(name)) + name + struct.pack("<ii", 3, columns))
        parts.append(struct.pack(f"<{columns}f", *range(1, columns + 1)))
    return b"".join(parts)
