"""Kernels over the threads of torch's OpenMP, from compiled code.

A thread that Python calls has to wait for the interpreter's lock, and is a new one to Python each time: 60 to
80 microseconds a call on two threads. Here the lock is given back once, before the team begins.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from .cache import GENERATED
from .compilers import x86_has
from .intrinsics import I8, I32, I64, device, kernel, primitive, tools

_BaseTuple: Any = types.BaseTuple
_FLUSH = 0x8040
"""Bits of MXCSR: subnormal results, and subnormal inputs, are zero."""


def _take(builder: Any, ticket: Any) -> Any:
    return builder.atomic_rmw("add", ticket, I64(1), "monotonic")


def _without_flushing(builder: Any, run: Any) -> None:
    """Write what ``run`` writes, to be run where subnormal numbers count."""
    if not x86_has("sse"):
        run()
        return
    control = tools.alloca_once(builder, I32)
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer()])
    load, store = (
        tools.get_or_insert_function(builder.module, kind, f"llvm.x86.sse.{name}mxcsr")
        for name in ("ld", "st")
    )
    place = builder.bitcast(control, I8.as_pointer())
    builder.call(store, [place])
    before = builder.load(control)
    builder.store(builder.and_(before, I32(~_FLUSH)), control)
    builder.call(load, [place])
    run()
    builder.store(before, control)
    builder.call(load, [place])


@primitive
def run_parts(typingctx: Any, function: Any, args: Any) -> Any:
    """Call ``function(*others, begin, end)`` for runs of rows: largest result, int64.

    args: a tuple, the others and then first and last row, the number of runs, and the address of
    ``GOMP_parallel``, or 0 for the calling thread alone. function: a device function; its result is an
    integer without sign, or None. Threads take runs as long as there are any, so that fewer threads than runs
    are as good.
    """
    return _parts(typingctx, function, args, bundled=False)


@primitive
def run_bundled(typingctx: Any, function: Any, args: Any) -> Any:
    """Call ``function(others, begin, end)``, the others in one tuple, as :func:`run_parts` does."""
    return _parts(typingctx, function, args, bundled=True)


def over_rows(rows: Any, run: Any = run_parts) -> Any:
    """Build the kernel of a function, for :func:`run_parts` or ``run``.

    Its numbers come as packed records, see :mod:`.named_records`. Rows are whatever threads share: blocks,
    panels, slots.
    """
    function = rows if hasattr(rows, "py_func") else device(rows)

    def call(*args: Any) -> Any:
        return run(function, args)

    # All have one body: each is compiled under its own name.
    call.__module__, call.__doc__, call.__name__ = rows.__module__, rows.__doc__, rows.__name__
    call.__qualname__ = f"{rows.__qualname__}.kernel"
    setattr(call, GENERATED, call.__qualname__)
    return kernel(call)


def bundled(rows: Any) -> Any:
    """Build the kernel of a function, for :func:`run_bundled`."""
    return over_rows(rows, run_bundled)


def _parts(typingctx: Any, function: Any, args: Any, *, bundled: bool) -> Any:
    """Signature and code of a run's call; bundled: arguments are one tuple."""
    others = args.types[: len(args.types) - 4]
    count, bundle = len(others), _BaseTuple.from_types(others)
    own = (*((bundle,) if bundled else others), types.uint64, types.uint64)
    sig = function.get_call_type(typingctx, own, {})
    compiled = function.dispatcher.get_compile_result(sig)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        context.add_linking_libs([compiled.library])
        numbers = [I64, I64, I64, I64, I64]  # ticket, largest result, first, last, parts
        given = [builder.extract_value(values[1], n) for n in range(len(args.types))]
        items, rows, team = given[:count], given[count:-1], given[-1]
        if bundled:
            items = [context.make_tuple(builder, bundle, items)]
        shared = ir.LiteralStructType([*numbers, *(item.type for item in items)])
        box = tools.alloca_once(builder, shared)
        for n, value in enumerate([I64(0), I64(0), *rows, *items]):
            builder.store(value, tools.gep_inbounds(builder, box, 0, n))
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer()])
        name = builder.module.get_unique_name("member_of_team")
        member = ir.Function(builder.module, kind, name)
        member.linkage = "internal"
        _write_member(context, member, shared, (sig, compiled))
        data = builder.bitcast(box, I8.as_pointer())
        alone = builder.icmp_unsigned("==", team, I64(0))
        with builder.if_else(alone) as (single, several):
            with single:
                builder.call(member, [data])
            with several:
                begin = ir.FunctionType(ir.VoidType(), [kind.as_pointer(), I8.as_pointer(), I32, I32])
                threads = builder.trunc(rows[2], I32)
                builder.call(builder.inttoptr(team, begin.as_pointer()), [member, data, threads, I32(0)])
        return builder.load(tools.gep_inbounds(builder, box, 0, 1))

    return types.int64(function, args), codegen


def _write_member(context: Any, member: Any, shared: Any, what: Any) -> None:
    """Write a thread's loop: take runs and call the function until done."""
    sig, compiled = what
    builder = ir.IRBuilder(member.append_basic_block("entry"))
    box = builder.bitcast(member.args[0], shared.as_pointer())
    ticket, largest, *places = (tools.gep_inbounds(builder, box, 0, n) for n in range(len(shared.elements)))
    first, last, parts, *args = map(builder.load, places)
    rows = builder.sub(last, first)

    def end_of(part: Any) -> Any:
        return builder.add(first, builder.sdiv(builder.mul(rows, part), parts))

    def run() -> None:
        number = tools.alloca_once(builder, I64)
        builder.store(_take(builder, ticket), number)
        begin, after = builder.append_basic_block("run"), builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed("<", builder.load(number), parts), begin, after)
        builder.position_at_end(begin)
        part = builder.load(number)
        ends = end_of(part), end_of(builder.add(part, I64(1)))
        _, result = context.call_internal_no_propagate(builder, compiled.fndesc, sig, [*args, *ends])
        if sig.return_type != types.none:
            wide = context.cast(builder, result, sig.return_type, types.int64)
            builder.atomic_rmw("umax", largest, wide, "monotonic")
        builder.store(_take(builder, ticket), number)
        builder.cbranch(builder.icmp_signed("<", builder.load(number), parts), begin, after)
        builder.position_at_end(after)

    _without_flushing(builder, run)
    builder.ret_void()
