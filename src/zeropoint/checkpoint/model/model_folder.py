"""The directory with a model's configuration and tokenizer for transformers.

It is the checkpoint's; for a URL, and for files that embed both, such as GGUF, a temporary one with their
content. Code is never among it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ...codecs.registry import codec_of
from ..read.source import CONFIG, Source
from ..read.storage import read_small


@contextmanager
def model_folder(source: Source) -> Iterator[Path]:
    """Yield a directory with config.json and the tokenizer of a checkpoint.

    What lies next to weights, in a directory that was given, counts more than what these say.
    """
    indexed = source.container.indexed
    if indexed and isinstance(source.root, Path):
        yield source.root
        return
    said: Mapping[str, str] = {}
    if not indexed:
        said = codec_of(source.container.name).model_format.companions(source.metadata[source.shards[0]])
    with tempfile.TemporaryDirectory(prefix="zeropoint-") as name:
        folder = Path(name)
        texts = {CONFIG: source.config_text or "{}", **said}
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
        for path in source.companions:
            if len(path.parts) == 1 and path.suffix in _READ:
                (folder / path).write_bytes(read_small(source.root / path, limit=_LARGEST)[0])
        yield folder


_READ = frozenset((".json", ".txt", ".model", ".jinja"))
"""Suffixes of the files that configurations and tokenizers consist of."""
_LARGEST = 1 << 30
"""Bytes of such a file at most; the largest tokenizers have a few dozen MB."""
