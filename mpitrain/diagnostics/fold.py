"""Names of nodes as people read them: node[1-3,7]."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def fold(names: Iterable[str]) -> str:
    """Names with their numbers drawn together, in order of number: node1, node2, node3, gpu -> "gpu,node[1-3]"."""
    numbered: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys(names):
        match = re.fullmatch(r"(.*?)(\d+)(\D*)", name)
        key = (match[1], match[3]) if match else (name, "")
        numbered.setdefault(key, []).append(match[2] if match else "")
    parts = []
    for (before, behind), numbers in sorted(numbered.items()):
        ranges = _ranges(sorted(numbers, key=lambda text: (int(text or 0), len(text))))
        body = ",".join(ranges)
        parts.append(f"{before}[{body}]{behind}" if "," in body or "-" in body else f"{before}{body}{behind}")
    return ",".join(parts)


def fold_pairs(pairs: Sequence[tuple[str, str]], names: Sequence[str]) -> str:
    """Directed pairs, folded if a node has the same trouble with all others: "node3 -> all"."""
    left = dict.fromkeys(pairs)
    parts = []
    for name in names:
        others = [other for other in names if other != name]
        if len(others) < 2:
            break
        for group, text in (
            ([(name, other) for other in others], f"{name} -> every other"),
            ([(other, name) for other in others], f"every other -> {name}"),
        ):
            if all(pair in left for pair in group):
                parts.append(text)
                for pair in group:
                    del left[pair]
    both = [pair for pair in left if pair[::-1] in left and pair[0] < pair[1]]
    parts += [f"{a} <-> {b}" for a, b in both]
    parts += [f"{a} -> {b}" for a, b in left if (b, a) not in left]
    return ", ".join(parts)


def _ranges(numbers: Sequence[str]) -> list[str]:
    ranges: list[list[str]] = []
    for number in numbers:
        last = ranges[-1][-1] if ranges else ""
        # 09 and 10 go on from each other, 9 and 10 too; 9 and 010 are names of two kinds.
        goes_on = last and number and int(number) == int(last) + 1
        if goes_on and (len(number) == len(last) or (not number.startswith("0") and not last.startswith("0"))):
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return [part[0] if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in ranges]
