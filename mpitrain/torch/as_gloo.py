"""Gloo's name for mpitrain's backend, in a script that cannot be edited: `mpitrain run --exchange mpitrain`."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

import mpitrain.torch  # noqa: F401 (registers the backend)


def adopt() -> None:
    """From now on, init_process_group and new_group take mpitrain's backend where they are asked for gloo, or for
    none. Other names, such as nccl, are unchanged. get_backend returns gloo, because some programs look for a name that
    they know (Ignite wraps a model only for those)."""
    for name in ("init_process_group", "new_group"):
        ours = _with_ours(getattr(distributed_c10d, name), has_default=name == "init_process_group")
        for module in (dist, distributed_c10d, device_mesh):
            if hasattr(module, name):
                setattr(module, name, ours)
    known = distributed_c10d.get_backend

    @functools.wraps(known)
    def get_backend(*arguments: Any, **named: Any) -> Any:
        return re.sub(r"\bmpitrain\b", "gloo", known(*arguments, **named))

    for module in (dist, distributed_c10d):
        setattr(module, known.__name__, get_backend)


def backend_of(asked: str | None, *, has_default: bool) -> str | None:
    """Return the name of the backend to use; None: that of the default group, which has one already."""
    if asked is None:
        return "mpitrain" if has_default else None
    return re.sub(r"\bgloo\b", "mpitrain", asked.lower())


def _with_ours(call: Callable[..., Any], *, has_default: bool) -> Callable[..., Any]:
    place = list(inspect.signature(call).parameters).index("backend")

    @functools.wraps(call)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        if len(arguments) > place:
            ours = backend_of(arguments[place], has_default=has_default)
            arguments = (*arguments[:place], ours, *arguments[place + 1 :])
        else:
            named["backend"] = backend_of(named.get("backend"), has_default=has_default)
        return call(*arguments, **named)

    return wrapper
