"""Configurations of transformers made tiny by what their fields are called and how they hang together."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.peers import Peer, transformers

auto = Peer("transformers.models.auto.modeling_auto")

WIDTH, INNER, HEAD_DIM, HEADS, VOCABULARY, PATCHES = 128, 256, 32, 4, 320, 4
_FAMILIES = (
    "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM",
    "CAUSAL_LM", "CTC", "RNNT", "TDT",
)  # fmt: skip
"""Mappings of model types to classes that are asked first; the others follow, and the bare models."""
_LAYER_LISTS = 4
"""Lists longer than this, with an item for each layer, are cut with the layers."""
_MOST_LAYERS = 4
_RESNET = {
    "model_type": "resnet", "depths": [1, 1, 1, 1], "hidden_sizes": [32, 32, 64, 128], "embedding_size": 32,
    "layer_type": "basic",
}  # fmt: skip
"""In the place of backbones of the package timm, which is not installed."""
_KEPT = frozenset(("id2label", "label2id", "num_labels", "transformers_version", "problem_type"))


class Sizes:
    """What becomes of whole numbers whose names match: a number, a function of the old one, or None."""

    def __init__(self, *rows: tuple[str, int | None], widths: bool = True, filled: bool = False) -> None:
        self._rows = [(re.compile(pattern), limit) for pattern, limit in rows]
        self.widths, self.filled = widths, filled

    def of(self, name: str, value: int) -> int:
        """Return the new value of a field, which never grows."""
        for pattern, limit in self._rows:
            if pattern.search(name):
                return value if limit is None else min(value, limit)
        return value


_COUNTS = (
    (r"index_topk", 32),
    (r"(per_tok(en)?|top_?k|topk_group|num_selects)(_experts)?$", 2),
    (r"^(n_group|num_expert_group)$", 2),
    (r"experts?(_num)?$|^num_experts|n_routed_experts|zero_expert_num", 4),
    (r"vision_feature_layer|skip_layer|feat_extract_layers", None),
    (r"num_kv_shared_layers|num_nextn_predict_layers|num_mtp", 0),
    (r"first_k_dense_replace|max_window_layers|dense_layers$|cross_layer_interval", 1),
    (r"(first|last)_full_att", 1),
    (r"(layers?|^depth|_depth|num_blocks|n_blocks|self_attends_per_block|num_hidden_groups)$", 2),
    (r"vocab_size|vocabulary_size", VOCABULARY),
    (r"relative|bucket", None),
    (r"max_\w*positions?(_embeddings)?$|^n_positions$|^n_ctx$|^max_seq_len|text_encoder_context_length", 128),
    (r"sliding_window|attention_chunk_size|^attention_window_size", 16),
    (r"^(num_queries|num_denoising|num_detection_tokens|num_query_tokens|num_object_queries)$", 16),
)  # fmt: skip
_WIDTHS = (
    (r"(linear|mamba).*(num_key_heads|num_k_heads)", 2),
    (r"(kv|key_value)\w*heads?$|key_value_heads|num_query_groups|multi_query_group", 2),
    (r"(mamba|ssm).*(d_head|head_?dim)$", 64),
    (r"(^|_)(heads?|n_head|n_heads|num_heads)$|attention_heads|attn_heads|value_heads", HEADS),
    (r"^(mamba_)?n_?groups$", 1),
    (r"input_dim$|_index$", None),
    (r"qk_head_dim", 2 * HEAD_DIM),
    (r"head_dim|^d_kv$|head_size|kv_channels|key_dim|rotary_dim|query_pre_attn", HEAD_DIM),
    (r"lora_rank|lora_r|low_rank", WIDTH),
    (r"moe_\w*intermediate|expert\w*(intermediate|hidden)_(size|dim)|intermediate_size_per", WIDTH),
    (r"intermediate|ffn|d_ff$|mlp_(dim|hidden)|n_inner|feed_?forward|inner_dim|expand_size", INNER),
    (r"hidden_?(size|dim)|d_model|n_embd|embed_?dim|embedding_(size|dim)", WIDTH),
    (r"projection_(dim|size)|_dim$|^dim$|width", WIDTH),
    (r"num_filters|n_filters", 8),
    (r"upsample_initial_channel|base_channels", 64),
    (r"emb_size|upsample_groups|proj_size|output_size|lru_|_units$|embed_size|bottleneck", WIDTH),
)  # fmt: skip
EVERY, COUNTS, FILLED = SIZES = (
    Sizes(*_COUNTS, *_WIDTHS), Sizes(*_COUNTS, widths=False), Sizes(*_COUNTS, *_WIDTHS, filled=True)
)  # fmt: skip
"""Fewer and smaller parts; fewer parts alone; the first where defaults are None that the model needs."""
_NEEDED = re.compile(
    r"^(vocab_size|head_dim|num_key_value_heads|num_experts|top_k_experts|moe_intermediate_size)$"
)
"""Fields without a default that some models need."""
_ID = re.compile(r"(token_id|token_index|_token|_id|_index|_token_ids)s?$")
_SIDE = re.compile(r"(^|_)(image|img|crop)_size$")


def classes() -> dict[str, list[str]]:
    """Return the classes of each model type, those with a head first."""
    found: dict[str, list[str]] = {}
    names = [name for name in dir(auto) if name.endswith("_MAPPING_NAMES")]
    first = [f"MODEL_FOR_{family}_MAPPING_NAMES" for family in _FAMILIES]
    last = ["MODEL_MAPPING_NAMES"]
    middle = sorted(set(names) - {*first, *last, "CONFIG_MAPPING_NAMES", "MODEL_FOR_BACKBONE_MAPPING_NAMES"})
    for mapping in (*first, *middle, *last):
        for kind, name in getattr(auto, mapping).items():
            found.setdefault(kind, []).extend([name] if isinstance(name, str) else name)
    return dict(sorted(found.items()))


def class_of(model_type: str) -> str:
    """Return the class that a model type is tried with: the first that takes its configuration."""
    names, config = classes()[model_type], transformers.CONFIG_MAPPING[model_type]
    fitting = [name for name in names if _config_class(name) is config]
    return next(iter(fitting or _others(names[0], config)), names[0])


def _others(name: str, config: Any) -> list[str]:
    """Return classes next to another one that take a configuration, those with a head first."""
    module = getattr(getattr(transformers, name, None), "__module__", None)
    known = vars(sys.modules[module]) if module in sys.modules else {}
    found = [each for each in known if _config_class(each) is config and not each.endswith("PreTrainedModel")]
    return sorted(found, key=lambda each: "For" not in each)


def _config_class(name: str) -> Any:
    try:
        return getattr(transformers, name).config_class
    except (AttributeError, ImportError):  # without a package that is not installed
        return None


def tiny(model_type: str, sizes: Sizes, special: Mapping[str, Any]) -> Any:
    """Return a configuration of a model type with small sizes, and with ``special`` values over them."""
    kind = transformers.CONFIG_MAPPING[model_type]
    default = kind(**_default(special))
    made = _shrunk(default.to_dict(), sizes)
    _put(made, special)
    return kind.from_dict(made)


def _default(special: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a configuration must be made with in the first place: the types of its parts."""
    return {
        key: dict(value)
        for key, value in special.items()
        if isinstance(value, dict) and "model_type" in value
    }


def _put(into: dict[str, Any], special: Mapping[str, Any]) -> None:
    for key, value in special.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _put(into[key], value)
        else:
            into[key] = value


def _shrunk(config: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Return the fields of a configuration, or of a part, with small sizes."""
    taken = _layers_taken(config)
    made: dict[str, Any] = {}
    stages = "stage_names" in config and _layers_field(config) is not None
    for name, value in config.items():
        if name in _KEPT:
            made[name] = value
        elif stages and name in ("stage_names", "out_features"):
            continue
        elif stages and name == "out_indices":
            last = len(taken) + 1
            made[name] = list(range(last - len(value), last)) if len(value) > 1 else [last - 1]
        elif isinstance(value, dict) and value.get("model_type") == "timm_backbone":
            made[name] = {**_RESNET, "out_indices": value.get("out_indices") or [4]}
        elif isinstance(value, dict) and value and _by_layer(value, _layer_count(config)):
            made[name] = {
                taken.index(int(key)): _shrunk(each, sizes) if isinstance(each, dict) else each
                for key, each in value.items()
                if int(key) in taken
            }
        elif isinstance(value, dict):
            made[name] = _shrunk(value, sizes)
        elif name == _layers_field(config):
            made[name] = len(taken)
        elif isinstance(value, list | tuple) and len(value) == _layer_count(config) > _LAYER_LISTS:
            made[name] = [value[number] for number in taken]
        elif isinstance(value, list | tuple):
            made[name] = _list(name, value, sizes)
        else:
            made[name] = _number(name, value, sizes)
    _images(made)
    if sizes.widths:
        _heads(config, made)
    return made


def _heads(config: Mapping[str, Any], made: dict[str, Any]) -> None:
    """Keep as many keys as queries where that is so, and heads of states that fill the inner width."""
    heads = next((name for name in ("num_attention_heads", "n_heads", "n_head") if name in config), None)
    for name in ("num_key_value_heads", "n_kv_heads"):
        if heads is not None and config.get(name) is not None and config[name] == config[heads]:
            made[name] = made[heads]
    if {"expand", "num_heads", "head_dim", "hidden_size"} <= config.keys():
        made["head_dim"] = made["expand"] * made["hidden_size"] // made["num_heads"]


def _list(name: str, value: Sequence[Any], sizes: Sizes) -> list[Any]:
    """Return a list of sizes: sections of rotary embeddings add up to half of a head."""
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        return [_shrunk(each, sizes) if isinstance(each, dict) else each for each in value]
    if name.endswith("section") and sizes.widths:
        half, whole = HEAD_DIM // 2, max(1, sum(value))
        cut = [each * half // whole for each in value[:-1]]
        return [*cut, half - sum(cut)]
    if re.search(r"depths?$|blocks$|layers$", name):
        return [min(each, 1) if len(value) > 1 else min(each, 2) for each in value]
    if _layered(name) and name != "out_indices":
        return sorted({min(each, 1) for each in value})
    return [_number(name, each, sizes) for each in value]


def _by_layer(value: Mapping[Any, Any], count: int) -> bool:
    """Return whether the keys of a table are numbers of layers."""
    return all(str(key).isdigit() and int(key) < count for key in value)


def _layered(name: str) -> bool:
    """Return whether a list holds numbers of layers."""
    return re.search(r"ind(ex|ic)es$|_layer_ids?$|_layer_idx$|attn_layers$|layer_ids$", name) is not None


def _number(name: str, value: Any, sizes: Sizes) -> Any:
    if value is None and sizes.filled and _NEEDED.search(name):
        return sizes.of(name, 1 << 20)
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    name = str(name)
    if _ID.search(name):
        return value if value < VOCABULARY - 60 else VOCABULARY - 60 + sum(map(ord, name)) % 60
    return sizes.of(name, value)


def _layers_field(config: Mapping[str, Any]) -> str | None:
    names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    return next((name for name in names if isinstance(config.get(name), int)), None)


def _layer_count(config: Mapping[str, Any]) -> int:
    name = _layers_field(config)
    return 0 if name is None else int(config[name])


def _layers_taken(config: Mapping[str, Any]) -> list[int]:
    """Return the numbers of two layers at least: the first of each kind that lists by layer tell apart."""
    count = _layer_count(config)
    lists = [
        value
        for value in config.values()
        if isinstance(value, list | tuple) and len(value) == count > _LAYER_LISTS
    ]
    seen: dict[str, int] = {}
    for number in range(count):
        seen.setdefault(str([value[number] for value in lists]), number)
    first = list(seen.values())[:_MOST_LAYERS]
    more = (number for number in range(count) if number not in first)
    indices = config.get("out_indices")
    least = len(indices) if "stage_names" in config and isinstance(indices, list | tuple) else 2
    while len(first) < min(max(2, least), count):
        first.append(next(more))
    return sorted(first)


def _images(config: dict[str, Any]) -> None:
    """Make images as small as some patches, where the configuration has their size."""
    patch = config.get("patch_size")
    side = patch if isinstance(patch, int) else patch[0] if isinstance(patch, list) and patch else 0
    for name in [name for name in config if isinstance(name, str) and _SIDE.search(name)]:
        small = min(64, PATCHES * side) if side and side >= 8 else 64
        config[name] = _smaller(config[name], small)


def _smaller(value: Any, side: int) -> Any:
    if isinstance(value, list):
        return [_smaller(each, side) for each in value]
    if isinstance(value, dict):
        return {key: _smaller(each, side) for key, each in value.items()}
    return min(value, side) if isinstance(value, int) else value


def parts(config: Any) -> Iterator[Any]:
    """Yield a configuration and its parts, however deep."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None and hasattr(part, "to_dict"):
            yield from parts(part)
