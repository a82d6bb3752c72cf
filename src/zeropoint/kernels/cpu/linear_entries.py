"""The kernels of linear layers as Python calls them; see :mod:`.entries`."""

from typing import Any

import numpy as np

from .linear.chunks import Weights, unpack_matrix, unpack_slots
from .linear.from_codes import Input, code_rows, float_rows, slot_of
from .linear.from_values import ONE, PackedValues, unpack_panels, value_panels
from .machine.descriptor import OK, unpack
from .machine.team import bundled, over_rows


@bundled
def linear_from_codes(args: Any, first: Any, last: Any) -> Any:
    """Compute slots of a layer's output from integer codes; see :func:`.linear.from_codes.code_rows`.

    An array of the dtype of codes, x, a descriptor, order, whether codes have a sign, the given scale and
    zero point, fields of :class:`.linear.chunks.Weights`, workspace, output, :class:`.linear.chunks.Slots`.
    """
    like, x, desc, order, signed, given, weight, work, out, cut = args
    source = Input(unpack(desc), order, np.uint8(signed), given[0], given[1])
    weights = Weights(weight[0], unpack_matrix(weight[1]), weight[2], weight[3])
    slots, state = unpack_slots(cut), OK
    for slot in range(first, last):
        own, rows, columns = slot_of(work, slots, slot)
        state = max(state, code_rows(like, (x, source, weights, own, out, rows, columns)))
    return state


@over_rows
def linear_from_floats(x: Any, weight: Any, work: Any, out: Any, cut: Any, first: Any, last: Any) -> None:
    """Compute slots of a layer's output from float32; see :func:`.linear.from_codes.float_rows`."""
    weights = Weights(weight[0], unpack_matrix(weight[1]), weight[2], weight[3])
    slots = unpack_slots(cut)
    for slot in range(first, last):
        own, rows, columns = slot_of(work, slots, slot)
        float_rows(x, weights, own, out, rows, columns)


@over_rows
def linear_from_values(
    x: Any, stored: Any, bias: Any, work: Any, out: Any, cut: Any, first: Any, last: Any
) -> None:
    """Compute slots of a layer's output from values of its weight: :func:`.linear.from_values.value_panels`.

    x, fields of :class:`.linear.from_values.PackedValues`, bias, workspace, output,
    :class:`.linear.from_values.Panels`.
    """
    weight, shape = PackedValues(unpack(stored[0]), *stored[1:]), unpack_panels(cut)
    panels, slots = shape.panels, shape.slots
    size = np.uint64(len(work)) // slots
    for slot in range(np.uint64(first), np.uint64(last)):
        own = work[slot * size : (slot + ONE) * size]
        ends = panels * slot // slots, panels * (slot + ONE) // slots
        value_panels(x, weight, shape, bias, own, out, *ends)
