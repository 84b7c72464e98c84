"""The step and the loss that a script prints, in any common form: for scripts that publish none. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = r"(?P<loss>[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|[-+]?inf)(?![\w.])"
# `train_loss=0.3`, `lm loss: 6.5E+00 |`, `'loss': '9.1'`; what goes before it may say that it is another loss.
_LOSS = re.compile(rf"(?P<kind>[a-z]+)?[ _/-]?\bloss\b['\"]?\s*[:=]?\s*['\"(]*{_NUMBER}", re.IGNORECASE)
_LOSS_NAME = re.compile(r"(?<=[a-z])_(?=loss)", re.IGNORECASE)
_OTHERS = ("val", "valid", "validation", "eval", "test", "dev", "aux")
_STEP = re.compile(
    r"(?<![a-z_/])(?:global[ _]?step|num_updates|steps?|iter(?:ation)?s?|batch|update)['\"]?\s*[:=#]?\s*['\"(\[]*"
    r"(?P<step>\d+)(?![\d.]\d)",
    re.IGNORECASE,
)
_STEP_FIRST = re.compile(r"\W*(?:global[ _]?step|steps?|iter(?:ation)?)\b", re.IGNORECASE)
# Of tqdm, Keras, PyTorch's imagenet example, and timm.
_BARS = re.compile(
    r"^.*?(?P<tqdm>\d+)/\d+ \[.*$|^\s*(?P<keras>\d+)/\d+ [^\w\s]|^Epoch:? ?\[\d+\]\s*\[\s*(?P<imagenet>\d+)/\d+\]"
    r"|^Train: \d+ \[\s*(?P<timm>\d+)/\d+",
    re.IGNORECASE,
)
_BARE_BAR = re.compile(r"\s*\d+%\|")


def progress_in(line: str) -> tuple[int | None, float | None]:
    """Return the step and the loss in a line; None where it has none.

    A line without a loss has a step if it begins with the word, or with a bar that has no title: many others count
    something else.
    """
    loss = next(
        (float(found["loss"]) for found in _LOSS.finditer(_LOSS_NAME.sub(" ", line)) if not _is_other(found["kind"])),
        None,
    )
    if loss is None and not (_STEP_FIRST.match(line) or _BARE_BAR.match(line)):
        return None, None
    if found := _STEP.search(line):
        return int(found["step"]), loss
    bar = _BARS.search(line)
    return (int(next(filter(None, bar.groups()))) if bar else None), loss


def _is_other(kind: str | None) -> bool:
    return (kind or "").casefold() in _OTHERS


def newest_progress(lines: Iterable[str]) -> tuple[int | None, float | None]:
    """Return the newest step and the newest loss in these lines, of which the newest comes first."""
    step: int | None = None
    loss: float | None = None
    for line in lines:
        one_step, one_loss = progress_in(line)
        step = one_step if step is None else step
        loss = one_loss if loss is None else loss
        if step is not None and loss is not None:
            break
    return step, loss
