"""Names, forms and metadata of vision parts in llama.cpp's files.

A file for ``--mmproj`` has the architecture ``clip``, the vision encoder as ``v.*``, and as ``mm.*`` the
layers between it and the text model. Names, types and values are as llama.cpp's converter has them
(conversion/gemma.py, smolvlm.py, qwenvl.py and llama4.py of llama-cpp-python 0.3.36), but for a norm of
Llama 4 that it calls ``attn_post_norm``, as Gemma 4's, and that llama.cpp looks for as ``ln2``.
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
from ..divided_tensors import RowRun, TensorPiece, Whole
from ..model_format import FileModel, ModelFiles
from ..stored_forms import OMITTED, Shape, StoredForm
from .family import Division, Values, parts_of

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
    names of tensors between the encoder and the text model, and others. plus: what is added to a tensor, by
    its name in the file. values: more metadata, from config.json and the processor's configuration. defaults:
    what transformers takes where the vision configuration does not say it. keys: what that calls the sizes
    that others call otherwise. block: what a layer's name begins with. divided: tensors of the encoder and of
    a layer that files have in pieces. float16: whether patch embeddings in float16 stay so.
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
    keys: Mapping[str, str] = MappingProxyType({})
    block: str = "encoder.layers"
    divided: Mapping[str, Division] = MappingProxyType({})
    float16: bool = False

    def described(self, config: Config) -> Config:
        """Return the vision configuration under the usual keys, with defaults."""
        said = config["vision_config"]
        return {**self.defaults, **said, **{key: said[own] for key, own in self.keys.items() if own in said}}


def _gemma3(config: Config, processor: Config) -> Values:
    """Return the factor of pooled sides where it is not llama.cpp's own."""
    vision, tokens = config["vision_config"], processor.get("image_seq_length", 256)
    factor = vision["image_size"] // vision["patch_size"] // int(tokens**0.5)
    return {"projector.scale_factor": factor} if factor not in (0, 4) else {}


def _idefics3(config: Config, processor: Config) -> Values:
    side = (processor.get("size") or {}).get("longest_edge", config["vision_config"]["image_size"])
    return {"projector.scale_factor": config.get("scale_factor", 2), "preproc_image_size": side}


def _qwen2(config: Config, processor: Config) -> Values:
    """Raise UnsupportedError for sizes that llama.cpp does not read."""
    for key, value in (("spatial_merge_size", 2), ("temporal_patch_size", 2), ("window_size", 112)):
        said = config["vision_config"].get(key, value)
        if said != value:
            raise UnsupportedError(
                f"{key} is {said!r:.40} in vision_config, but llama.cpp computes models of this family with "
                f"{value}; write safetensors"
            )
    return {}


def _qwen25(config: Config, processor: Config) -> Values:
    """Return the distance of layers that see whole images.

    Raises UnsupportedError where distances differ.
    """
    whole = list(config["vision_config"].get("fullatt_block_indexes") or ())
    step = whole[0] + 1 if whole else 0
    if not whole or whole != [step * (at + 1) - 1 for at in range(len(whole))]:
        raise UnsupportedError(
            f"fullatt_block_indexes is {whole!r:.80} in vision_config, but llama.cpp has every nth layer so; "
            "write safetensors"
        )
    return {**_qwen2(config, processor), "n_wa_pattern": step}


def _llama4(config: Config, processor: Config) -> Values:
    return {"projector.scale_factor": int(1 / config["vision_config"]["pixel_shuffle_ratio"])}


def _thirds(kind: str) -> Division:
    """Return the division of joined queries, keys and values."""
    return parts_of(*(f"attn.{part}.{kind}" for part in "qkv"), vectors=kind == "bias")


_FRAMES = ("patch_embed.first.weight", "patch_embed.second.weight")


def _frames(shape: Shape, _: Config) -> Sequence[TensorPiece]:
    """Return the kernels of two frames; shape: (outputs, channels, frames, height, width)."""
    outputs, channels, frames, height, width = shape
    return [
        TensorPiece(
            name,
            (outputs, channels, height, width),
            (RowRun(at * height, (outputs * channels, height), (frames * height, 1)),),
        )
        for at, name in enumerate(_FRAMES)
    ]


_QWEN2 = VisionFamily(
    ("qwen2_vl",), "qwen2vl_merger", ("visual.",),
    MappingProxyType({
        f"visual.{name}": f"v.patch_embd.weight{end}" for name, end in zip(_FRAMES, ("", ".1"), strict=True)
    }), _qwen2,
    modules=MappingProxyType({"merger.ln_q": "v.post_ln", "merger.mlp.0": "mm.0", "merger.mlp.2": "mm.2"}),
    layers=MappingProxyType({
        "norm1": "ln1", "norm2": "ln2", "attn.q": "attn_q", "attn.k": "attn_k", "attn.v": "attn_v",
        "attn.proj": "attn_out", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    }),
    defaults=MappingProxyType({"layer_norm_eps": 1e-6, "image_size": 560, "hidden_act": "quick_gelu"}),
    keys=MappingProxyType({
        "num_hidden_layers": "depth", "num_attention_heads": "num_heads", "hidden_size": "embed_dim",
        "intermediate_size": "hidden_size",
    }),
    block="blocks", float16=True,
    divided=MappingProxyType({
        "patch_embed.proj.weight": Division(
            _FRAMES, _frames, lambda shapes, _: (*shapes[0][:2], 2, *shapes[0][2:])
        ),
        **{f"attn.qkv.{kind}": _thirds(kind) for kind in ("weight", "bias")},
    }),
)

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
    _QWEN2,
    _QWEN2._replace(
        types=("qwen2_5_vl",), projector="qwen2.5vl_merger", values=_qwen25,
        layers=MappingProxyType({
            **_QWEN2.layers, "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        }),
        defaults=MappingProxyType({**_QWEN2.defaults, "hidden_act": "silu"}),
        keys=MappingProxyType({"num_hidden_layers": "depth", "num_attention_heads": "num_heads"}),
    ),
    VisionFamily(
        ("llama4",), "llama4", ("vision_model.",),
        MappingProxyType({
            "multi_modal_projector.linear_1.weight": "mm.model.fc.weight",
            "vision_model.class_embedding": "v.class_embd",
            "vision_model.positional_embedding_vlm": "v.position_embd.weight",
        }), _llama4,
        modules=MappingProxyType({
            "patch_embedding.linear": "v.patch_embd", "layernorm_pre": "v.pre_ln",
            "layernorm_post": "v.post_ln", "vision_adapter.mlp.fc1": "mm.model.mlp.1",
            "vision_adapter.mlp.fc2": "mm.model.mlp.2",
        }),
        layers=MappingProxyType({
            "input_layernorm": "ln1", "post_attention_layernorm": "ln2", "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_out",
            "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
        }),
        keys=MappingProxyType({"layer_norm_eps": "norm_eps"}), block="model.layers", float16=True,
    ),
)
_ACTIVATIONS = MappingProxyType({
    "gelu": {"clip.use_gelu": True}, "gelu_pytorch_tanh": {"clip.use_gelu": True},
    "silu": {"clip.use_silu": True}, "quick_gelu": {},
})
"""What a file says of activations, which are quick_gelu otherwise."""
_SIZES = MappingProxyType({
    "image_size": "image_size", "patch_size": "patch_size", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
})
_MODEL = "model."
"""Prefix of all names in some files."""
_HEAD = "head."
"""Prefix of layers that pool an image, which no text model reads."""
_BLOCK = re.compile(r"v\.blk\.(?P<n>\d+)\.(?P<rest>[\w.]+)")


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
    patches = stored.startswith("v.patch_embd.")
    wide = len(shape) < 2 or patches or stored.startswith("v.position_embd.")
    return StoredForm(
        stored, plus=family.plus.get(stored, 0.0), float32=wide, float16=patches and family.float16
    )


def vision_pieces(family: VisionFamily, name: str, shape: Shape, config: Config) -> Sequence[TensorPiece]:
    """Return the pieces of a tensor, none if whole."""
    rest = _rest(family, name)
    if rest not in family.divided:
        return ()
    stem = name.removesuffix(rest)
    return [each._replace(name=stem + each.name) for each in family.divided[rest].pieces(shape, config)]


def vision_wholes(family: VisionFamily, shapes: Mapping[str, Shape], config: Config) -> Sequence[Whole]:
    """Return the divided tensors, from all tensors' shapes by name."""
    found = list[Whole]()
    for name, division in family.divided.items():
        first = division.names[0]
        for stem in (each.removesuffix(first) for each in shapes if _rest(family, each) == first):
            mine = [shapes[stem + each] for each in division.names if stem + each in shapes]
            if len(mine) < len(division.names):
                continue
            shape = division.whole(mine, config)
            pieces = [each._replace(name=stem + each.name) for each in division.pieces(shape, config)]
            if [each.shape for each in pieces] != mine:
                raise CheckpointError(
                    f"{printable(stem + name)} is in pieces of shapes {mine}, which are not one tensor's; "
                    "export the file again"
                )
            found.append(Whole(stem + name, shape, pieces))
    return found


def _rest(family: VisionFamily, name: str) -> str:
    """Return a tensor's name in its layer, or in the encoder."""
    own = name.removeprefix(_MODEL).removeprefix(family.prefixes[0])
    return re.sub(rf"^{re.escape(family.block)}\.\d+\.", "", own)


def _of_encoder(family: VisionFamily, name: str) -> str | None:
    found = re.fullmatch(rf"{re.escape(family.block)}\.(?P<n>\d+)\.(?P<rest>.+)", name)
    module, _, kind = (name if found is None else found["rest"]).rpartition(".")
    stored = (family.modules if found is None else family.layers).get(module)
    if stored is None:
        return None
    return f"{stored}.{kind}" if found is None else f"v.blk.{found['n']}.{stored}.{kind}"


def vision_values(family: VisionFamily, model: ModelFiles) -> dict[str, Any]:
    """Return the metadata of the file, without its file type.

    Raises CheckpointError for sizes that config.json does not have, UnsupportedError where no file says how
    images are normalized, and for activations that llama.cpp lacks.
    """
    config = model.config
    vision = family.described(config)
    missing = [key for key in _SIZES.values() if type(vision.get(key)) is not int]
    if missing:
        raise CheckpointError(
            f"vision_config does not say {missing[0]} in config.json; download it again, or add what "
            "transformers takes"
        )
    activation = vision.get("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise UnsupportedError(
            f"hidden_act is {activation!r:.40} in vision_config, but llama.cpp has "
            f"{', '.join(_ACTIVATIONS)}; write safetensors"
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
        **_ACTIVATIONS[activation], **said,
    }


def read_vision(found: Sequence[Found], metadata: Mapping[str, Any]) -> FileModel | None:
    """Return the vision part in a file, None if it is unknown.

    metadata: of the file, as Python values.
    """
    projector = metadata.get("clip.projector_type")
    family = next((each for each in FAMILIES if each.projector == projector), None)
    if family is None:
        return None
    sizes = ((family.keys.get(key, key), stored) for stored, key in _SIZES.items())
    vision = {key: metadata.get(f"clip.vision.{stored}") for key, stored in sizes}
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
    layer = "" if block is None else f"{family.block}.{block['n']}."
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
