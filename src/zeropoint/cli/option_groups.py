"""Help in groups: options by subject, commands by purpose."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

OPTION_GROUPS: dict[str, tuple[str, ...]] = {
    "What to write": (
        "to", "recipe", "plan", "format", "dtype", "include", "ignore", "strict", "fit", "kv-scales",
        "force", "allow-requantize", "dequantize-first", "dequantize-kept", "block",
    ),
    "How weights are quantized": (
        "method", "quality", "calibration", "samples", "length", "input-range", "imatrix", "statistics",
        "gram", "steps", "learning-rate", "seed",
    ),
    "A scheme for each layer": (
        "budget", "candidates", "state", "importance", "text", "refine",
    ),
    "What exists already": ("if-exists", "overwrite", "restart", "break-lock"),
    "The machine": ("workers", "max-memory", "device", "executor", "address", "spool"),
    "What is shown": ("all", "sort", "json", "report", "plot", "out", "help"),
}  # fmt: skip
"""Title to the options of a group, without their dashes; an option of no group stands under Options."""
COMMAND_GROUPS: dict[str, tuple[str, ...]] = {
    "Quantize": ("plan", "quantize", "search", "statistics"),
    "Look": ("report", "verify", "inspect", "compare", "eval", "formats"),
    "Change": ("convert", "dequantize", "rotate", "distill", "kv-scales"),
    "This machine": ("demo", "doctor", "bench", "warmup"),
}
"""Title to the commands of a group."""
_GROUP_OF = {option: title for title, options in OPTION_GROUPS.items() for option in options}
_FEW = 6
"""Options of a command that need no groups."""


class GroupedOptions(TyperCommand):
    """A command whose help groups its options, if they are many."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options of each group; click calls it."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        sections |= {title: [] for title in OPTION_GROUPS}
        parameters = self.get_params(ctx)
        many = sum(parameter.param_type_name == "option" for parameter in parameters) > _FEW
        for parameter in parameters:
            row = parameter.get_help_record(ctx)
            if row is None:
                continue
            title = "Arguments"
            if parameter.param_type_name == "option":
                long = max(parameter.opts, key=len).removeprefix("--")
                title = _GROUP_OF.get(long, "Options") if many else "Options"
            name, help_text = row
            sections[title].append((name.partition(" <")[0] if title == "Arguments" else name, help_text))
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class GroupedCommands(TyperGroup):
    """The commands of ``zeropoint``, whose help has them in groups."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 (as click calls it)
        """Write the commands of each group; click calls it."""
        width = max(map(len, self.commands))
        for title, names in COMMAND_GROUPS.items():
            rows = [
                (f"{name:{width}}", self.commands[name].get_short_help_str(formatter.width - width - 6))
                for name in names
            ]
            with formatter.section(title):
                formatter.write_dl(rows)
