"""Checkpoint directories, well formed, incomplete or hostile."""

import json
import os
import pickle
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.checkpoint.safetensors_bytes import blob, spec
from tests.checkpoint.written import refused
from tests.hostile.directories import PATHS
from tests.peers import transformers

from zeropoint.checkpoint.read import headers
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.verify.verification import verify
from zeropoint.errors import CheckpointError

INDEX = "model.safetensors.index.json"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def shard(*names: str) -> bytes:
    """Return a file that holds each name as one byte."""
    return blob({name: spec(i, i + 1) for i, name in enumerate(names)}, bytes(len(names)))


def index(weight_map: object, total_size: object = 3) -> bytes:
    return json.dumps({"metadata": {"total_size": total_size}, "weight_map": weight_map}).encode()


SHARDED: Mapping[str, bytes] = {
    ONE: shard("a", "b"),
    TWO: shard("c"),
    INDEX: index({"c": TWO, "a": ONE, "b": ONE}),
    "config.json": b'{"model_type": "x"}',
}


def lay_out(root: Path, *parts: Mapping[str, bytes]) -> Path:
    for part in parts:
        for name, content in part.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
    return root


def test_a_single_file_checkpoint_is_read_with_its_companions(tmp_path: Path) -> None:
    safetensors.torch.save_file(
        {"w": torch.ones(2, 3)}, tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    lay_out(tmp_path, {"config.json": b"{}", "tokenizer.json": b"{}", "1_Pooling/config.json": b"{}"})
    source = open_source(str(tmp_path))
    assert [(e.name, e.dtype, e.shape) for e in source.entries.values()] == [("w", "F32", (2, 3))]
    assert source.shards == ("model.safetensors",)
    assert source.metadata == {"model.safetensors": {"format": "pt"}}
    assert source.companions == tuple(map(Path, ("1_Pooling/config.json", "config.json", "tokenizer.json")))
    assert (source.index, source.left_out, source.notes, source.config) == (None, (), (), {})


def test_shards_are_ordered_by_name_and_tensors_by_their_place(tmp_path: Path) -> None:
    source = open_source(lay_out(tmp_path, SHARDED))
    assert list(source.entries) == ["a", "b", "c"]
    assert source.shards == (ONE, TWO)
    assert source.entries["c"].file == source.root / TWO
    assert source.config == {"model_type": "x"}
    assert source.companions == (Path("config.json"),)
    assert source.notes == ()


def test_one_file_is_taken_alone(tmp_path: Path) -> None:
    lay_out(tmp_path, SHARDED)
    source = open_source(tmp_path / ONE)
    assert (source.shards, list(source.entries), source.companions) == ((ONE,), ["a", "b"], ())
    assert source.config is None
    assert "was given as one file" in source.notes[0]


def test_a_path_that_is_nothing_is_named(tmp_path: Path) -> None:
    assert "nowhere' cannot be opened: No such file or directory" in refused(tmp_path / "nowhere")


def test_an_index_given_as_the_path_is_answered_with_its_directory(tmp_path: Path) -> None:
    assert "is an index, but a checkpoint is its directory; pass" in refused(
        lay_out(tmp_path, SHARDED) / INDEX
    )


@pytest.mark.crossed
@pytest.mark.parametrize("change", ["size", "mtime_ns", "inode", "gone"])
@pytest.mark.parametrize("name", [ONE, INDEX, "config.json"])
def test_a_file_that_changes_after_it_was_opened_is_found(tmp_path: Path, name: str, change: str) -> None:
    """By size, time and inode, for shards, index and config."""
    source = open_source(lay_out(tmp_path, SHARDED))
    source.check_unchanged()
    path = tmp_path / name
    if change == "size":
        os.truncate(path, 9)
    elif change == "mtime_ns":
        os.utime(path, ns=(1, 1))
    elif change == "inode":
        twin = tmp_path / "twin"
        twin.write_bytes(path.read_bytes())
        os.utime(twin, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
        twin.replace(path)
    else:
        path.unlink()
    reason = "No such file or directory" if change == "gone" else change
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(name)}' \(.*{reason}.*\) changed since the checkpoint"
    ):
        source.check_unchanged()


class Bomb:
    """Fail the test when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return pytest.fail, ("was unpickled",)


def test_pickles_next_to_safetensors_are_left_out_and_noted(tmp_path: Path) -> None:
    """They are neither read nor copied."""
    source = open_source(lay_out(tmp_path, SHARDED, {"pytorch_model.bin": pickle.dumps(Bomb())}))
    assert source.left_out == (Path("pytorch_model.bin"),)
    assert any("not copied from" in note and "'pytorch_model.bin'" in note for note in source.notes)


def test_a_git_lfs_pointer_among_the_companions_is_noted(tmp_path: Path) -> None:
    """Weights can be quantized without it."""
    source = open_source(lay_out(tmp_path, SHARDED, {"tokenizer.json": LFS}))
    assert any("tokenizer.json' is a Git LFS pointer" in note for note in source.notes)


@pytest.mark.parametrize("name", PATHS)
def test_a_shard_that_is_no_plain_name_is_refused_before_it_is_opened(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No header is read at all."""
    lay_out(tmp_path / "m", SHARDED, {INDEX: index({"a": ONE, "b": TWO, "c": name})})
    lay_out(tmp_path, {"x.safetensors": shard("c"), "m/sub/x.safetensors": shard("c")})
    monkeypatch.setattr(headers, "parse_header", lambda path: pytest.fail(f"opened {path}"))
    message = refused(tmp_path / "m")
    assert "a shard must be the plain name of a file in the same directory" in message


def test_the_directory_itself_may_be_given_as_a_link(tmp_path: Path) -> None:
    """The user named it."""
    lay_out(tmp_path / "m", SHARDED)
    (tmp_path / "link").symlink_to("m")
    assert open_source(tmp_path / "link").root == Path(os.path.realpath(tmp_path / "m"))


def test_the_links_of_the_hub_cache_are_followed_into_its_blobs_only(tmp_path: Path) -> None:
    """The cache stores snapshots/REVISION/NAME as links to blobs/HASH."""
    model = tmp_path / "models--x--y"
    root = model / "snapshots" / "0123"
    for number, (name, content) in enumerate({**SHARDED, "1_Pooling/config.json": b"{}"}.items()):
        lay_out(model / "blobs", {str(number): content})
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(os.path.relpath(model / "blobs" / str(number), (root / name).parent))
    source = open_source(root)
    assert list(source.entries) == ["a", "b", "c"]
    assert source.companions == (Path("1_Pooling/config.json"), Path("config.json"))
    source.check_unchanged()
    lay_out(tmp_path, {"outside": b""})
    (root / "x").symlink_to(tmp_path / "outside")
    assert "outside of the checkpoint's directory" in refused(root)


def test_all_contradictions_of_index_and_shards_are_listed_at_once(tmp_path: Path) -> None:
    """Missing shards, missing tensors, tensors in another shard, tensors not in the index."""
    weight_map = {"a": TWO, "gone": ONE, "c": TWO, "d": "extra.safetensors", "e": "extra.safetensors"}
    message = refused(lay_out(tmp_path, SHARDED, {INDEX: index(weight_map)}))
    assert "1 missing shards: 'extra.safetensors' (2 tensors)" in message
    assert f"1 missing tensors: 'gone' (of '{ONE}')" in message
    assert f"1 tensors in another shard: 'a' lies in '{ONE}', not '{TWO}'" in message
    assert f"1 tensors that the index does not name: 'b' (in '{ONE}')" in message


def test_two_names_of_one_shard_are_refused(tmp_path: Path) -> None:
    """By a hard link."""
    lay_out(tmp_path, SHARDED, {INDEX: index({"a": "one.safetensors", "b": "two.safetensors"})})
    (tmp_path / ONE).rename(tmp_path / "one.safetensors")
    os.link(tmp_path / "one.safetensors", tmp_path / "two.safetensors")
    assert "tensor 'a' is in both 'one.safetensors' and 'two.safetensors'" in refused(tmp_path)


@pytest.mark.parametrize("total", [4, 3.5, "3", None])
def test_a_wrong_total_size_is_noted(tmp_path: Path, total: object) -> None:
    """No loader reads it, so it is reported only."""
    source = open_source(lay_out(tmp_path, SHARDED, {INDEX: index({"a": ONE, "b": ONE, "c": TWO}, total)}))
    (note,) = source.notes
    assert f"has total_size {total!r}, but the tensors have 3 bytes" in note


@pytest.mark.parametrize(
    "names", [("x-0-of-2", "x-1-of-2"), ("x-1-of-2", "x-2-of-2", "mtp"), ("x-1-of-1", "y-1-of-1")]
)
def test_complete_sets_of_shards_are_accepted(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Some exporters count from 0, and some add an unnumbered shard or a second set."""
    files = {f"{name}.safetensors": shard(name) for name in names}
    lay_out(tmp_path, files, {INDEX: index({name: f"{name}.safetensors" for name in names}, len(names))})
    assert set(open_source(tmp_path).entries) == set(names)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "model-00001-of-00001.safetensors"])
def test_one_file_of_another_name_is_taken(tmp_path: Path, name: str) -> None:
    """There is no choice to make."""
    assert open_source(lay_out(tmp_path, {name: shard("a")})).shards == (name,)


def test_model_safetensors_wins_over_an_index_as_in_transformers(tmp_path: Path) -> None:
    """The index and its shards are neither read nor copied, and both are noted."""
    source = open_source(lay_out(tmp_path, SHARDED, {"model.safetensors": shard("z")}))
    assert list(source.entries) == ["z"]
    assert source.index is None
    assert source.left_out == (Path(ONE), Path(TWO), Path(INDEX))
    assert f"holds both model.safetensors and '{INDEX}': model.safetensors is read" in source.notes[0]


def test_transformers_itself_prefers_model_safetensors(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=8
    )
    model = transformers.BertModel(config)
    model.save_pretrained(tmp_path)
    lay_out(tmp_path, {INDEX: SHARDED[INDEX], ONE: b"broken", TWO: b"broken"})
    again = transformers.BertModel.from_pretrained(tmp_path)
    assert torch.equal(again.embeddings.word_embeddings.weight, model.embeddings.word_embeddings.weight)
    assert list(open_source(tmp_path).shards) == ["model.safetensors"]


def test_the_plain_index_wins_over_its_variants(tmp_path: Path) -> None:
    """Variants are left out and noted."""
    variant = {"model.fp16.safetensors.index.json": SHARDED[INDEX], "model.fp16.safetensors": shard("a")}
    source = open_source(lay_out(tmp_path, SHARDED, variant))
    assert source.index == INDEX
    assert source.left_out == tuple(map(Path, sorted(variant)))


def test_a_missing_config_leaves_the_weights_only(tmp_path: Path) -> None:
    (lay_out(tmp_path, SHARDED) / "config.json").unlink()
    source = open_source(tmp_path)
    assert (source.config, source.config_text) == (None, None)
    assert "has no config.json: weights only" in source.notes[0]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"\xff{}", b"\xef\xbb\xbf{}", b"[" * 100_000, b"9" * 9999]
)
def test_an_invalid_config_leaves_the_weights_only(tmp_path: Path, content: bytes) -> None:
    """It is noted, and still copied as it is."""
    source = open_source(lay_out(tmp_path, SHARDED, {"config.json": content}))
    assert source.config is None
    assert "is not a valid configuration" in source.notes[0]
    assert Path("config.json") in source.companions


def test_a_config_is_kept_to_the_byte_and_nothing_of_it_is_run(tmp_path: Path) -> None:
    """Unknown keys, Infinity as Mamba has it, line ends, and code that auto_map names."""
    text = '{\r\n "unknown": [0.10, Infinity],\t"auto_map": {"AutoModel": "evil.Model"}, "e": "\u00e9"}'
    evil = f"open({str(tmp_path / 'ran')!r}, 'w')"
    source = open_source(lay_out(tmp_path, SHARDED, {"config.json": text.encode(), "evil.py": evil.encode()}))
    assert source.config_text == text
    assert source.config is not None
    assert source.config["unknown"][1] == float("inf")
    assert source.companions == (Path("config.json"), Path("evil.py"))
    assert not (tmp_path / "ran").exists()


def test_a_key_that_stands_twice_in_the_config_is_noted(tmp_path: Path) -> None:
    """The last counts, as for transformers."""
    source = open_source(lay_out(tmp_path, SHARDED, {"config.json": b'{"a": 1, "a": 2}'}))
    assert source.config == {"a": 2}
    assert "has duplicate keys, the last of which counts: 'a'" in source.notes[0]


def test_companions_are_every_regular_file_but_weights_and_caches(tmp_path: Path) -> None:
    files = (
        "a/b/c.txt",
        "2_Dense/model.safetensors",
        ".gitattributes",
        "tokenizer.json",
        "a/.cache/x",
        ".git/y",
    )
    source = open_source(lay_out(tmp_path, SHARDED, dict.fromkeys(files, b"x"), {"stale.safetensors": b""}))
    kept = ("tokenizer.json", "config.json", "a/b/c.txt", "2_Dense/model.safetensors", ".gitattributes")
    assert set(source.companions) == set(map(Path, kept))
    assert source.left_out == (Path(".git"), Path("a/.cache"), Path("stale.safetensors"))


def test_a_hostile_file_name_is_escaped_in_notes(tmp_path: Path) -> None:
    """Names of files are names too."""
    source = open_source(lay_out(tmp_path, SHARDED, {"\x1b[31m\n.bin": b""}))
    assert all(note.isprintable() for note in source.notes)
    assert "\\x1b[31m\\n.bin" in source.notes[0]


def test_a_file_that_was_changed_and_set_back_in_time_is_found(tmp_path: Path) -> None:
    path = lay_out(tmp_path, SHARDED) / ONE
    source = open_source(tmp_path)
    before = path.stat()
    time.sleep(0.02)  # the clock of the file system has ticks of some milliseconds
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CheckpointError, match=r"\(ctime_ns\) changed since the checkpoint was opened"):
        source.check_unchanged()


@pytest.mark.parametrize(
    "config", [{"model_type": ["x"]}, {"model_type": {}}, {"text_config": {"model_type": 7}}]
)
def test_a_type_of_model_that_is_not_a_word_is_refused(tmp_path: Path, config: dict[str, object]) -> None:
    lay_out(tmp_path, SHARDED)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "but it must be text; download it again" in refused(tmp_path)


@pytest.mark.parametrize("open_", [open_source, verify])
def test_no_path_is_not_the_current_directory(
    open_: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(tmp_path, SHARDED)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"the path is empty; name a directory, or write \. for the"):
        open_("")
