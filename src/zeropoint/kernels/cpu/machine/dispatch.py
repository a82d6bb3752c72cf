"""Compile-time dispatch on the dtype of the first argument."""

import inspect
from typing import Any

from .intrinsics import primitive


def by_dtype(**functions: Any) -> Any:
    """Build a function that calls the one for its first argument's dtype.

    Other dtypes never come. uint16 are bits of bfloat16, int16 bits of float16. Only the function that is
    called is compiled.
    """
    (first, *_) = functions.values()
    parameters = inspect.signature(first.py_func).parameters.values()

    def pick(typingctx: Any, *args: Any) -> Any:
        dtype = getattr(args[0], "dtype", args[0])
        function = typingctx.resolve_value_type(functions[str(dtype)])
        sig = function.get_call_type(typingctx, args, {})
        compiled = function.dispatcher.get_compile_result(sig)

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            context.add_linking_libs([compiled.library])
            _, result = context.call_internal_no_propagate(builder, compiled.fndesc, sig, values)
            return result

        return sig.return_type(*sig.args), codegen

    context = inspect.Parameter("typingctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    pick.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
    pick.__doc__, pick.__name__ = first.py_func.__doc__, first.py_func.__name__
    return primitive(pick)
