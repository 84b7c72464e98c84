"""Keep torch.compile from compiling this backend, and mpitrain's calls inside a compiled function.

torch calls the backend from C++ while a compiled function runs uncompiled parts, such as the first steps of
`torch.compile(DistributedDataParallel(model))`. Dynamo would try to compile these calls.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

# torch.compiler.disable would load the whole compiler, which takes more than a second even if nothing is compiled.
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

Kind = TypeVar("Kind")

_AS_IT_IS = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def uncompiled(kind: Kind) -> Kind:
    """Decorate a class or function: its methods, and all that they call, run uncompiled."""
    for member in (kind,) if isinstance(kind, FunctionType) else vars(kind).values():
        if isinstance(member, FunctionType):
            if not hasattr(member, "__wrapped__"):  # a wrapper's code may be shared, such as contextlib's
                set_code_exec_strategy(member.__code__, _AS_IT_IS)
            member.__dict__["_torchdynamo_disable"] = True  # for calls from a compiled function
    return kind
