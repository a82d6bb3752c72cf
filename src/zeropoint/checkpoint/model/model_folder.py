"""The directory that transformers reads a configuration and a tokenizer from.

It is that of the checkpoint, or, of files that say both themselves, such as GGUF, a temporary one with what
these say. Code is never among it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...codecs.registry import codec_of
from ..read.source import CONFIG, Source


@contextmanager
def model_folder(source: Source) -> Iterator[Path]:
    """Yield a directory with config.json and the tokenizer of a checkpoint that is a local directory or file.

    What lies next to weights, in a directory that was given, counts more than what these say.
    """
    assert isinstance(source.root, Path)
    if source.container.indexed:
        yield source.root
        return
    said = codec_of(source.container.name).model_format.companions(source.metadata[source.shards[0]])
    with tempfile.TemporaryDirectory(prefix="zeropoint-") as name:
        folder = Path(name)
        texts = {CONFIG: source.config_text or "{}", **said}
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
        for path in source.companions:
            if len(path.parts) == 1 and path.suffix in _READ:
                (folder / path).write_bytes((source.root / path).read_bytes())
        yield folder


_READ = frozenset((".json", ".txt", ".model", ".jinja"))
"""Suffixes of the files that configurations and tokenizers consist of."""
