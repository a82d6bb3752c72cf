"""The index and the quantization configuration next to the shards."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ...architectures import Config
from ...codecs.containers import CONTAINERS
from ...codecs.containers.protocol import Found, Row
from ...codecs.protocol import Codec, Contents, Documents, Module
from ...codecs.registry import codec_of
from ...errors import CheckpointError
from ...libraries import reading
from ...loaded_names import loaded_parameters
from ..read.config_text import CONFIG_KEY, WEIGHTS_ONLY_CONFIG, insert_config
from ..read.source import CONFIG, MAX_JSON_BYTES, SINGLE_FILE, Source
from ..read.tensor_entries import Entries
from .actions import Actions
from .decisions import TensorDecision
from .float_view import Floats
from .output_table import Outputs
from .selection import WEIGHT, Why, module_of, subject_of
from .tensor_matrices import matrices
from .texts import Text
from .tied import tied_heads

MANIFEST = "zeropoint_manifest.json"
"""File of a run's digests and error statistics; a source's is not copied."""


def index_and_config(outputs: Outputs, *, cache: bool = False) -> tuple[dict[str, Text], tuple[str, ...]]:
    """Return the index, the configuration, and the other files of the codec.

    By file name, with notes on them. cache: whether scales of a cache are among the tensors.
    """
    source, codec = outputs.actions.floats.source, outputs.codec
    texts = {index_name(source): Text.of(index_text(outputs))} if CONTAINERS[codec.container].indexed else {}
    documents = _config(outputs, outputs.actions)
    if cache:
        documents = _with_cache(documents, codec)
    config = documents.section
    for name, content in documents.files.items():
        whole = content if isinstance(content, bytes) else json.dumps(content, indent=2) + "\n"
        texts[name] = Text.of(whole)
    texts |= _unpacked(source, codec)
    if source.config is not None and source.config_text is not None:
        text = source.config_text
        if config:
            text = insert_config(
                text, config, documents.keys, codec.model_format.config_values(source.config)
            )
        texts[CONFIG] = readable(Text.of(text))
    elif config:
        texts[WEIGHTS_ONLY_CONFIG] = readable(Text.of(json.dumps({CONFIG_KEY: config}, indent=2) + "\n"))
    return texts, documents.notes


def graph_texts(outputs: Outputs) -> dict[str, Text]:
    """Return the result's graph with its tensors' places, if it has one."""
    if not CONTAINERS[outputs.codec.container].has_graph:
        return {}
    floats = Floats(source=outputs.source, readers={}, config=None)
    documents = _config(outputs, replace(outputs.actions, floats=floats, staying=()))
    return {name: Text.of(each) for name, each in documents.files.items() if isinstance(each, bytes)}


def companions(outputs: Outputs, texts: Collection[str]) -> dict[Path, int]:
    """Return the bytes of copied files, without ``texts`` and a manifest."""
    paths = outputs.actions.floats.source.companions
    return {path: outputs.source.size_of(path) for path in paths if str(path) not in (*texts, MANIFEST)}


def index_name(source: Source) -> str:
    """Return the name of the index of an output."""
    alone = len(source.shards) == 1 and source.container.indexed
    return source.index or (source.shards[0] if alone else SINGLE_FILE) + ".index.json"


def _unpacked(source: Source, codec: Codec) -> dict[str, Text]:
    """Return the files embedded in the source's file that must be written."""
    if source.container.indexed or not CONTAINERS[codec.container].indexed:
        return {}
    files = codec_of(source.container.name).model_format.companions(source.metadata[source.shards[0]])
    present = {str(path) for path in source.companions}
    return {} if present & files.keys() else {name: Text.of(text) for name, text in files.items()}


def index_text(outputs: Outputs) -> Iterator[str]:
    """Yield the index as json.dumps writes it with an indent of 2."""
    yield f'{{\n  "metadata": {{\n    "total_size": {outputs.nbytes}\n  }},\n  "weight_map": {{'
    comma = ""
    for name, shard in outputs.files():
        yield f"{comma}\n    {json.dumps(name)}: {json.dumps(shard)}"
        comma = ","
    yield "\n  }\n}\n"


def readable(text: Text) -> Text:
    """Return a configuration text; raises CheckpointError above the size limit."""
    if text.size > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{CONFIG} would have {text.size} bytes, above the limit of {MAX_JSON_BYTES} for what it says of "
            "layers by name; quantize all layers of a kind, or keep all of them"
        )
    return text


def _config(outputs: Outputs, actions: Actions) -> Documents:
    """Return the codec's configuration files; nothing where nothing is quantized.

    actions: of ``outputs``, whose floats may be others.
    """
    floats, decisions = actions.floats, actions.decisions
    if not any(decision.quantized for decision in decisions):
        return Documents(section=None)
    family, entries = floats.source.config or {}, floats.source.entries
    codes = {decision.entry.name for decision in actions.staying}

    def modules() -> Iterator[Module]:
        for decision in decisions:
            entry = decision.entry
            if decision.layer is not None:
                fused = decision.layer.codec.fused_experts
                found = matrices(entry, fused=fused)
                yield from (Module(m.module, decision.layer) for m in found)
            elif entry.name in codes:
                yield Module(module_of(entry.name), None, keeps=True)
            elif len(entry.shape) == 2:
                yield Module(module_of(entry.name), None)

    def tensors() -> Iterator[Found]:
        for t in outputs.by_name:
            yield Found(Row(t.name, t.spec.dtype, t.spec.shape, t.nbytes), t.begin, t.shard)

    kept = _ignored(floats, (d for d in decisions if not d.quantized and d.entry.name not in codes))
    contents = Contents(
        modules=modules,
        kept=kept,
        nonlinear=odd_targets(decisions, entries, family),
        family=family,
        previous=floats.config or {},
        tensors=tensors,
        graph=floats.source.graph,
    )
    with reading("the configuration of the source cannot be carried over", "correct it, or remove it"):
        return outputs.codec.documents(contents)


def _with_cache(documents: Documents, codec: Codec) -> Documents:
    """Return the configuration files of a codec with a quantized cache."""
    section = None if documents.section is None else codec.with_cache(documents.section)
    files = {
        name: codec.with_cache(content) if not isinstance(content, bytes) else content
        for name, content in documents.files.items()
    }
    return replace(documents, section=section, files=files)


_MAYBE_ODD = re.compile(r"embed|position|token_type|wte|wpe|shared|bias|norm|router|gat(e|ing)$|wg$|(^|\.)ln")
_ODD = ("Embedding", "Norm", "Router")
"""Module types that loaders do not make Linear layers of."""


def odd_targets(decisions: Iterable[TensorDecision], entries: Entries, family: Config) -> list[str]:
    """Return quantized modules other than Linear layers, such as embeddings and routers."""
    return [
        module_of(d.entry.name)
        for d in decisions
        if d.quantized
        and d.why is Why.USER
        and _MAYBE_ODD.search(module_of(d.entry.name))
        and subject_of(d.entry, entries, family).type in _ODD
    ]


def _ignored(floats: Floats, kept: Iterable[TensorDecision]) -> list[str]:
    """Return the modules to list as unquantized: kept matrices and tied heads.

    A Linear layer that is neither quantized nor listed is left uninitialized by transformers, without an
    error.
    """
    names: dict[str, None] = {}
    for decision in kept:
        entry = decision.entry
        if len(entry.shape) == 2 and entry.name.endswith(WEIGHT):
            names[module_of(entry.name)] = None
        elif len(entry.shape) == 2:  # as in_proj_weight, of which loaders make three layers
            made = loaded_parameters(entry.name, floats.source.config or {})
            names |= dict.fromkeys(module_of(each) for each in made if each.endswith(WEIGHT))
        elif entry.stack is not None:
            # Loaders ask for the experts together, or for the module of the file.
            names |= dict.fromkeys((entry.stack.holder, module_of(entry.name)))
    for head in tied_heads(floats.source):
        names[head] = None
    return list(names)
