"""What llama.cpp's own converter makes of tiny models: digests of names, shapes and types.

    benchmarks/.llama_cpp/bin/python -m tests.oracles.converted [NAME...]

writes converted.json anew, in the environment that benchmarks/llama_cpp.sh makes, with the largest difference
of logits between llama.cpp and transformers.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tests.oracles import tiny_families

RECORDED = Path(__file__).with_name("converted.json")
CONVERTER = Path(__file__).parents[2] / "benchmarks/.llama_cpp/converter"
IDS = [5, 17, 300, 42, 99, 3, 250, 17, 17, 81, 200, 33, 7, 120, 310, 64, 11, 90, 45, 271, 8, 150, 33, 66]
UNREAD = ("granitemoehybrid", "granitemoehybrid_dense")
"""Families whose attention the converter does not see, since transformers 5.23 calls it full_attention."""


def digest(rows: Iterable[tuple[str, tuple[int, ...], str]]) -> str:
    """Return a digest of the names, shapes and types of tensors, in any order."""
    said = "\n".join(f"{name} {list(shape)} {kind}" for name, shape, kind in sorted(rows))
    return hashlib.sha256(said.encode()).hexdigest()[:16]


@functools.cache
def _converter() -> tuple[Any, Any]:
    """Return llama.cpp's converter and the gguf package that lies next to it, which is newer than ours."""
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "gguf"}
    sys.path[:0] = paths = [str(CONVERTER / "gguf-py"), str(CONVERTER)]
    try:
        theirs = importlib.import_module("conversion"), importlib.import_module("gguf")
        theirs[0].load_all_models()
    finally:
        sys.path[:] = [path for path in sys.path if path not in paths]
        for name in [name for name in sys.modules if name.split(".")[0] == "gguf"]:
            del sys.modules[name]
        sys.modules.update(ours)
    return theirs


def convert(folder: Path, out: Path) -> None:
    """Write a GGUF file of float32 of a checkpoint, without its tokenizer, by llama.cpp's converter."""
    theirs, gguf = _converter()
    logging.disable(logging.WARNING)
    made = theirs.get_model_class(
        theirs.get_model_architecture(theirs.ModelBase.load_hparams(folder, False), theirs.ModelType.TEXT)
    )

    def no_tokenizer(self: Any) -> None:
        self.gguf_writer.add_tokenizer_model("none")

    made.set_vocab, made.no_mtp = no_tokenizer, True
    with torch.inference_mode():
        made(folder, gguf.LlamaFileType.ALL_F32, out, eager=True).write()
    logging.disable(logging.NOTSET)


def convert_vision(folder: Path, out: Path) -> None:
    """Write the vision part of a checkpoint to a GGUF file of float16, by llama.cpp's converter."""
    theirs, gguf = _converter()
    logging.disable(logging.WARNING)
    values = theirs.ModelBase.load_hparams(folder, False)
    named = theirs.get_model_architecture(values, theirs.ModelType.MMPROJ)
    with torch.inference_mode():
        made = theirs.get_model_class(named, mmproj=True)
        made(folder, gguf.LlamaFileType.MOSTLY_F16, out, eager=True).write()
    logging.disable(logging.NOTSET)


def logits_of(path: Path) -> torch.Tensor:
    """Return the logits of llama.cpp, (len(IDS), vocabulary)."""
    import llama_cpp
    import numpy as np

    engine = llama_cpp.Llama(
        str(path), n_ctx=64, n_batch=64, n_ubatch=64, n_threads=1, logits_all=True, verbose=False, type_k=0,
        type_v=0,
    )  # fmt: skip
    engine.eval(IDS)
    return torch.from_numpy(np.array(engine.scores[: len(IDS)]))


def logits_by_step(model: Any) -> torch.Tensor:
    """Return the logits of transformers, token by token.

    Its scan of whole sequences of Mamba 2 differs from its own steps by up to 0.009 in Nemotron-H.
    """
    found, state = [], None
    with torch.no_grad():
        for number in IDS:
            made = model(torch.tensor([[number]]), past_key_values=state, use_cache=True)
            state = made.past_key_values
            found.append(made.logits[0, -1])
    return torch.stack(found)


def main() -> None:
    """See the module."""
    import gguf
    from tests.oracle.test_llama_cpp_families import written

    known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    record: dict[str, dict[str, Any]] = {name: known.get(name, {}) for name in tiny_families.FAMILIES}
    for name in sys.argv[1:] or tiny_families.FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            model = tiny_families.write(Path(folder) / "in", name)
            ours = written(Path(folder) / "in", Path(folder) / "out")
            path = ours if name in UNREAD else Path(folder) / "theirs.gguf"
            if name not in UNREAD:
                convert(Path(folder) / "in", path)
            rows = [
                (t.name, tuple(map(int, t.shape[::-1])), t.tensor_type.name)
                for t in gguf.GGUFReader(path).tensors
            ]
            apart = float((logits_by_step(model) - logits_of(ours)).abs().max())
            said = gguf.GGUFReader(ours).fields["general.architecture"].contents()
        record[name] = {
            "model_type": model.config.model_type, "architecture": said, "digest": digest(rows),
            "logits": float(f"{apart:.1e}"),
        }  # fmt: skip
        print(name, record[name], flush=True)  # noqa: T201 (it is a program)
    RECORDED.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
