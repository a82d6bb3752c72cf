"""Checkpoint directories, hostile, damaged or odd, and what must be said of each."""

import json
import pickle
from collections.abc import Iterator, Mapping

from tests.checkpoint.safetensors_bytes import blob, spec
from tests.hostile.case import Case, Content, fifo, folder, link, sparse
from tests.hostile.files import LFS, Bomb

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"


def shard(*names: str) -> bytes:
    """Return a file that holds each name as a matrix of float32 that can be quantized."""
    parts = {name: spec(i * 256, (i + 1) * 256, dtype="F32", shape=[8, 8]) for i, name in enumerate(names)}
    return blob(parts, bytes(256 * len(names)))


def index(weight_map: object, total_size: object = 768) -> bytes:
    """Return an index with this map of tensors to shards."""
    return json.dumps({"metadata": {"total_size": total_size}, "weight_map": weight_map}).encode()


A, B, C = "a.weight", "b.weight", "c.weight"
MAP = {A: ONE, B: ONE, C: TWO}
SHARDED: Mapping[str, Content] = {
    ONE: shard(A, B), TWO: shard(C), INDEX: index(MAP), CONFIG: b'{"model_type": "x"}',
}  # fmt: skip


def _case(topic: str, name: str, refusal: str | None, **changes: object) -> Case:
    """Return a checkpoint of two shards with ``files`` added or replaced, ``without`` some."""
    files = {**SHARDED, **changes.get("files", {})}  # type: ignore[dict-item]
    for gone in changes.get("without", ()):  # type: ignore[attr-defined]
        del files[gone]
    return Case(topic=topic, name=name, refusal=refusal, content=files)


PATHS = (
    "../x.safetensors", "../../../../etc/passwd", "/etc/passwd", "/dev/zero", "sub/x.safetensors", "./" + TWO,
    "..\\x.safetensors", "C:\\x.safetensors", "a\0b", "", ".", "..", "x" * 256, "\ud800.safetensors",
    "\x1b[2J/", "file:///etc/passwd/", "sub//",
)  # fmt: skip
_OUTSIDE = "/usr/bin/env"


def _paths() -> Iterator[Case]:
    """Names that lead out of the directory, links, devices, FIFOs."""
    for path in PATHS:
        yield _case("path", f"shard named {path[:24]!a}", "must be the plain name of a file",
                    files={INDEX: index({A: ONE, B: ONE, C: path})})  # fmt: skip
    for name in (TWO, INDEX, CONFIG, "tokenizer.json", "sub/notes.txt"):
        yield _case("path", f"{name} links outside", "outside of the checkpoint's directory",
                    files={name: link(_OUTSIDE)})  # fmt: skip
        yield _case("path", f"{name} is a FIFO", "is a FIFO, but must be a regular file", files={name: fifo})
    yield _case("path", "shard links to a device", "outside of the checkpoint's directory",
                files={TWO: link("/dev/zero")})  # fmt: skip
    yield _case("path", "shard links to itself", "cannot be opened", files={TWO: link(TWO)})
    yield _case(
        "path", "shard links to nothing", "cannot be opened: No such file", files={TWO: link("nowhere")}
    )
    yield _case("path", "companion links to nothing", "cannot be opened: No such file",
                files={"tokenizer.json": link("nowhere")})  # fmt: skip
    yield _case("path", "shard links inside", None, files={TWO: link("store"), "store": shard(C)})
    yield _case("path", "folder links upwards", "is a directory, but must be", files={"sub": link(".")})
    for name in (TWO, INDEX, CONFIG):
        yield _case("path", f"{name} is a directory", "is a directory, but must be", files={name: folder})


def _contradictions() -> Iterator[Case]:
    """Index against shards."""
    yield _case("shards", "all contradictions at once", "1 missing shards: 'extra.safetensors' (2 tensors)",
                files={INDEX: index({A: TWO, "x": ONE, C: TWO, "d": "extra.safetensors",
                                     "e": "extra.safetensors"})})  # fmt: skip
    yield _case("shards", "missing shard", "1 missing shards", without=(TWO,))
    yield _case("shards", "missing tensor", f"1 missing tensors: 'd' (of '{ONE}')",
                files={INDEX: index({**MAP, "d": ONE})})  # fmt: skip
    yield _case("shards", "tensor in another shard", f"'{A}' lies in '{ONE}', not '{TWO}'",
                files={INDEX: index({**MAP, A: TWO})})  # fmt: skip
    yield _case(
        "shards", "shards swapped", "3 tensors in another shard", files={ONE: shard(C), TWO: shard(A, B)}
    )
    yield _case("shards", "tensor that the index leaves out",
                f"1 tensors that the index does not name: '{B}'",
                files={INDEX: index({A: ONE, C: TWO})})  # fmt: skip
    yield _case("shards", "1000 missing tensors", "and 950 more",
                files={INDEX: index(MAP | {f"gone{i}": ONE for i in range(1000)})})  # fmt: skip
    yield _case("shards", "shard cut", "is truncated", files={TWO: shard(C)[:-1]})
    yield _case("shards", "shard empty", "0 bytes are too small", files={TWO: b""})
    yield _case("twice", "tensor in two shards", f"tensor '{A}' is in both", files={TWO: shard(C, A)})
    yield _case("twice", "one shard under two names", f"tensor '{A}' is in both",
                files={INDEX: index({A: "one.safetensors", B: "two.safetensors"}),
                       "one.safetensors": shard(A, B),
                       "two.safetensors": link("one.safetensors")})  # fmt: skip


_MAPLESS = "must be a JSON object whose weight_map names the shard of each tensor"
_INDEXES = (
    (b"", "Expecting value"), (b"{", "Expecting property name"), (b"\xff", "'utf-8' codec"),
    (b"\xef\xbb\xbf{}", "BOM"), (b'{"weight_map": {"a": NaN}}', "NaN is not JSON"),
    (b'{"weight_map": ' + b"9" * 10_000 + b"}", "Exceeds the limit"),
    (b'{"weight_map": {"a": -Infinity}}', "-Infinity is not JSON"),
    (b"[" * 100_000, "nested too deeply"), (b'{"a":' * 100_000, "nested too deeply"),
    (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "names twice: 'a'"),
    (b'{"weight_map": {}, "weight_map": {}}', "'weight_map' appears twice"),
    (b"[]", _MAPLESS), (b"{}", _MAPLESS), (b"null", _MAPLESS), (b'"weight_map"', _MAPLESS),
    (b'{"weight_map": {}}', _MAPLESS), (b'{"weight_map": ["a"]}', _MAPLESS),
    (b'{"weight_map": {"a\\u001b": 1}}', "a int, but must name a shard"),
    (b'{"weight_map": {"a": null}}', "a NoneType, but must name a shard"),
    (b'{"weight_map": {"a": ["x"]}}', "a list, but must name a shard"),
    (LFS, "a Git LFS pointer"), (b"\x1f\x8b\x08" + bytes(9), "not JSON but a gzip"),
    (pickle.dumps(Bomb()), "a Python pickle"),
)  # fmt: skip
_NUMBERINGS = (
    (("1-of-3", "2-of-3"), "1, 2 of 3, but all 3 must"), (("1-of-2", "2-of-3"), "1, 2 of 2, 3, but all 3"),
    (("1-of-2", "3-of-2"), "1, 3 of 2, but all 2 must"), (("1-of-1", "2-of-1"), "1, 2 of 1, but all 1 must"),
    (("1-of-999999999",), "but all 999999999 must"), (("0-of-2", "1-of-2"), None), (("1-of-1", "x"), None),
)  # fmt: skip


def _indexes() -> Iterator[Case]:
    """The index itself, shard counts, several candidates."""
    for content, words in _INDEXES:
        yield _case("index", f"index {content[:24]!r} of {len(content)}", words, files={INDEX: content})
    for name in (INDEX, CONFIG):
        yield _case("index", f"{name} of a terabyte", f"{2**40} bytes, above the limit of",
                    files={name: sparse(b"", 2**40)})  # fmt: skip
    for total in (767, -1, 3.5, "768", None, 10**30, [], {}):
        yield _case("index", f"total_size {total!r}", None, files={INDEX: index(MAP, total)})
    yield _case("index", "metadata is a list", None,
                files={INDEX: json.dumps({"metadata": [], "weight_map": MAP}).encode()})  # fmt: skip
    for numbers, optional in _NUMBERINGS:
        names = [f"m-{number}.safetensors" for number in numbers]
        files = {name: shard(f"{i}.weight") for i, name in enumerate(names)}
        files[INDEX] = index({f"{i}.weight": name for i, name in enumerate(names)}, 256 * len(names))
        yield Case(topic="count", name=f"shards {numbers}", refusal=optional, content=files)
    for names in ([ONE], [ONE, TWO], ["a.safetensors", "b.safetensors"]):
        yield Case(topic="count", name=f"no index for {names}", refusal=f"but no {INDEX} that says which",
                   content={name: shard(name) for name in names})  # fmt: skip
    yield _case("indexes", "single file and index", None, files={SINGLE: shard("z.weight")})
    variant = {"model.fp16.safetensors.index.json": index(MAP)}
    yield _case("indexes", "index and its variant", None, files=variant)
    yield _case("indexes", "two variants of the index", "holds 2 indexes", without=(INDEX,),
                files={**variant, "x.safetensors.index.json": index(MAP)})  # fmt: skip


_CONFIGS = (b"", b"{", b"[1]", b"null", b"\xff{}", b"\xef\xbb\xbf{}", b"[" * 100_000, b"9" * 9999)


def _configs() -> Iterator[Case]:
    """The configuration, other files, names of files."""
    yield _case("config", "no configuration", None, without=(CONFIG,))
    for content in _CONFIGS:
        label = f"configuration {content[:12]!r} of {len(content)}"
        yield _case("config", label, None, files={CONFIG: content})
    yield _case("config", "remote code", None, files={
        CONFIG: b'{"auto_map": {"AutoModel": "evil.Model"}, "x": [Infinity]}', "evil.py": b"0"})  # fmt: skip
    yield _case("config", "key twice", None, files={CONFIG: b'{"a": 1, "a": 2}'})
    yield _case("config", "pointer as configuration", "run `git lfs pull`", files={CONFIG: LFS})
    yield _case("other", "pointer as shard", "a Git LFS pointer", files={TWO: LFS})
    yield _case("other", "pointer as companion", None, files={"tokenizer.json": LFS})
    for name in ("pytorch_model.bin", "model.pt", "last.ckpt", "consolidated.00.pth", "w.npz", "x.gguf"):
        yield Case(topic="pickle", name=f"{name} alone",
                   refusal=f"weights only as '{name}'|begin as a GGUF file",
                   content={name: pickle.dumps(Bomb()), CONFIG: b"{}"})  # fmt: skip
    yield _case("pickle", "next to the shards", None, files={"pytorch_model.bin": pickle.dumps(Bomb())})
    yield Case(topic="pickle", name="pickle as model.safetensors", refusal="a Python pickle",
               content={SINGLE: pickle.dumps(Bomb())})  # fmt: skip
    yield Case(topic="path", name="empty directory", refusal="holds no model.safetensors", content={})
    yield _case("name", "escapes for a terminal", None, files={"\x1b[31m\n.txt": b"", "\x9b2J.md": b""})


DIRECTORIES: tuple[Case, ...] = (*_paths(), *_contradictions(), *_indexes(), *_configs())
