"""Plans that copy a checkpoint and add small tensors.

Where nothing is quantized or decoded, the result's manifest repeats the weight records of the source's.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ...codecs.known import CONFIG_KEYS, TOOL_FILES
from ...codecs.protocol import Codec
from ...errors import CheckpointError
from ...methods.registry import DISTILLED
from ..read.config_text import insert_config
from ..read.json_stream import JsonStream
from ..read.quantized_layers import json_object
from ..read.safetensors_file import pieces
from ..read.source import CONFIG, MAX_JSON_BYTES, Source
from ..read.storage import exists, opened, shown
from .actions import Actions
from .checkpoint_plan import CheckpointPlan
from .config_and_index import MANIFEST, companions, graph_texts, index_name, index_text, readable
from .float_view import Floats
from .limits import Limits
from .output_table import Outputs
from .recipe import RecipeText
from .row_reader import NewTensor, RowReader
from .texts import Text


def plan_with(
    source: Source,
    codec: Codec,
    added: Iterable[NewTensor],
    texts: Mapping[str, Text],
    limits: Limits,
    *,
    notes: Iterable[str] = (),
) -> CheckpointPlan:
    """Return the plan that copies ``source`` and adds tensors.

    ``codec`` claims the files of the source. added: they replace tensors of
    their names. texts: files whose content differs from the source's, by name. notes: for the report.
    """
    floats = Floats(source=source, readers={}, config=None)
    actions = Actions.copying(floats, [tensor.reader for tensor in added])
    outputs = Outputs(source, actions, codec)
    texts = {index_name(source): Text.of(index_text(outputs)), **texts}
    return CheckpointPlan(
        outputs=outputs,
        recipe=_COPY,
        texts=texts,
        companions=companions(outputs, texts),
        notes=(*source.notes, *notes),
        limits=limits.reserve(source.entries, outputs.by_name),
        earlier=Text.of(_about_weights(source, ())),
    )


def with_trained(plan: CheckpointPlan, modules: Collection[str]) -> CheckpointPlan:
    """Return a copying plan with scales marked as trained in the manifest."""
    return replace(plan, earlier=Text.of(_about_weights(plan.source, modules)))


def with_added(plan: CheckpointPlan, added: Iterable[NewTensor]) -> CheckpointPlan:
    """Return ``plan`` with tensors added to those that it writes."""
    return with_readers(plan, [tensor.reader for tensor in added])


def with_readers(plan: CheckpointPlan, readers: Sequence[RowReader]) -> CheckpointPlan:
    """Return ``plan`` with readers of tensors added to those that it writes."""
    outputs = plan.outputs.with_added(readers)
    name = index_name(plan.source)
    texts = {name: Text.of(index_text(outputs))} if name in plan.texts else {}
    texts |= graph_texts(outputs)
    return replace(plan, outputs=outputs, texts={**plan.texts, **texts}, limits=plan.limits.reserve(readers))


_COPY = RecipeText(text="default: keep", name="copy")


def with_cache(source: Source, codec: Codec) -> dict[str, Text]:
    """Return the configuration files of a checkpoint with a quantized cache."""
    texts = {}
    config = source.config or {}
    section = next((config[key] for key in CONFIG_KEYS if config.get(key)), None)
    if section is not None and source.config_text is not None:
        text = insert_config(source.config_text, codec.with_cache(section))
        texts[CONFIG] = readable(Text.of(text))
    for name in (str(path) for path in source.companions if str(path) in TOOL_FILES):
        document = json_object(source.root / name)
        if codec.claims(document):
            texts[name] = Text.of(json.dumps(codec.with_cache(document), indent=2) + "\n")
    return texts


def _about_weights(source: Source, trained: Collection[str]) -> Iterator[str]:
    """Yield the weight records of the source's manifest, one per line.

    trained: modules of which nothing that it says is true any more. Raises CheckpointError for one that is no
    JSON.
    """
    for module in sorted(trained):
        yield json.dumps([module, {"method": DISTILLED}]) + "\n"
    path = source.root / MANIFEST
    if not exists(path):
        return
    try:
        with opened(path) as file:
            stream = JsonStream(pieces(file, 0, file.stamp.size))
            for key in stream.members():
                if not stream.is_object:
                    stream.value(MAX_JSON_BYTES)
                    continue
                for name in stream.members():
                    record = stream.value(MAX_JSON_BYTES)
                    if key == "weights" and name not in trained:
                        yield json.dumps([name, record]) + "\n"
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{shown(path)} is damaged: {error}; verify the checkpoint, or remove its manifest"
        ) from error
