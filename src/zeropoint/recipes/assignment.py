"""Assignments: schemes for weight, input and output, and a method."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import RecipeError, SchemeError
from ..formats import get_format
from ..methods import NEAREST, Method, method_named
from ..schemes import Granularity, ScaleLevel, Scheme
from .quality import method_for, without_inputs

DYNAMIC, STATIC = "dynamic", "static"


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """How values that change with the data are quantized.

    Args:
        scheme: of one input or output.
        dynamic: whether its parameters are computed from each tensor at run time; static ones come from
            calibration and need blocks whose number does not depend on the batch. Of several levels of scales
            the tensor-wide one is static then, and finer ones follow each tensor (nvfp4).

    Raises:
        RecipeError: for a static scheme with a block for each token, group or tile and no scale over them.

    Example:
        >>> Activation.of("int8:token").dynamic
        True
    """

    scheme: Scheme
    dynamic: bool

    def __post_init__(self) -> None:
        if not self.dynamic and _follows_the_batch(self.scheme) and not self.local:
            raise RecipeError(
                f"static scheme {self.scheme} has blocks whose number depends on the batch; make it dynamic, "
                "or use one scale for the tensor or for each channel of the last axis"
            )

    @property
    def local(self) -> bool:
        """Whether the tensor scale is calibrated, and finer ones are dynamic."""
        *fine, coarse = self.scheme.scales or (None,)
        whole = coarse is not None and coarse.granularity == Granularity.tensor()
        return not self.dynamic and bool(fine) and whole and _follows_the_batch(self.scheme)

    @property
    def calibrated(self) -> Scheme:
        """The calibrated scheme: of a local one, its range as one block."""
        if not self.local:
            return self.scheme
        return Scheme(
            element=self.scheme.element,
            scales=(ScaleLevel(granularity=Granularity.tensor(), format=get_format("float32")),),
        )

    @staticmethod
    def of(text: str | Scheme, *, dynamic: bool | None = None) -> Activation:
        """Return the activation of a scheme, dynamic if it must be.

        Args:
            text: a scheme or its text form.
            dynamic: whether parameters are computed from each tensor; None for the usual.
        """
        scheme = Scheme.parse(text)
        return Activation(scheme=scheme, dynamic=_follows_the_batch(scheme) if dynamic is None else dynamic)

    @staticmethod
    def parse(text: str) -> Activation:
        """Return the activation of ``SCHEME``, ``SCHEME dynamic`` or ``SCHEME static``.

        Args:
            text: the text form.

        Raises:
            RecipeError: for another word after the scheme than ``dynamic`` or ``static``.

        Example:
            >>> str(Activation.parse("int8:tensor dynamic"))
            'int8:tensor dynamic'
        """
        spelled, _, timing = text.strip().partition(" ")
        timing = timing.strip()
        if timing not in ("", DYNAMIC, STATIC):
            raise RecipeError(f"{timing!r} after scheme {spelled} must be {DYNAMIC} or {STATIC}")
        return Activation.of(spelled, dynamic=None if not timing else timing == DYNAMIC)

    def __str__(self) -> str:
        return f"{self.scheme} {DYNAMIC if self.dynamic else STATIC}"


def _follows_the_batch(scheme: Scheme) -> bool:
    """Whether some level's blocks grow with the batch."""
    return any(level.granularity.rest == 1 for level in scheme.scales)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The schemes of one module; what has none stays as it is.

    Args:
        weight: scheme of the weight, or None.
        input: of the input, or None.
        output: of the output, or None.
        method: name of the one that quantizes the weight; None leaves it to the recipe, or else to
            ``nearest``.

    Raises:
        RecipeError: when nothing at all is assigned, for an unknown method, and for one without a weight.
    """

    weight: Scheme | None = None
    input: Activation | None = None
    output: Activation | None = None
    method: str | None = None

    def __post_init__(self) -> None:
        if self.method is not None:
            method_named(self.method)
            if self.weight is None:
                raise RecipeError(f"method {self.method} quantizes weights; give a weight scheme with it")
        if self.weight is None and self.input is None and self.output is None:
            raise RecipeError(
                "an assignment names no weight, input or output; to leave a module alone, keep it"
            )

    @staticmethod
    def of(
        *,
        weight: str | Scheme | None = None,
        input: str | None = None,  # noqa: A002 (what the field is called)
        output: str | None = None,
        method: str | None = None,
    ) -> Assignment:
        """Return the assignment that the text forms spell.

        Args:
            weight: a scheme or its text form.
            input: the text form of an activation.
            output: the text form of an activation.
            method: that quantizes the weight.

        Raises:
            RecipeError: for a malformed text form.

        Example:
            >>> print(Assignment.of(weight="int8:channel:narrow", input="int8:token"))
            weight int8:channel:narrow, input int8:token dynamic
        """
        try:
            return Assignment(
                weight=None if weight is None else Scheme.parse(weight),
                input=None if input is None else Activation.parse(input),
                output=None if output is None else Activation.parse(output),
                method=method,
            )
        except SchemeError as error:
            raise RecipeError(str(error)) from error

    @property
    def weight_method(self) -> Method:
        """The method that quantizes the weight."""
        return method_named(self.method or NEAREST)

    def or_method(self, method: str | None) -> Assignment:
        """Return the assignment with ``method`` where its weight names none.

        Args:
            method: used where none is set; a quality picks one for the weight's scheme.
        """
        if method is None or self.method is not None or self.weight is None:
            return self
        chosen = method_for(method, self.weight, quantized_inputs=self.input is not None)
        return replace(self, method=chosen)

    def without_inputs(self) -> Assignment:
        """Return the assignment of a layer without inputs to learn from.

        A method that needs data becomes the one that quality ``fast`` has.
        """
        if self.weight is None or not self.weight_method.needs:
            return self
        return replace(self, method=without_inputs(self.weight))

    @property
    def needs_calibration(self) -> bool:
        """Whether some parameters come from data."""
        if self.weight is not None and self.weight_method.needs:
            return True
        return not self.is_dynamic

    @property
    def is_dynamic(self) -> bool:
        """Whether its input and output need no scales from data."""
        return all(part is None or part.dynamic for part in (self.input, self.output))

    def __str__(self) -> str:
        parts = (
            ("weight", self.weight),
            ("method", self.method),
            ("input", self.input),
            ("output", self.output),
        )
        return ", ".join(f"{name} {part}" for name, part in parts if part is not None)
