"""Inputs for the forward of any model, by the names of its parameters and the sizes of its configuration."""

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tests.architectures.shrunk import parts

LENGTH, SAMPLES = 8, 3200
_MOST = 16
"""Inputs that are tried for one set of names."""
Makers = dict[str, tuple[Callable[[], torch.Tensor], ...]]


def candidates(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield inputs to try, those with the fewest tensors first."""
    known = _Sizes(model).makers()
    signature = inspect.signature(model.forward).parameters
    needed = [
        name for name, p in signature.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    main = model.main_input_name if model.main_input_name in signature else next(iter(signature), "")
    text = [name for name in ("input_ids",) if name in signature]
    decoder = [name for name in ("decoder_input_ids",) if name in signature]
    extras = [name for name in signature if name in known and name not in (*text, *decoder, "attention_mask")]
    tried = set()
    everything = list(signature)
    for names in (
        [*text, *needed], [*text, *needed, *decoder], [main, *needed], [main, *needed, *decoder],
        [*text, main, *needed, *extras[:1]], [*text, main, *needed, *decoder, *extras[:1]],
        [*text, main, *needed, *decoder, *extras[:2]], [*text, main, *needed, *decoder, *extras],
        everything,
    ):  # fmt: skip
        key = tuple(sorted({name for name in names if name in known} if names is everything else set(names)))
        if not key or key in tried or not all(name in known for name in key):
            continue
        tried.add(key)
        for made in itertools.islice(itertools.product(*(known[name] for name in key)), _MOST):
            yield {name: make() for name, make in zip(key, made, strict=True)}


class _Sizes:
    """Sizes of inputs that a model and its parts name."""

    def __init__(self, model: Any) -> None:
        self._configs = list(parts(model.config))

    def size(self, *names: str, default: int) -> int:
        """Return the first of some fields that one of the configurations has."""
        for config in self._configs:
            for name in names:
                value = getattr(config, name, None)
                value = value[0] if isinstance(value, list | tuple) and value else value
                value = next(iter(value.values()), None) if isinstance(value, dict) else value
                if isinstance(value, int) and value > 0:
                    return value
        return default

    def makers(self) -> Makers:
        """Return what makes tensors for a parameter, by its name; several where their shapes differ."""
        side = self.size("image_size", "img_size", "crop_size", default=64)
        channels = self.size("num_channels", "in_channels", "in_chans", default=3)
        frames = self.size("num_frames", "frames_per_clip", "temporal_patch_size", default=2)
        bins = self.size("num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", default=80)
        places = self.size("max_source_positions", "n_window", default=32)
        patch, steps = (
            self.size("patch_size", default=8),
            self.size("context_length", "seq_length", default=32),
        )
        places_of_patches = torch.cartesian_prod(torch.arange(4), torch.arange(4)).repeat(2, 1, 1)
        series = self.size("num_input_channels", "input_size", default=1)
        temporal = self.size("temporal_patch_size", default=1)
        tubes = channels * temporal * patch * patch
        ids = torch.arange(3, 3 + 2 * LENGTH).reshape(2, LENGTH)
        width = self.size("hidden_size", "d_model", default=128)
        return {
            "input_ids": (lambda: ids, lambda: ids.repeat(1, 4)),
            "decoder_input_ids": (lambda: ids[:, :4], lambda: ids, lambda: ids.repeat(4, 1)),
            "attention_mask": (lambda: torch.ones_like(ids),),
            "qformer_input_ids": (lambda: ids,),
            "mm_token_type_ids": (lambda: torch.zeros_like(ids),),
            "pixel_values": (
                lambda: noise(2, channels, side, side), lambda: noise(2, channels, 64, 64),
                lambda: noise(2, channels, 224, 224), lambda: noise(2, frames, channels, side, side),
                lambda: noise(16, tubes), lambda: noise(1, 2, channels, side, side),
                lambda: noise(2, 16, channels * patch * patch), lambda: noise(16, channels, patch, patch),
            ),
            "pixel_values_videos": (lambda: noise(2, frames, channels, side, side),),
            "prompt_pixel_values": (lambda: noise(2, channels, side, side),),
            "prompt_masks": (lambda: noise(2, channels, side, side),),
            "pixel_attention_mask": (lambda: torch.ones(2, 16, dtype=torch.long),),
            "pixel_position_ids": (lambda: places_of_patches,),
            "spatial_shapes": (lambda: torch.tensor([[4, 4]] * 2),),
            "hidden_states": (
                lambda: noise(16, tubes), lambda: noise(16, channels, temporal, patch, patch),
                lambda: noise(2, 16, width),
            ),
            "grid_thw": (lambda: torch.tensor([[1, 4, 4]]),),
            "merge_sizes": (lambda: torch.tensor([1]),),
            "input_features": (
                lambda: noise(2, 64, bins), lambda: noise(2, bins, 2 * places), lambda: noise(2, bins, 64),
                lambda: noise(2, 64, 2 * bins), lambda: noise(2, 1, 64, bins), lambda: noise(2, 1, 1001, 64),
            ),
            "input_features_mask": (
                lambda: torch.ones(2, 64, dtype=torch.long), lambda: torch.ones(2, 2 * places),
            ),
            "feature_lens": (lambda: torch.tensor([64, 64]),),
            "input_values": (
                lambda: noise(2, SAMPLES), lambda: noise(2, 1, SAMPLES), lambda: noise(2, 64, bins),
                lambda: noise(2, 1024, bins), lambda: noise(2, 1, 24000), lambda: noise(2, 1920),
                lambda: noise(2, 1, 1920),
            ),
            "audio_values": (lambda: noise(2, 1, SAMPLES),),
            "flattened_patches": (lambda: noise(2, 16, 2 + channels * patch * patch),),
            "bbox": (lambda: torch.tensor([1, 2, 30, 40]).repeat(2, LENGTH, 1),),
            "past_values": (lambda: noise(2, steps, series).abs(), lambda: noise(2, steps).abs()),
            "past_time_features": (lambda: noise(2, steps, self.size("num_time_features", default=1)),),
            "past_observed_mask": (lambda: torch.ones(2, steps),),
            "past_values_padding": (lambda: torch.zeros(2, steps),),
            "freq": (lambda: torch.zeros(2, 1, dtype=torch.long),),
            "spectrogram": (lambda: noise(2, 64, bins),),
            "inputs": (lambda: noise(2, 16, self.size("d_model", default=128)),),
            "query_embeds": (lambda: noise(2, LENGTH, width),),
            "encoder_hidden_states": (
                lambda: noise(2, LENGTH, self.size("encoder_hidden_size", default=width)),
            ),
            "states": (lambda: noise(2, 4, self.size("state_dim", default=17)),),
            "actions": (lambda: noise(2, 4, self.size("act_dim", default=4)),),
            "returns_to_go": (lambda: noise(2, 4, 1),),
            "timesteps": (lambda: torch.arange(4).repeat(2, 1),),
            "latents": (lambda: noise(2, 16, width), lambda: noise(2, width, 16)),
        }  # fmt: skip


def noise(*shape: int) -> torch.Tensor:
    """Return normal numbers, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))
