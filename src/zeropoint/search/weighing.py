"""How much layers matter: equally, or by noise in one layer at a time.

By the linearity theorem, for small errors that are unbiased

    KL ~ sum over layers of alpha_l t_l^2,    t_l^2 = ||W'_l - W_l||^2 / ||W_l||^2

with numbers alpha_l that do not depend on how a layer is quantized. Each is measured once, with noise of
relative norm t in one layer, Gaussian: alpha_l = KL / t^2. Random tokens serve where there is no text.

Source: HIGGS, arXiv:2411.17525, theorem 1 and section 4.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..checkpoint.choose.selection import module_of
from ..checkpoint.choose.tied import tied_heads
from ..checkpoint.model.tokens import random_tokens
from ..checkpoint.plan.limits import Limits
from ..checkpoint.read.source import Source
from ..errors import CalibrationError, RecipeError, UnsupportedError, count, printable
from ..eval.divergence_meter import DivergenceMeter, divergence_meter
from ..eval.text_windows import TEXT_OF_IDS, TextTokenizer, TextWindows, TokenizedText, read_ids, read_text
from ..eval.window_probe import WindowProbe
from .offers import Choices, SearchedLayer
from .search_state import SearchState
from .searching import EQUAL, Bar, Weigh, Weighing, equal

LINEARITY = "linearity"
"""Besides EQUAL, how much layers matter, as users write it."""
NOISE = 0.1
"""Relative norm of the noise: that of errors of 4 bits, where the theorem holds well."""
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
        words = (config.get("text_config") or config).get("vocab_size")
        if not isinstance(words, int) or words < 1:
            raise UnsupportedError("config.json has no vocab_size for random tokens; pass --text FILE")
        return TokenizedText(ids=random_tokens(words, WINDOWS, CONTEXT).reshape(-1)).windows(CONTEXT, WINDOWS)
    if str(given).endswith(TEXT_OF_IDS):
        return TokenizedText(ids=read_ids(given)).windows(CONTEXT, WINDOWS)
    return TextTokenizer(source)(read_text(given)).windows(CONTEXT, WINDOWS)


def digest_of(windows: TextWindows) -> str:
    """Return what tells the tokens of windows from others."""
    return hashlib.sha256(windows.given.numpy().tobytes()).hexdigest()[:16]


@contextmanager
def meter_of(found: Choices, windows: TextWindows, limits: Limits) -> Iterator[DivergenceMeter]:
    """Return a context in which the model of a search runs on windows, all of it in memory."""
    with divergence_meter(found.source, WindowProbe(windows), limits=limits) as meter:
        yield meter


def name_in(meter: DivergenceMeter, source: Source, module: str) -> str:
    """Return the name by which a meter knows the weight of a module of the files.

    An embedding is known by the head that is tied to it. Raises UnsupportedError for other embeddings.
    """
    if module in meter.modules:
        return module
    for head in tied_heads(source):
        if head in meter.modules and module.endswith(("embed_tokens", "wte", "word_embeddings", "shared")):
            return module_of(head)
    raise UnsupportedError(
        f"{printable(module)} is no linear layer of the model, so that noise in it is not tried; leave it "
        "out of --include, or weigh layers equally"
    )


def noisy(weight: torch.Tensor, size: float, seed: int) -> torch.Tensor:
    """Return a weight with Gaussian noise whose norm is ``size`` times that of the weight, on average.

    >>> w = torch.ones(64, 64)
    >>> 0.09 < float((noisy(w, 0.1, 0) - w).norm() / w.norm()) < 0.11
    True
    """
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    return weight + noise * (size * float(weight.double().norm()) / math.sqrt(max(1, weight.numel())))


def by_noise(given: Text, limits: Limits, *, noise: float = NOISE) -> Weigh:
    """Return the way to weigh layers by the linearity theorem.

    given: see :func:`windows_of`. What it returns raises what :func:`windows_of` and :func:`meter_of` raise,
    and CalibrationError where no layer matters.
    """

    def weigh(found: Choices, state: SearchState, bar: Bar) -> Weighing:
        windows = windows_of(found.source, given)
        kind = f"noise {noise:g}, tokens {digest_of(windows)}"
        left = [layer for layer in found.layers if state.fact(kind, layer.name) is None]
        if left:
            with bar("weighing", layers_of) as on_layer, meter_of(found, windows, limits) as meter:
                for number, layer in enumerate(left):
                    state.add_facts(kind, {layer.name: _slope(meter, found, layer, noise)})
                    on_layer(number + 1, len(left), layer.name)
        factors = {layer.name: max(0.0, float(state.fact(kind, layer.name))) for layer in found.layers}
        if not any(factors.values()):
            raise CalibrationError(
                "noise in no layer changes the logits of these tokens; give other text, or weigh layers "
                "equally"
            )
        return Weighing(name="linearity", factors=factors)

    return weigh


def layers_of(number: int) -> str:
    """Return a number of layers, in words."""
    return count(number, "layer")


def _slope(meter: DivergenceMeter, found: Choices, layer: SearchedLayer, noise: float) -> float:
    weights = {}
    for weight in layer.weights:
        name = name_in(meter, found.source, weight.module)
        weights[name] = noisy(meter.weight(name), noise, zlib.crc32(weight.module.encode()))
    return meter.mean_divergence(weights).value / noise**2


def weigh_by(importance: str, text: Text, limits: Limits) -> Weigh:
    """Return the way to weigh layers that users ask for.

    importance: EQUAL or LINEARITY. text: see :func:`windows_of`. Raises RecipeError for another word.
    """
    if importance not in (EQUAL, LINEARITY):
        raise RecipeError(f"importance {printable(importance)} must be {EQUAL} or {LINEARITY}")
    return by_noise(text, limits) if importance == LINEARITY else equal
