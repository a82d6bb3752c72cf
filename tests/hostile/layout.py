"""What checkpoints of a layout of other tools are made of, and how cases change them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save
from tests.hostile.case import Case

Tensors = Mapping[str, torch.Tensor]
Section = Mapping[str, Any]
DROP = object()
"""A value of a change that removes its key."""
STATE = "a.weight.quant_state.bitsandbytes__nf4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A right checkpoint of one layer, as small as the layout has it."""

    section: Section
    tensors: Tensors
    model_type: str = "llama"
    metadata: Mapping[str, str] | None = None

    def config(self, **changes: object) -> bytes:
        """Return config.json with changed keys of quantization_config."""
        merged = {**self.section, **changes}
        section = {key: value for key, value in merged.items() if value is not DROP}
        return json.dumps({"model_type": self.model_type, "quantization_config": section}).encode()

    def files(
        self, config: bytes | None = None, tensors: Tensors | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> dict[str, bytes]:  # fmt: skip
        """Return the files of the checkpoint."""
        said = self.metadata if metadata is None else metadata
        weights = save(dict(self.tensors if tensors is None else tensors), said and dict(said))
        return {"model.safetensors": weights, "config.json": self.config() if config is None else config}


Changes = Mapping[str, object]


def given(**changes: object) -> Changes:
    """Return keys, or tensors of the layer with ``__`` for a dot, in place of right ones."""
    return changes


def changed(layout: Layout, changes: Changes) -> dict[str, torch.Tensor]:
    """Return the tensors of a layout with others in place of some."""
    found, prefix = dict(layout.tensors), "m.experts." if layout.model_type == "gpt_oss" else "a."
    for part, tensor in changes.items():
        name = STATE if part == "STATE" else prefix + part.replace("__", ".")
        found.pop(name, None)
        if isinstance(tensor, torch.Tensor):
            found[name] = tensor
    return found


def case_of(name: str, content: dict[str, bytes], words: str) -> Case:
    return Case(topic="quantized", name=name, content=content, refusal=words)


def _said(changes: Changes) -> str:
    """Return what is changed, in a few words."""
    shown = {
        key: f"{value.dtype}{[*value.shape]}" if isinstance(value, torch.Tensor) else f"{value!r:.40}"
        for key, value in changes.items()
    }
    return " ".join(f"{key}={'missing' if changes[key] is DROP else text}" for key, text in shown.items())


Table = Sequence[tuple[Changes, str]]
"""Changes, and words of the refusal."""


def cases_of(name: str, layout: Layout, configs: Table, tensors: Table) -> Iterator[Case]:
    """Yield the cases of a layout: changes of its configuration, and of its tensors."""
    for number, (changes, words) in enumerate(configs):
        content = layout.files(config=layout.config(**changes))
        yield case_of(f"{name} config {number} {_said(changes)}", content, words)
    for number, (changes, words) in enumerate(tensors):
        content = layout.files(tensors=changed(layout, changes))
        yield case_of(f"{name} tensors {number} {_said(changes)}", content, words)
