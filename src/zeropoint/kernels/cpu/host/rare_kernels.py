"""Kernels that few schemes ask for, imported on first use (PEP 562).

They and what they compile are most of what the CPU backend would import.
"""

from typing import TYPE_CHECKING

from ....deferred_names import imported

if TYPE_CHECKING:
    from ....ops.structs import lines_refusal as lines_refusal
    from .block_searches import RoundedBlocksKernel as RoundedBlocksKernel
    from .block_searches import SearchKernel as SearchKernel
    from .block_searches import search_refusal as search_refusal
    from .chained import ChainedKernel as ChainedKernel
    from .layout_calls import JoinKernel as JoinKernel
    from .layout_calls import LinesKernel as LinesKernel
    from .layout_calls import SplitKernel as SplitKernel
    from .linear import LinearKernel as LinearKernel
    from .linear import ValueKernel as ValueKernel
    from .linear import codes_refusal as codes_refusal
    from .linear import values_refusal as values_refusal
    from .lookups import DigitsKernel as DigitsKernel
    from .lookups import LookupKernel as LookupKernel
    from .lookups import TableDynamicKernel as TableDynamicKernel
    from .lookups import TableEncodeKernel as TableEncodeKernel
    from .parameter_searches import SearchParamsKernel as SearchParamsKernel
    from .parameter_searches import TableSearchKernel as TableSearchKernel
    from .parameter_searches import decoded as decoded
    from .parameter_searches import search_params as search_params
    from .parameter_searches import table_refusal as table_refusal
    from .window_ends import window_search as window_search

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        return imported(__name__, name)
