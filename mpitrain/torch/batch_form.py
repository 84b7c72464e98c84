"""Which parts of a batch have one entry for each sample, if a whole batch is to be divided.

A part is divided because of its kind, or because the data declare it, but never because its length matches. The rules
for a batch that is a tensor, or a dict, dataclass, named tuple, tuple or list of parts:

- Tensors and arrays with a dimension have one row for each sample.
- Texts, numbers, None, tensors without a dimension and a torch.Size are whole on each rank.
- A list or tuple of texts or numbers may be either. It counts as whole. But if it has as many entries as the first
  batch with it has samples, the case is ambiguous, which is an error.
- So it is with a list of equal dicts, lists or tuples, of ones without tensors, or of tensors inside of another
  container: it may be several inputs, or one entry for each sample. It is the former, and each tensor in it has rows;
  unless it has as many entries as the batch has samples, or no other part says how many these are.

The output of PyTorch's own default_collate is known: there, a list of texts has one text for each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from mpitrain.errors import ConfigError, DataError
from mpitrain.torch.batches import checksum, children_of, has_rows, leaves, rebuilt

SAMPLES, WHOLE = "samples", "whole"

_SCALARS = (str, bytes, bool, int, float, complex, numpy.generic, type(None))
_MOST_NAMED = 8
_KINDS = (*_SCALARS, torch.Size, torch.dtype, torch.device)


class BatchForm:
    """The form of the batches of some data: that of the first batch, for all later ones."""

    def __init__(self, declared: Any = None, *, is_default: bool = False) -> None:
        """`declared` is the form as for `prepare`. With `is_default`, default_collate has made the batches.

        Raises:
            ConfigError: `declared` is not a form.
        """
        for leaf in leaves(declared):
            if leaf is not None and not (isinstance(leaf, str) and leaf in (SAMPLES, WHOLE)):
                raise ConfigError(
                    f"form={declared!r} has {leaf!r}; a form has {SAMPLES!r} for a part with one entry for "
                    f"each sample, {WHOLE!r} for any other part, and None for a part to be detected, in dicts, "
                    "lists and tuples"
                )
        self._declared, self._is_default = declared, is_default
        self._known: set[str] = set()  # paths of lists whose entries are not samples

    def described(self, batch: Any) -> tuple[int, str]:
        """Return a batch's number of samples, and a text with this number and a checksum of the first and last sample.

        Raises:
            DataError: no part has one entry for each sample, their numbers differ, a part cannot be divided, or a list
                is ambiguous.
        """
        columns: dict[str, Any] = {}
        lists: dict[str, Any] = {}  # ambiguous lists
        self._read(batch, self._declared, "", columns, lists)
        lengths = {path or "the batch": len(column) for path, column in columns.items()}
        if len(set(lengths.values())) != 1:
            text = ", ".join(f"{path} {length}" for path, length in list(lengths.items())[:_MOST_NAMED])
            text += ", ..." if len(lengths) > _MOST_NAMED else ""
            raise DataError(
                "tensors and arrays of a batch must have the same number of samples along their first dimension; found "
                f"{text or f'none in a {type(batch).__name__}'}. {_remedy(next(iter(lengths), ''))}"
            )
        total = next(iter(lengths.values()))
        is_counted = any(not path.startswith(tuple(lists)) for path in columns)
        for path, entries in lists.items():
            if len(entries) == total or not is_counted:
                kinds = sorted({type(entry).__name__ for entry in entries})
                raise DataError(
                    f"{path or 'the batch'} is a {type(entries).__name__} of {len(entries)} ({', '.join(kinds)}) in a "
                    f"batch of {total} samples: it may have one entry for each sample, which are divided among ranks, "
                    f"or be the same for all. {_remedy(path)}"
                )
        self._known.update(lists)
        return total, f"{total} samples, checksum {checksum(list(columns.values())[:1]):08x}"

    def divided(self, batch: Any, part: slice) -> Any:
        """Return these samples of a batch that was `described`. Parts that are whole are the same objects."""
        return self._mapped(batch, self._declared, "", lambda path, column: column[part])

    def _read(self, value: Any, form: Any, path: str, columns: dict[str, Any], lists: dict[str, Any]) -> None:
        def add(path: str, column: Any) -> Any:
            try:
                is_column = has_rows(column) or (not isinstance(column, str | bytes) and len(column[:0]) == 0)
            except Exception:
                is_column = False
            if not is_column:
                raise DataError(
                    f"form= has {SAMPLES!r} for {path or 'the batch'}, a {type(column).__name__} without entries that "
                    "can be cut out"
                )
            columns[path] = column
            return column

        self._mapped(value, form, path, add, lists)

    def _mapped(
        self, value: Any, form: Any, path: str, column: Callable[[str, Any], Any], lists: dict[str, Any] | None = None
    ) -> Any:
        """Return the same structure with each column replaced by `column`. Note ambiguous lists."""
        children = children_of(value)
        is_row = isinstance(value, list | tuple) and not hasattr(value, "_fields")
        if form == WHOLE:
            return value
        if form == SAMPLES and (children is None or is_row):
            return column(path, value)
        if children is None or (not children and form is None):
            if has_rows(value):
                return column(path, value)
            if isinstance(value, _KINDS) or children is not None or _has_no_dimension(value):
                return value
            raise DataError(
                f"{path or 'a batch'} is a {_kind(value)}, which cannot be divided among ranks; allowed are tensors, "
                f"arrays, texts and numbers in dicts, dataclasses, lists and tuples. {_remedy(path)}"
            )
        if form is None and is_row:
            if all(isinstance(entry, _SCALARS) for entry in value):
                if self._is_default and isinstance(value[0], str | bytes):
                    return column(path, value)
                self._note(path, value, lists)
                return value
            if not self._is_default and _may_be_samples(value, is_inner=bool(path)):
                self._note(path, value, lists)
        forms = _forms_of(form, children, path)
        try:
            return rebuilt(
                value,
                {
                    key: self._mapped(child, forms.get(key), f"{path}[{key!r}]", column, lists)
                    for key, child in children.items()
                },
            )
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"{path or 'a batch'} is a {type(value).__name__}, which cannot be made again with a part of its "
                f"samples ({type(error).__name__}: {error}). {_remedy(path)}"
            ) from None

    def _note(self, path: str, value: Any, lists: dict[str, Any] | None) -> None:
        if lists is not None and path not in self._known:
            lists[path] = value


def _may_be_samples(entries: Any, *, is_inner: bool) -> bool:
    """Whether the entries of a list are all of one kind, as samples are. The batch itself may be a list of tensors."""
    if len(entries) < 2:
        return False
    if all(isinstance(entry, torch.Tensor | numpy.ndarray) for entry in entries):
        return is_inner
    are_containers = all(isinstance(entry, list | tuple | Mapping) for entry in entries)
    if is_inner and are_containers and not any(has_rows(leaf) for entry in entries for leaf in leaves(entry)):
        return True  # such as the captions of each picture, or its torch.Size
    keys = [children_of(entry) for entry in entries]
    return all(each is not None and keys[0] is not None and each.keys() == keys[0].keys() for each in keys)


def _forms_of(form: Any, children: Mapping[Any, Any], path: str) -> Mapping[Any, Any]:
    """Return the forms of the entries of a container by key."""
    if form is None or form == SAMPLES:
        return dict.fromkeys(children, form)
    if isinstance(form, Mapping):
        return form
    if len(form) != len(children):
        raise DataError(f"form= has {len(form)} entries for {path or 'the batch'}, which has {len(children)}")
    return dict(zip(children, form, strict=True))


def _has_no_dimension(value: Any) -> bool:
    return isinstance(value, torch.Tensor | numpy.ndarray) and value.ndim == 0


def _kind(value: Any) -> str:
    name = type(value).__name__
    if isinstance(value, torch.Tensor) and (value.is_nested or value.layout != torch.strided):
        return f"{name} ({'nested' if value.is_nested else value.layout})"
    return name


def _remedy(path: str) -> str:
    """Describe how the data can declare its form. `path` is the path of the part, such as ['names']."""
    key = path[1:].partition("]")[0] if path.startswith("[") else ""
    form = f"{{{key}: {SAMPLES!r}}}" if key.startswith("'") else f"({SAMPLES!r}, {WHOLE!r})"
    return (
        f"Say which parts have one entry for each sample: prepare(..., form={form}) with {SAMPLES!r} or {WHOLE!r} for "
        "each part, also for shard(), or an attribute batch_form of the data"
    )
