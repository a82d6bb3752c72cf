"""Importance of layers: equal, by noise, or by trying each candidate.

By the linearity theorem, for small errors that are unbiased

    KL ~ sum over layers of alpha_l t_l^2,    t_l^2 = ||W'_l - W_l||^2 / ||W_l||^2

with numbers alpha_l that do not depend on how a layer is quantized. Each is measured once, with noise of
relative norm t in one layer, Gaussian: alpha_l = KL / t^2. Random tokens serve where there is no text. Where
squares of errors and of W_l count by the mean squares of inputs, squares of the noise do, too: the effect on
the outputs of a layer counts, and noise is spread over its inputs otherwise than errors are.

Errors of codes are no noise, so that a layer may lose twice what this says, and candidates of equal errors
differ. Where every candidate is tried in every layer, alone, no theorem is needed but that small losses of
layers add up.

Source: HIGGS, arXiv:2411.17525, theorem 1 and section 4.
"""

from __future__ import annotations

import functools
import hashlib
import math
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from ..architectures import text_config
from ..checkpoint.model.tokens import TEXT_OF_IDS, random_tokens
from ..checkpoint.plan.limits import Limits
from ..checkpoint.plan.selection import module_of
from ..checkpoint.plan.tied import tied_heads
from ..checkpoint.read.source import Source
from ..errors import CalibrationError, RecipeError, UnsupportedError, count, option, printable
from ..eval.divergence_meter import DivergenceMeter, divergence_meter
from ..eval.text_windows import TextTokenizer, TextWindows, TokenizedText, ids_of, text_of
from ..eval.window_probe import WindowProbe
from ..progress import Bar
from .inputs import Inputs
from .measuring import Importance, Weights, decoded
from .offers import KEEP, Choices, SearchedLayer
from .search_state import SearchState, number_in, numbers_in
from .searching import EQUAL, Weighing, WeighingRule, equal

LINEARITY, DIVERGENCE = "linearity", "divergence"
"""Besides EQUAL, how much layers matter, as users write it."""
NOISE = 0.1
"""Relative norm of the noise, as of 4-bit errors, where the theorem holds well."""
WINDOWS, CONTEXT = 4, 128
"""Windows, and tokens of each, of which half are scored."""
Text = Path | str | None


def windows_of(source: Source, given: Text) -> TextWindows:
    """Return the windows that a model runs on.

    given: a file of text, or of token ids; random tokens if None. Raises CalibrationError for a file that is
    none of these or too short, UnsupportedError where text needs a tokenizer that is not there.
    """
    if given is None:
        config = source.config or {}
        words = text_config(config).get("vocab_size")
        if type(words) is not int or not 0 < words < 1 << 31:
            raise UnsupportedError(
                f"config.json has no vocab_size for random tokens; pass {option('text', metavar='FILE')}"
            )
        return TokenizedText(ids=random_tokens(words, WINDOWS, CONTEXT).reshape(-1)).windows(CONTEXT, WINDOWS)
    if str(given).endswith(TEXT_OF_IDS):
        return TokenizedText(ids=ids_of(given)).windows(CONTEXT, WINDOWS)
    return TextTokenizer(source)(text_of(given)).windows(CONTEXT, WINDOWS)


def digest_of(windows: TextWindows) -> str:
    """Return a digest of windows' tokens."""
    return hashlib.sha256(windows.given.numpy().tobytes()).hexdigest()[:16]


def meter_of(found: Choices, windows: TextWindows, limits: Limits) -> AbstractContextManager[DivergenceMeter]:
    """Return a context with a search's model on windows, in memory."""
    return divergence_meter(found.source, WindowProbe(windows), limits=limits)


def decided_by(found: Choices, mark: str, windows: TextWindows) -> str:
    """Return the key of a choice's divergence: tokens and methods.

    mark: names the inputs that methods know, see :attr:`~.searching.Weighing.mark`.
    """
    methods = {c.method or "" for c in found.candidates.values()}
    return " ".join(filter(None, (f"tokens {digest_of(windows)}", found.codec.name, *sorted(methods), mark)))


def name_in(meter: DivergenceMeter, source: Source, module: str) -> str:
    """Return a meter's name of a file's module.

    An embedding is known by the head that is tied to it. Raises UnsupportedError for other embeddings.
    """
    if module in meter.modules:
        return module
    for head in tied_heads(source):
        if head in meter.modules and module.endswith(("embed_tokens", "wte", "word_embeddings", "shared")):
            return module_of(head)
    raise UnsupportedError(
        f"{printable(module)} is no linear layer of the model, so that no change of it is tried; leave it "
        f"out of {option('include')}, or weigh layers equally"
    )


def noisy(weight: torch.Tensor, size: float, seed: int) -> torch.Tensor:
    """Return a weight with Gaussian noise of relative norm ``size``.

    >>> w = torch.ones(64, 64)
    >>> 0.09 < float((noisy(w, 0.1, 0) - w).norm() / w.norm()) < 0.11
    True
    """
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    return weight + noise.to(weight.device) * (
        size * float(weight.double().norm()) / math.sqrt(max(1, weight.numel()))
    )


def by_noise(
    given: Text, limits: Limits, found: Choices, inputs: Inputs | None, state: SearchState, bar: Bar
) -> Weighing:
    """Weigh layers by the linearity theorem; a :data:`WeighingRule` of text and limits.

    given: see :func:`windows_of`. Raises what :func:`windows_of` and :func:`meter_of` raise, and
    CalibrationError where no layer matters.
    """
    windows = windows_of(found.source, given)
    kind = f"noise {NOISE:g}, tokens {digest_of(windows)}{limits.mark}"
    kind += "" if inputs is None else inputs.mark
    left = [layer for layer in found.layers if state.fact(kind, layer.name, number_in) is None]
    if left:
        with bar("weighing", layers_of) as on_layer, meter_of(found, windows, limits) as meter:
            for number, layer in enumerate(left):
                columns = {} if inputs is None else inputs.columns
                state.add_facts(kind, {layer.name: _slope(meter, found, layer, columns)})
                on_layer(number + 1, len(left), layer.name)
    factors = {layer.name: max(0.0, state.fact(kind, layer.name, number_in) or 0.0) for layer in found.layers}
    if not any(factors.values()):
        raise CalibrationError(
            "noise in no layer changes the logits of these tokens; give other text, or weigh layers equally"
        )

    def losses(layer: SearchedLayer, errors: Mapping[str, float]) -> dict[str, float]:
        return {text: factors[layer.name] * error for text, error in errors.items()}

    return Weighing(name=LINEARITY, losses=losses)


def by_divergence(
    given: Text, limits: Limits, found: Choices, inputs: Inputs | None, state: SearchState, bar: Bar
) -> Weighing:
    """Weigh layers by the divergence of each candidate alone, see :func:`by_noise`."""
    windows = windows_of(found.source, given)
    mark = "" if inputs is None else inputs.mark
    kind = f"divergence, {decided_by(found, mark, windows)}{limits.mark}"
    known = {
        layer.name: {KEEP: 0.0, **(state.fact(kind, layer.name, numbers_in) or {})} for layer in found.layers
    }
    left = [layer for layer in found.layers if layer.sizes.keys() - known[layer.name].keys()]
    if left:
        with bar("trying", layers_of) as on_layer, meter_of(found, windows, limits) as meter:
            for number, layer in enumerate(left):
                own = known[layer.name]
                new = [text for text in layer.sizes if text not in own]
                own |= {text: _tried(meter, found, layer, text, limits) for text in new}
                state.add_facts(kind, {layer.name: own})
                on_layer(number + 1, len(left), layer.name)
    return Weighing(name=DIVERGENCE, losses=lambda layer, errors: {t: known[layer.name][t] for t in errors})


def _tried(meter: DivergenceMeter, found: Choices, layer: SearchedLayer, text: str, limits: Limits) -> float:
    """Return the divergence with one layer decoded from a candidate."""
    weights = {
        name_in(meter, found.source, weight.module): decoded(found, weight, text, limits)
        for weight in layer.weights
    }
    # Rounding may make less than nothing of it; NaN stays NaN.
    return max(meter.mean_divergence(weights).value, 0.0)


def layers_of(number: int) -> str:
    """Return a number of layers, in words."""
    return count(number, "layer")


def _slope(meter: DivergenceMeter, found: Choices, layer: SearchedLayer, columns: Importance) -> float:
    """Return divergence over mean squared noise; columns: their importance."""
    weights, sizes = {}, []
    for weight in layer.weights:
        name = name_in(meter, found.source, weight.module)
        given, counts = meter.weight(name), columns.get(weight.module)
        weights[name] = noisy(given, NOISE, zlib.crc32(weight.module.encode()))
        sizes.append(NOISE**2 if counts is None else _size(weights[name] - given, given, counts))
    return meter.mean_divergence(weights).value * len(sizes) / math.fsum(sizes)


def _size(noise: torch.Tensor, weight: torch.Tensor, counts: Weights) -> float:
    """Return relative squares of ``noise``, with columns weighted by ``counts``."""
    own, other = (
        float((x.double().cpu().square() @ torch.from_numpy(counts)).sum()) for x in (noise, weight)
    )
    return own / other if other else 1.0


def weigh_by(importance: str, text: Text, limits: Limits) -> WeighingRule:
    """Return the way to weigh layers that users ask for.

    importance: EQUAL, LINEARITY or DIVERGENCE. text: see :func:`windows_of`. Raises RecipeError for another
    word.
    """
    ways = {LINEARITY: by_noise, DIVERGENCE: by_divergence}
    if importance in ways:
        return functools.partial(ways[importance], text, limits)
    if importance != EQUAL:
        raise RecipeError(f"importance {printable(importance)} must be {EQUAL}, {LINEARITY} or {DIVERGENCE}")
    return equal
