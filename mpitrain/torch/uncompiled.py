"""torch.compile leaves this backend alone, and the calls of mpitrain that a compiled function makes.

torch calls it from C++ in the middle of what a compiled function runs as it is, such as the first steps of
`torch.compile(DistributedDataParallel(model))`. Dynamo would take these calls for functions to be compiled.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

# Not torch.compiler.disable, which loads the whole compiler: more than a second, also where nothing is compiled.
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

Kind = TypeVar("Kind")

_AS_IT_IS = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def uncompiled(kind: Kind) -> Kind:
    """A decorator of a class or a function: its methods, and all that they call, run as they are."""
    for member in (kind,) if isinstance(kind, FunctionType) else vars(kind).values():
        if isinstance(member, FunctionType):
            if not hasattr(member, "__wrapped__"):  # whose code may be one that others share, such as contextlib's
                set_code_exec_strategy(member.__code__, _AS_IT_IS)
            member.__dict__["_torchdynamo_disable"] = True  # where a compiled function calls it
    return kind
