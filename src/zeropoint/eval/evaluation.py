"""Quality of models against a reference, in one pass of each.

Every readable layout counts as a model, and runs on its decoded weights, in float32 unless another dtype is
given. The noise floor is the reference itself in bfloat16: a difference below it says nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..architectures import classes_of
from ..checkpoint.model.forward_pass import ForwardPass, forward_pass, opened
from ..checkpoint.model.samples import Batches
from ..checkpoint.model.tokens import TEXT_OF_IDS
from ..checkpoint.plan.limits import Limits
from ..checkpoint.read.source import Source, open_source
from ..checkpoint.read.storage import Place, shown
from ..checkpoint.verify.overview import overview
from ..errors import CalibrationError, UnsupportedError, option, size_of
from ..shown import new_page, page_of_results
from ..signatures import by_signature
from .cloze import cloze_items
from .cloze_probe import ClozeProbe
from .continuations import ContinuationProbe, greedy_continuations, prompts_of
from .encoder_probe import EncoderProbe, sentences_of, takes_first_vector
from .evaluation_result import Evaluation, ModelQuality
from .probe import Probe, ask
from .reference_cache import ReferenceCache, reference_key
from .text_windows import TextTokenizer, TextWindows, TokenizedText, ids_of, text_of
from .window_probe import WindowProbe

_PROMPT = 32
"""Tokens of a prompt that is continued."""
_COMPARED = 1 << 16
"""Characters of the text that tokenizers of models are compared on."""
_BATCH = 2048
"""Tokens of a batch of sentences for an encoder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """Settings of an evaluation.

    Args:
        context: tokens of a window, of which the second half is scored: llama-perplexity's ``--ctx-size``.
        windows: how many at most, from the start of the text; of an embedding model, sentences.
        continuations: how many prompts the reference continues; 0 for none.
        tokens: how many tokens each continuation has.
        tagged: a file of tagged text to make choices of, or None.
        items: how many choices at most.
        noise_floor: whether the reference runs in bfloat16, too.
        cache: a file that keeps the reference's outputs, or None.
        dtype: of weights and activations.

    Raises:
        CalibrationError: for numbers below their least.
    """

    context: int = 512
    windows: int | None = None
    continuations: int = 16
    tokens: int = 64
    tagged: Path | None = None
    items: int = 500
    noise_floor: bool = True
    cache: Path | None = None
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        least = {"context": 4, "windows": 1, "continuations": 0, "tokens": 1, "items": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise CalibrationError(f"{name} (={value}) must be at least {low}")


@dataclass(slots=True, kw_only=True)
class _Probes:
    """The probes of an evaluation."""

    probes: list[Probe]
    data: list[str]
    sequences: torch.Tensor | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def batches(self) -> Batches:
        return [batch for probe in self.probes for batch in probe.batches]


@by_signature
def evaluate_checkpoint(
    models: Place | str | Sequence[Place | str], against: Place | str, text: Path | str,
    *, context: int = 512, windows: int | None = None, continuations: int = 16,
    cloze: Path | str | None = None, noise_floor: bool = True, cache: Path | str | None = None,
    out: Path | str | None = None, overwrite: bool = False,
    max_memory: int | str | None = None, device: torch.device | str | None = None, progress: bool = False,
) -> Evaluation:  # fmt: skip
    """Evaluate models against a reference on a text, like ``zeropoint eval``.

    Each runs on its decoded weights in float32, a block in memory at a time; inputs are quantized where the
    checkpoint says so. Windows are cut and scored as llama-perplexity does, and statistics have the names
    that llama.cpp prints: ``found.models[-1].statistics["Mean KLD"].value``.

    Args:
        models: a checkpoint in any readable layout, or several.
        against: the reference, usually the model that they were quantized from.
        text: a file of text in UTF-8, or of token ids in .safetensors.
        context: tokens of a window, of which the second half is scored.
        windows: how many at most, 16 if None; of an embedding model sentences, 1,000 if None.
        continuations: how many prompts the reference continues, to see where models part from it.
        cloze: a file of ``word/tag`` text, as the Brown corpus has it, to make choices between sentences of.
        noise_floor: whether the reference runs in bfloat16, too, which is the first of ``models`` then.
        cache: a file that keeps the reference's outputs, for other models on the same text.
        out: a file for a page about the results and the models; none is written if None.
        overwrite: whether a page that is there may be replaced.
        max_memory: most memory of the process, as bytes or a text such as ``"1G"``; 2 GiB if None.
        device: where models run: the processor if None, or ``"cuda"``.
        progress: whether to show bars, on a terminal or in a notebook.

    Returns:
        Statistics of each model, with standard errors.

    Raises:
        CalibrationError: for a text that is too short or cannot be read, for models of another kind, and for
            tokens unlike the reference's.
        UnsupportedError: for models that are not run here.
        CheckpointError: for files that are damaged, a cache of something else, and too little memory.
    """
    settings = EvaluationSettings(
        context=context,
        windows=windows,
        continuations=continuations,
        noise_floor=noise_floor,
        tagged=None if cloze is None else Path(cloze),
        cache=None if cache is None else Path(cache),
    )
    every = [models] if isinstance(models, Place | str) else list(models)
    limits = Limits.default(max_memory=max_memory, device=device)
    page = None
    if out is not None:
        apart = [place for each in (against, *every) for place in open_source(each).places]
        page = new_page(Path(out), apart, overwrite=overwrite)
    found = evaluate(every, against, text, settings=settings, limits=limits, progress=progress)
    if page is not None:
        runs = tuple(map(overview, every))
        page.write([page_of_results(runs=runs, evaluation=found)], overwrite=overwrite)
    return found


def evaluate(
    models: Sequence[Place | str], against: Place | str, text: Path | str, *,
    settings: EvaluationSettings | None = None, limits: Limits | None = None, progress: bool = False,
) -> Evaluation:  # fmt: skip
    """Return an evaluation of models against a reference on a text.

    Args:
        models: checkpoints in any readable layout, quantized or not.
        against: the reference, usually the model that they were quantized from.
        text: a file of text in UTF-8, or of token ids in .safetensors.
        settings: of the evaluation.
        limits: of memory.
        progress: whether to show bars, on a terminal or in a notebook.

    Raises:
        CalibrationError: for a text that is too short or cannot be read, for models of another kind, and for
            tokens unlike the reference's.
        UnsupportedError: for models that are not run here.
        CheckpointError: for files that are damaged, a cache of something else, and too little memory.
    """
    settings, limits = settings or EvaluationSettings(), limits or Limits.default()
    reference, others = open_source(against), [open_source(model) for model in models]
    cache = None
    if settings.cache is not None:
        cache = ReferenceCache(settings.cache, [p for each in (reference, *others) for p in each.places])
        cache.require_place()
    encoder = is_encoder(reference)
    for other in others:
        if is_encoder(other) != encoder:
            kinds = ("a causal language model", "an encoder")
            raise CalibrationError(
                f"{shown(other.given)} is {kinds[not encoder]}, and the reference {kinds[encoder]}; compare "
                "models of one kind"
            )
    wanted = (
        _probes_of_encoder(reference, text, settings)
        if encoder
        else _probes_of_language_model(reference, others, text, settings=settings, limits=limits, cache=cache)
    )
    found: list[ModelQuality] = []
    with _base(reference, wanted, cache, (settings, limits), progress=progress) as base:
        rows = [("noise floor: the reference in bfloat16", reference, torch.bfloat16)]
        rows = rows if settings.noise_floor else []
        given = zip(map(str, models), others, strict=True)
        for name, source, dtype in [*rows, *((place, other, settings.dtype) for place, other in given)]:
            with forward_pass(source, wanted.batches, limits, dtype=dtype, progress=progress) as own:
                floor = source is reference
                if own.model.vocabulary != base.model.vocabulary:
                    raise CalibrationError(
                        f"{shown(source.given)} knows {own.model.vocabulary} tokens, and the reference "
                        f"{base.model.vocabulary}; compare models of one vocabulary"
                    )
                statistics, samples = ask(own, base, wanted.probes)
                found.append(ModelQuality(
                    name=name, nbytes=source.entries.nbytes, statistics=statistics, samples=samples,
                    notes=own.notes, is_noise_floor=floor,
                ))  # fmt: skip
    return Evaluation(
        reference=str(against), reference_bytes=reference.entries.nbytes, encoder=encoder,
        data=tuple(wanted.data), models=tuple(found), notes=tuple(wanted.notes), device=limits.device.type,
    )  # fmt: skip


def is_encoder(source: Source) -> bool:
    """Return whether a checkpoint is an embedding model, not a causal one.

    Raises UnsupportedError where it is neither, or says nothing.
    """
    config = source.config or {}
    name = next(iter(classes_of(config)), "")
    # A model that reads images or sound, too, is causal unless it has an encoder of text.
    others = () if config.get("is_encoder_decoder") else ("ForConditionalGeneration",)
    if name.endswith(("ForCausalLM", "LMHeadModel", *others)):
        return False
    if name.endswith("Model"):
        return True
    raise UnsupportedError(
        f"{shown(source.given)} is a {name or 'model without a configuration'}, and evaluated are causal "
        "language models, such as LlamaForCausalLM, and embedding models, such as BertModel"
    )


@contextmanager
def _base(
    reference: Source,
    wanted: _Probes,
    cache: ReferenceCache | None,
    by: tuple[EvaluationSettings, Limits],
    *,
    progress: bool,
) -> Iterator[ForwardPass]:
    """Return a context with the reference's pass, run or cached."""
    settings, limits = by
    ran = functools.partial(forward_pass, reference, wanted.batches, limits, dtype=settings.dtype)
    if cache is None:
        with ran(progress=progress) as base:
            yield base
        return
    key = reference_key(reference, wanted.batches, f"{settings.tokens}{limits.mark}", settings.dtype)
    known = functools.partial(cache.read, key, wanted.batches) if cache.is_there else None
    with ran(progress=progress, known=known) as base:
        if known is None:
            cache.write(key, base.values, wanted.sequences)
        yield base


def _probes_of_encoder(reference: Source, text: Path | str, settings: EvaluationSettings) -> _Probes:
    if Path(text).suffix == TEXT_OF_IDS:
        raise CalibrationError(
            f"{shown(Path(text))} holds token ids, and an encoder needs sentences; give text"
        )
    tokenizer, most = TextTokenizer(reference), settings.windows or 1000
    rows = [tokenizer.sentence(sentence) for sentence in sentences_of(text_of(text), most)]
    # Its last token ends the sentence, also where that is cut.
    rows = [row if len(row) <= settings.context else [*row[: settings.context - 1], row[-1]] for row in rows]
    first = takes_first_vector(reference)
    probe = EncoderProbe(rows, first=first, most=max(_BATCH, settings.context))
    pooled = "the vector of the first token" if first else "the mean of all tokens' vectors"
    return _Probes(probes=[probe], data=[f"{len(rows):,} sentences, each embedded as {pooled}"])


def _probes_of_language_model(
    reference: Source, others: Sequence[Source], text: Path | str, *, settings: EvaluationSettings,
    limits: Limits, cache: ReferenceCache | None,
) -> _Probes:  # fmt: skip
    tokenizer = None
    if Path(text).suffix == TEXT_OF_IDS:
        tokens = TokenizedText(ids=ids_of(text))
    else:
        tokenizer, whole = (
            TextTokenizer(reference),
            text_of(text, settings.context * (settings.windows or 16)),
        )
        tokens = tokenizer(whole)
        for other in others:
            require_same_tokens(reference, other, whole[:_COMPARED], tokenizer(whole[:_COMPARED]))
    windows = tokens.windows(settings.context, settings.windows or 16)
    wanted = _Probes(probes=[WindowProbe(windows)], data=[_said(windows)])
    if settings.continuations:
        known = None if cache is None else cache.sequences()
        _ask_for_continuations(wanted, reference, tokens, (settings, limits), known=known)
    if settings.tagged is not None:
        if tokenizer is None:
            raise CalibrationError(
                "choices between sentences need a tokenizer; give text in place of token ids"
            )
        items = cloze_items(settings.tagged, settings.items)
        given = lambda sentence: tokenizer(sentence).ids.tolist()
        wanted.probes.append(ClozeProbe(items, given, settings.context))
        wanted.data.append(f"{len(items):,} choices between two sentences of {shown(settings.tagged)}")
    return wanted


def _said(windows: TextWindows) -> str:
    number, scored = len(windows.given), windows.targets.numel()
    size = "" if windows.nbytes is None else f" ({size_of(windows.nbytes)} of text)"
    start = "" if windows.bos is None else f", each begun by token {windows.bos}"
    return f"{number} windows of {windows.context} tokens{start}, {scored:,} of them scored{size}"


def _ask_for_continuations(
    wanted: _Probes,
    reference: Source,
    tokens: TokenizedText,
    by: tuple[EvaluationSettings, Limits],
    *,
    known: torch.Tensor | None,
) -> None:
    """Add a probe of the reference's continuations, known or generated."""
    settings, limits = by
    prompts = prompts_of(tokens.ids, settings.continuations, min(_PROMPT, settings.context // 2))
    number = min(settings.tokens, settings.context - prompts.shape[1])
    length = prompts.shape[1]
    if (
        known is None
        or known.shape != (len(prompts), length + number)
        or not torch.equal(known[:, :length], prompts)
    ):
        with opened(reference, [{"input_ids": prompts}], limits, dtype=settings.dtype) as (model, _):
            whole = sum(p.nbytes for p in model.root.parameters())
            needed = whole if limits.on_gpu else whole + limits.base_memory
            if needed > (model.spare if limits.on_gpu else limits.max_memory):
                wanted.notes.append(
                    f"no continuations: the reference as a whole takes {size_of(needed)}, more than "
                    + (f"is free on {limits.device}" if limits.on_gpu else f"{option('max_memory')} allows")
                )
                return
            known = greedy_continuations(model, prompts, number)
    wanted.sequences = known
    wanted.probes.append(ContinuationProbe(known, number, settings.context))
    wanted.data.append(f"{len(prompts)} continuations of {number} tokens by the reference")


def require_same_tokens(reference: Source, other: Source, text: str, expected: TokenizedText) -> None:
    """Raise CalibrationError where two checkpoints tokenize a text differently.

    One without a tokenizer passes. reference: whose tokens were expected. other: another checkpoint. text:
    any text. expected: the reference's tokens.
    """
    try:
        found = TextTokenizer(other)(text)
    except UnsupportedError:
        return
    same = found.ids.shape == expected.ids.shape and torch.equal(found.ids, expected.ids)
    if not same:
        raise CalibrationError(
            f"tokenizers of {shown(other.given)} and {shown(reference.given)} differ on the text; compare "
            f"models of one tokenizer, or give token ids in a {TEXT_OF_IDS} file"
        )
