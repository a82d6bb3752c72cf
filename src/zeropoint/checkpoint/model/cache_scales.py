"""Float8 cache scales of keys and values, learned from data.

Each attention layer gets two, for keys and for values: the largest magnitude that it gave to its cache over
the format's largest. Engines take 1 where a scale is missing, so nothing is written unless all are learned.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ...codecs.data_scales import CacheScales
from ...codecs.known import cache_scheme
from ...codecs.protocol import Codec
from ...codecs.registry import claiming
from ...errors import CalibrationError, CheckpointError, UnsupportedError, count, option, printable
from ...models.cache_watch import KvCacheObserver, PassingCache
from ...models.sequential import observe_blocks
from ..plan.additions import plan_with, with_added, with_cache
from ..plan.carried_scales import require_cache_place
from ..plan.checkpoint_plan import CheckpointPlan
from ..plan.limits import Limits
from ..plan.row_reader import NewTensor
from ..read.quantized_layers import configuration
from ..read.source import Source
from ..read.storage import shown
from ..read.tensor_entries import TensorEntry
from .parameter_names import WEIGHT
from .running_model import RunningModel, running
from .tokens import OWN, Given, Windows

_REMEDY = "calibrate it with the tool that wrote it"
_PROJECTIONS = ("k_proj", "qkv_proj")
"""Names of key projections, by which loaders find cache scales."""
_LATENT = "kv_b_proj"
"""The projection of layers whose cache holds latent vectors (DeepSeek-V2, arXiv:2405.04434) in engines."""


def with_cache_scales(
    source: Source, given: Given, *, limits: Limits | None = None, progress: bool = False
) -> CheckpointPlan:
    """Return the plan that adds learned cache scales to a checkpoint.

    given: token ids, or a file of these or of text; see :class:`~.tokens.Windows`. progress: whether to
    show a bar, on a terminal. Raises UnsupportedError for a layout that has no place for scales, and for a
    model that is not run here; CalibrationError for bad data, and for a layer of which no scale follows;
    CheckpointError for a checkpoint that is not quantized, or has such scales.
    """
    require_keys(given)
    codec, limits = _codec(source), limits or Limits.default()
    texts, place = with_cache(source, codec), codec.cache
    assert place is not None
    with running(source, given, limits, remedy=_REMEDY) as model:
        cache = LearnedCache(model, place, _REMEDY)
        cache.observe(progress=progress)
    return plan_with(source, codec, cache.tensors, texts, limits, notes=[cache.note])


def require_keys(given: Given) -> None:
    """Raise CalibrationError for random tokens, whose keys and values tell nothing."""
    if Windows.of(given).is_random:
        raise CalibrationError(
            "scales of a cache need keys and values of text, which random tokens do not have; pass "
            f"{option('calibration', metavar='FILE')} with text, or the word {OWN}"
        )


def without_scales() -> str:
    """Return the remedy where a model that is quantized gets no scales."""
    return f"leave {option('kv_scales', True)} out"


class LearnedCache:
    """Cache scales of a model that runs on data.

    model: before it runs. place: of scales in the files. remedy: what to do instead, for messages. Raises
    UnsupportedError for layers whose scales loaders do not find.
    """

    def __init__(self, model: RunningModel, place: CacheScales, remedy: str) -> None:
        self._model, self._place, self._remedy = model, place, remedy
        self._watch = KvCacheObserver(model.root)
        self._layers = _layers(model, self._watch, remedy)

    def observe(self, *, progress: bool) -> None:
        """Run the model block by block, observed; progress: shows a bar."""
        model = self._model
        with self._asking():
            observe_blocks(model.root, model.batches, self._watch, model.steps, progress=progress)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Observe keys and values within the context."""
        with self._asking(), self._watch.hooked():
            yield

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Raise UnsupportedError for a model that asks its cache for more."""
        try:
            yield
        except AttributeError as error:
            if not isinstance(error.obj, PassingCache):
                raise
            raise UnsupportedError(
                f"{type(self._model.root).__name__} asks more of its cache than to take keys and values: "
                f"{error}; {self._remedy}"
            ) from error

    @functools.cached_property
    def tensors(self) -> Sequence[NewTensor]:
        """The scales of all layers; raises CalibrationError for a missing one."""
        return tuple(_learned(self._layers, self._watch, self._place, self._remedy))

    @property
    def note(self) -> str:
        """A sentence about the scales."""
        spans = []
        for suffix in (self._place.key, self._place.value):
            found = [float(tensor.value) for tensor in self.tensors if tensor.name.endswith(f".{suffix}")]
            spans.append(f"{suffix} {min(found):.4g} to {max(found):.4g}")
        layers = count(len(self.tensors) // 2, "attention layer")
        return f"scales of a cache for {layers}: {', '.join(spans)}"

    def added_to(self, plan: CheckpointPlan) -> CheckpointPlan:
        """Return a plan that writes the scales, with a note about them."""
        return replace(with_added(plan, self.tensors), notes=(*plan.notes, self.note))


def _codec(source: Source) -> Codec:
    """Return the codec of a checkpoint that scales can be added to."""
    config = configuration(source)
    if config is None:
        raise CheckpointError(
            f"{shown(source.root)} is not quantized, and a checkpoint of floats has no place for scales of a "
            "cache; quantize it first"
        )
    codec = claiming(config)
    if codec is None:
        raise CheckpointError(
            f"{shown(source.root)} is quantized by {config.get('quant_method')!r:.40}, whose layout is not "
            f"read here; {_REMEDY}"
        )
    require_cache_place(source, codec)
    wanted = codec.with_cache(config)
    if cache_scheme(config) not in (None, cache_scheme(wanted)):
        raise CheckpointError(
            f"the configuration of {shown(source.root)} says that its cache is quantized otherwise "
            f"({cache_scheme(config)!r:.60}); remove that, or {_REMEDY}"
        )
    return codec


def _layers(model: RunningModel, watch: KvCacheObserver, remedy: str) -> dict[str, tuple[str, TensorEntry]]:
    """Return each attention layer's name in the files, and a weight there.

    Raises UnsupportedError for layers whose scales loaders do not find.
    """
    rows = {found.layer: found.module for found in model.rows}
    found = {}
    for name, layer in watch.layers.items():
        if any(child == _LATENT for child, _ in layer.named_children()):
            raise UnsupportedError(
                f"{name} makes keys and values of latent vectors, which engines keep in their place, so that "
                f"scales of keys and values would be wrong; {remedy}"
            )
        own = next((rows[f"{name}.{p}"] for p in _PROJECTIONS if f"{name}.{p}" in rows), None)
        if own is not None:
            entry = model.floats.source.entries[f"{own}{WEIGHT}"]
            found[name] = own.rpartition(".")[0], entry
    if not found:
        raise UnsupportedError(
            f"{type(model.root).__name__} has no attention layers with a cache and a projection called "
            f"{' or '.join(_PROJECTIONS)}, of which loaders find scales; {remedy}"
        )
    return found


def _learned(
    layers: Mapping[str, tuple[str, TensorEntry]], watch: KvCacheObserver, place: CacheScales, remedy: str
) -> Iterator[NewTensor]:
    """Yield the scales of all layers; raises CalibrationError for a missing one."""
    for name, (own, near) in layers.items():
        for what, suffix, found in (("keys", place.key, watch.keys), ("values", place.value, watch.values)):
            if name not in found:
                raise CalibrationError(
                    f"{printable(own)}: no token reached it, or it has the {what} of another layer, so that "
                    f"they have no scale; {remedy}"
                )
            scale = place.scale(found[name])
            number = float(scale)
            if not 0 < number < float("inf"):
                raise CalibrationError(
                    f"{printable(own)}: the largest magnitude of its {what} is {float(found[name])}, which "
                    "gives no scale; calibrate on other data, or check the weights"
                )
            if number == 1:
                raise CalibrationError(
                    f"{printable(own)}: the scale of its {what} would be exactly 1, as engines have it where "
                    "none was learned; calibrate on other data"
                )
            yield NewTensor(f"{own}.{suffix}", near, scale)
