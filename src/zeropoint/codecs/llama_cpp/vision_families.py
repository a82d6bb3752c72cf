"""Names, forms and metadata of vision parts in llama.cpp's files.

A file for ``--mmproj`` has the architecture ``clip``, the vision encoder as ``v.*``, and as ``mm.*`` the
layers between it and the text model. Names, types and values are as llama.cpp's converter has them
(conversion/gemma.py and smolvlm.py of llama-cpp-python 0.3.36).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ...architectures import Config, model_type, text_config
from ...errors import CheckpointError, UnsupportedError, printable
from ..containers.protocol import Found
from ..model_format import FileModel, ModelFiles
from ..stored_forms import OMITTED, Shape, StoredForm
from .family import Values

VISION = "clip"
"""The architecture of such files."""
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_SIGLIP = MappingProxyType({
    "embeddings.patch_embedding": "v.patch_embd", "embeddings.position_embedding": "v.position_embd",
    "post_layernorm": "v.post_ln",
})
_SIGLIP_LAYERS = MappingProxyType({
    "layer_norm1": "ln1", "layer_norm2": "ln2", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_out", "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
})


class VisionFamily(NamedTuple):
    """A family of models with a vision part.

    prefixes: what names of the encoder begin with, in published files first; ``model.`` before any of them
    does not count. modules, layers: of the encoder and of its layers, to llama.cpp's names. joins: whole
    names of tensors between the encoder and the text model. plus: what is added to a tensor, by its name in
    the file. values: more metadata, from config.json and the processor's configuration. defaults: what
    transformers takes where the vision configuration does not say it.
    """

    types: tuple[str, ...]
    projector: str
    prefixes: tuple[str, ...]
    joins: Mapping[str, str]
    values: Callable[[Config, Config], Values]
    plus: Mapping[str, float] = MappingProxyType({})
    modules: Mapping[str, str] = _SIGLIP
    layers: Mapping[str, str] = _SIGLIP_LAYERS
    defaults: Mapping[str, Any] = MappingProxyType({})


def _gemma3(config: Config, processor: Config) -> Values:
    """Return the factor of pooled sides where it is not llama.cpp's own."""
    vision, tokens = config["vision_config"], processor.get("image_seq_length", 256)
    factor = vision["image_size"] // vision["patch_size"] // int(tokens**0.5)
    return {"projector.scale_factor": factor} if factor not in (0, 4) else {}


def _idefics3(config: Config, processor: Config) -> Values:
    side = (processor.get("size") or {}).get("longest_edge", config["vision_config"]["image_size"])
    return {"projector.scale_factor": config.get("scale_factor", 2), "preproc_image_size": side}


FAMILIES = (
    VisionFamily(
        ("gemma3",), "gemma3", ("vision_tower.vision_model.", "vision_tower."),
        MappingProxyType({
            "multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
            "multi_modal_projector.mm_soft_emb_norm.weight": "mm.soft_emb_norm.weight",
        }), _gemma3, MappingProxyType({"mm.soft_emb_norm.weight": 1.0}),
        defaults=MappingProxyType({"layer_norm_eps": 1e-6}),
    ),
    VisionFamily(
        ("smolvlm", "idefics3"), "idefics3", ("model.vision_model.", "vision_model."),
        MappingProxyType({"model.connector.modality_projection.proj.weight": "mm.model.fc.weight"}),
        _idefics3,
        defaults=MappingProxyType({
            "layer_norm_eps": 1e-5, "hidden_size": 1152, "num_attention_heads": 16, "intermediate_size": 3072,
        }),
    ),
)
_SIZES = MappingProxyType({
    "image_size": "image_size", "patch_size": "patch_size", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
})
_MODEL, _HEAD = "model.", "head."
"""Prefixes of names: of the model in some files, and of pooling layers that no text model reads."""
_BLOCK = re.compile(r"v\.blk\.(?P<n>\d+)\.(?P<rest>[\w.]+)")
_LAYER = re.compile(r"encoder\.layers\.(?P<n>\d+)\.(?P<rest>.+)")


def vision_family(config: Config) -> VisionFamily | None:
    """Return the family of a model's vision part, or None."""
    if not isinstance(config.get("vision_config"), Mapping):
        return None
    return next((family for family in FAMILIES if model_type(config) in family.types), None)


def vision_form(family: VisionFamily, name: str, shape: Shape) -> StoredForm:
    """Return a tensor's form in the file, OMITTED for the text model.

    Raises CheckpointError for a name that is not known.
    """
    own = name.removeprefix(_MODEL)
    stored = next((new for old, new in family.joins.items() if old.removeprefix(_MODEL) == own), None)
    known = (each.removeprefix(_MODEL) for each in family.prefixes)
    prefix = next((each for each in known if own.startswith(each)), None)
    if stored is None and (prefix is None or own.startswith(f"{prefix}{_HEAD}")):
        return OMITTED
    if stored is None and prefix is not None:
        stored = _of_encoder(family, own.removeprefix(prefix))
    if stored is None:
        raise CheckpointError(
            f"tensor {printable(name)} has no name in vision files of {family.projector}, so llama.cpp would "
            "not load the file; remove it from the checkpoint"
        )
    embeds = stored.startswith(("v.patch_embd.", "v.position_embd."))
    return StoredForm(stored, plus=family.plus.get(stored, 0.0), float32=len(shape) < 2 or embeds)


def _of_encoder(family: VisionFamily, name: str) -> str | None:
    found = _LAYER.fullmatch(name)
    module, _, kind = (name if found is None else found["rest"]).rpartition(".")
    stored = (family.modules if found is None else family.layers).get(module)
    if stored is None:
        return None
    return f"{stored}.{kind}" if found is None else f"v.blk.{found['n']}.{stored}.{kind}"


def vision_values(family: VisionFamily, model: ModelFiles) -> dict[str, Any]:
    """Return the metadata of the file, without its file type.

    Raises CheckpointError for sizes that config.json does not have, UnsupportedError where no file says how
    images are normalized.
    """
    config = model.config
    vision = {**family.defaults, **config["vision_config"]}
    missing = [key for key in _SIZES.values() if type(vision.get(key)) is not int]
    if missing:
        raise CheckpointError(
            f"vision_config does not say {missing[0]} in config.json; download it again, or add what "
            "transformers takes"
        )
    processor = _processor(model)
    values: dict[str, Any] = {stored: vision[key] for stored, key in _SIZES.items()}
    values |= {
        "projection_dim": text_config(config)["hidden_size"],
        "attention.layer_norm_epsilon": float(vision["layer_norm_eps"]),
        **{key: [float(x) for x in processor[key]] for key in ("image_mean", "image_std")},
        **family.values({**config, "vision_config": vision}, processor),
    }
    said = {f"clip.vision.{key}": value for key, value in values.items()}
    return {
        "general.type": "mmproj", "clip.has_vision_encoder": True, "clip.projector_type": family.projector,
        "clip.use_gelu": True, **said,
    }


def read_vision(found: Sequence[Found], metadata: Mapping[str, Any]) -> FileModel | None:
    """Return the vision part in a file, None if it is unknown.

    metadata: of the file, as Python values.
    """
    projector = metadata.get("clip.projector_type")
    family = next((each for each in FAMILIES if each.projector == projector), None)
    if family is None:
        return None
    vision = {key: metadata.get(f"clip.vision.{stored}") for stored, key in _SIZES.items()}
    forms = [[_model_form(family, each.row.name, each.row.shape)] for each in found]
    return FileModel(config={"model_type": family.types[0], "vision_config": vision}, forms=forms)


def _model_form(family: VisionFamily, stored: str, shape: Shape) -> tuple[str, StoredForm]:
    """Return a file tensor's name and form in the model."""
    joins, modules, layers = (
        {new: old for old, new in table.items()} for table in (family.joins, family.modules, family.layers)
    )
    block = _BLOCK.fullmatch(stored)
    module, _, kind = (stored if block is None else block["rest"]).rpartition(".")
    own = modules.get(module) if block is None else layers.get(module)
    layer = "" if block is None else f"encoder.layers.{block['n']}."
    name = joins.get(stored) or (own and f"{family.prefixes[0]}{layer}{own}.{kind}")
    return (stored, StoredForm(stored)) if name is None else (name, vision_form(family, name, shape))


def _processor(model: ModelFiles) -> dict[str, Any]:
    """Return the processor's configuration of images."""
    found: dict[str, Any] = {}
    for name in PROCESSORS:
        said = json.loads(model.read(name) or b"{}")
        found |= said | (said.get("image_processor") or {})
    if not all(isinstance(found.get(key), list) for key in ("image_mean", "image_std")):
        raise UnsupportedError(
            f"neither {PROCESSORS[0]} nor {PROCESSORS[1]} says image_mean and image_std, by which llama.cpp "
            "normalizes images; put one next to config.json"
        )
    return found
