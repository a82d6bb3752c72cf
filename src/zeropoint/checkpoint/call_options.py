"""Options that several functions about checkpoints share with commands.

The command line parses words, and calls the same functions: an option means one thing from either side.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, TypedDict, Unpack

from ..codecs.registry import DEFAULT
from ..errors import CheckpointError, OptionError, all_of, option, size_of
from ..own_files import OwnFile
from ..progress import Progress, bars
from ..recipes import Recipe
from ..shown import PAGE, with_page
from .cluster.ray import RayExecutor
from .model.tokens import Data, Windows
from .plan.checkpoint_plan import CheckpointPlan, make_plan
from .plan.file import PlanFile
from .plan.learned_data import of_lower_quality
from .plan.limits import Limits
from .plan.recipe import RecipeText, codec_for, require_blocks
from .plan.selection import DequantizePolicy, Selection
from .read.file_names import REPORT
from .read.object_store import RemotePath
from .read.source import Source
from .read.storage import Place, exists, is_folder, listing, place, shown
from .run.executor import Executor, local
from .run.lock import break_lock
from .run.loop import RunResult, run

Patterns: TypeAlias = Iterable[str] | str
"""Globs or ``re:`` expressions, or one of them."""
Paths: TypeAlias = Iterable[Path | str] | Path | str
"""Files, or one of them."""
AnyRecipe: TypeAlias = RecipeText | Recipe | Path | str
"""A recipe: an object, a file, its text, or the name of a family."""
Shown: TypeAlias = bool | Progress
"""Whether to show bars on stderr, or a function that is called in their place."""
LOCAL, RAY = "local", "ray"
"""Names of executors."""
RESUME, SKIP, ERROR = "resume", "skip", "error"
"""Treatments of an existing output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """Options of writing an output.

    overwrite: write into a directory that is not empty. restart: discard an interrupted run there.
    break_lock: remove the lock of a run that has died. if_exists: ``"resume"`` an interrupted run of the same
    plan and compare a finished one, ``"skip"`` one that its manifest says is finished, or raise an
    ``"error"``. executor: what does the work, ``"local"`` or ``"ray"``. address: of the Ray cluster. spool:
    scratch directory for uploads. progress: see :data:`Shown`. report: write
    a page next to the manifest.
    """

    overwrite: bool = False
    restart: bool = False
    break_lock: bool = False
    if_exists: str = RESUME
    executor: str | Executor = LOCAL
    address: str | None = None
    spool: Path | str | None = None
    progress: Shown = False
    report: bool = False

    def __post_init__(self) -> None:
        if self.if_exists not in (RESUME, SKIP, ERROR):
            raise OptionError(
                f"{option('if_exists', self.if_exists)} must be {RESUME}, {SKIP} or {ERROR}; "
                f"{option('overwrite', True)} writes over what is there"
            )
        if self.if_exists == ERROR and (self.overwrite or self.restart):
            which = option("overwrite" if self.overwrite else "restart", True)
            raise OptionError(f"{option('if_exists', ERROR)} excludes {which}; give one of them")
        if not callable(self.executor):
            require_executor(self.executor, self.address)

    def write(self, plan: CheckpointPlan, out: Place | str, verb: str) -> RunResult:
        """Carry out a plan. verb: of the bar.

        Raises OptionError for options that mean nothing for this kind of output, and what :func:`run` raises.
        """
        target = self.require_target(out)
        if isinstance(target, Path) and self.break_lock:
            break_lock(target)
        executor: Executor = local if self.executor == LOCAL else RayExecutor(address=self.address)
        executor = self.executor if callable(self.executor) else executor
        with bars(self.progress)(verb, size_of) as move:
            result = run(
                plan,
                target,
                overwrite=self.overwrite,
                restart=self.restart,
                executor=executor,
                skip_finished=self.if_exists == SKIP,
                spool=None if self.spool is None else Path(self.spool),
                on_progress=move,
            )
        if self.if_exists == SKIP and result.resumed == result.units:
            return result  # the output is left as it is, with its page
        if self.report:
            result = with_page(result)
        elif isinstance(target, Path):  # the page of an earlier run is about other files
            OwnFile(target / REPORT, PAGE).remove()
        return result

    def require_target(self, out: Place | str) -> Place:
        """Return where ``out`` is.

        Raises OptionError for options that mean nothing for such a place, and CheckpointError where something
        is there and that was to be an error.
        """
        target = place(out)
        if self.if_exists == ERROR and exists(target) and not (is_folder(target) and not listing(target)):
            raise CheckpointError(
                f"{shown(target)} holds files already; choose another output, or leave "
                f"{option('if_exists', ERROR)} out"
            )
        if isinstance(target, RemotePath):
            if self.overwrite or self.break_lock:
                which = option("overwrite" if self.overwrite else "break_lock", True)
                raise OptionError(
                    f"objects behind a URL are neither overwritten nor locked; leave {which} out"
                )
        elif self.spool is not None:
            raise OptionError(f"{option('spool')} is for an output behind a URL; leave it out")
        return target


def requested_windows(given: Data | None, samples: int | None, length: int | None) -> Windows | None:
    """Return the requested windows, or None; raises OptionError without data."""
    if given is not None:
        return Windows(given=given, samples=samples, length=length)
    if samples is not None or length is not None:
        raise OptionError(
            f"{option('samples')} and {option('length')} are of windows of {option('calibration')}; add "
            "that, or leave them out"
        )
    return None


def require_executor(executor: str, address: str | None) -> None:
    """Raise OptionError for an unknown executor, or an unused address."""
    if executor not in (LOCAL, RAY):
        raise OptionError(f"{option('executor', executor)} must be {LOCAL} or {RAY}")
    if address is not None and executor != RAY:
        raise OptionError(
            f"{option('address', address)} is the address of a Ray cluster; pass "
            f"{option('executor', RAY)} too"
        )


class Switches(TypedDict, total=False):
    """Options of a selection that are on or off; see :class:`Selection`."""

    strict: bool
    fit: bool
    kv_scales: bool


def selection_of(
    include: Patterns = (),
    ignore: Patterns = (),
    *,
    dequantize_first: bool = False,
    dequantize_kept: bool = False,
    **switches: Unpack[Switches],
) -> Selection:
    """Return the selection of tensors that options ask for.

    switches: see :class:`Switches`.
    """
    policy = DequantizePolicy.FIRST if dequantize_first else DequantizePolicy.NONE
    if dequantize_kept:
        policy = DequantizePolicy.EVERY
    return Selection(include=patterns(include), ignore=patterns(ignore), dequantize=policy, **switches)


def patterns(given: Patterns) -> tuple[str, ...]:
    """Return patterns, or the one that is given by itself.

    >>> patterns("*.down_proj"), patterns(["a", "b"])
    (('*.down_proj',), ('a', 'b'))
    """
    return (given,) if isinstance(given, str) else tuple(given)


def paths(given: Paths) -> tuple[Path, ...]:
    """Return files, or the one that is given by itself."""
    return (Path(given),) if isinstance(given, Path | str) else tuple(map(Path, given))


def planned(
    source: Source, to: str | AnyRecipe | None, *, recipe: AnyRecipe | None = None,
    plan: PlanFile | Path | str | None = None, format: str | None = None,  # noqa: A002 (the option's name)
    method: str | None = None, selection: Selection, limits: Limits,
) -> CheckpointPlan:  # fmt: skip
    """Return the requested plan: by scheme, by recipe, or by file.

    Raises OptionError unless one of the three is given, and for what a plan has itself; what
    :func:`make_plan` raises.
    """
    if plan is not None:
        if method is not None or format is not None or selection != Selection():
            words = (
                "method",
                "format",
                "include",
                "ignore",
                "strict",
                "fit",
                "kv_scales",
                "dequantize_first",
                "dequantize_kept",
            )
            raise OptionError(f"a plan has its own {all_of(map(option, words))}; leave them out")
        file = plan if isinstance(plan, PlanFile) else PlanFile.read(plan)
        made = file.remake(source, limits=limits)
        return replace(made, notes=(*of_lower_quality(made), *made.notes))
    if isinstance(to, RecipeText | Recipe | Path):
        to, recipe = None, to
    codec = codec_for(format, to)
    if recipe is not None:
        text = RecipeText.given(recipe)
    else:
        assert to is not None
        text = RecipeText.of(to)
        if text.mixture(codec) is None:
            require_blocks(to, codec)
    text = text if method is None else text.by(method)
    made = make_plan(source, text, selection=selection, limits=limits, codec=codec)
    made = replace(made, notes=(*of_lower_quality(made), *made.notes))
    if format is None and codec != DEFAULT:
        made = replace(made, notes=(f"written in {codec.title}, which alone has {to}", *made.notes))
    return made
