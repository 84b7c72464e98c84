"""The products of PowerSGD on device arrays, with the bits of mpitrain/compression/products.py; in low_rank.cu."""

from __future__ import annotations

from typing import Any

from mpitrain.arrays import Array
from mpitrain.compression.products import LANES, ROWS
from mpitrain.cuda.kernels.launch import blocks_for, check, launch

FILE = "low_rank.cu"
_FLOAT = ["float32"]
_TILE = 4  # columns of P and Q at a time; low_rank.cu has the same number


def low_rank_times(matrix: Array, left_out: Array, qt: Array, pt: Array, *, stream: Any = None) -> None:
    """matrix += left_out, then pt = matrix Q, by columns.

    Args:
        matrix: float32[m, n], contiguous on the device; overwritten.
        left_out: float32[m, n].
        qt: float32[r, n], the columns of Q.
        pt: float32[r, m]; overwritten.
        stream: a CuPy stream in place of the current one.

    Raises:
        ValueError: an array is different.
        KernelError: the kernels do not compile.
    """
    rows, columns, rank = _shapes(matrix, pt, qt)
    check("left_out", left_out, _FLOAT, matrix.size, ndim=2)
    _launch("times", 32 * rows, [matrix, left_out, qt, pt, rows, columns, rank], matrix, stream)


def low_rank_project(matrix: Array, pt: Array, qt: Array, left_out: Array, *, stream: Any = None) -> None:
    """qt = matrix^T P, by columns, then left_out = matrix - P Q^T.

    Arguments and Raises as for low_rank_times, but `qt` and `left_out` are overwritten, and `matrix` and `pt` are not.
    Two launches for every four columns of Q, and one more. `left_out` holds their sums over parts of the rows.
    """
    rows, columns, rank = _shapes(matrix, pt, qt)
    check("left_out", left_out, _FLOAT, matrix.size, ndim=2)
    blocks = -(-rows // ROWS)
    for first in range(0, rank, _TILE):
        some = qt[first : first + _TILE]
        # As many sums as are in `left_out` at most: rank <= rows, and rows / 32, rounded up, times 4 is not above rows
        # from 4 rows on.
        arguments = [matrix, pt, left_out, rows, columns, rank, first]
        _launch("parts", blocks * -(-columns // 4), arguments, matrix, stream)
        _launch("sums", -(-some.size // 4), [left_out, some, blocks, some.size], matrix, stream)
    _launch("product", 32 * rows, [pt, qt, matrix, left_out, rows, columns, rank], matrix, stream)


def low_rank_product(pt: Array, qt: Array, out: Array, *, stream: Any = None) -> None:
    """out = P Q^T. Arguments and Raises as for low_rank_times; `out`, float32[m, n], is overwritten."""
    rows, columns, rank = _shapes(out, pt, qt)
    _launch("product", 32 * rows, [pt, qt, None, out, rows, columns, rank], out, stream)


def low_rank_orthogonalise(rows: Array, work: Array, *, stream: Any = None) -> None:
    """Make the rows orthogonal and of length 1, the first one first; a row that depends on others becomes 0.

    Args:
        rows: float32[r, m], finite and contiguous on the device; overwritten.
        work: float64[r m or more]; overwritten.
        stream: a CuPy stream in place of the current one.

    Raises as low_rank_times.
    """
    check("rows", rows, _FLOAT, ndim=2)
    check("work", work, ["float64"])
    if work.size < rows.size:
        raise ValueError(f"work has {work.size} elements; {rows.shape} rows need {rows.size}")
    if rows.size:
        rank, count = rows.shape
        launch(FILE, "low_rank_orthogonalise", 1, [rows, work, rank, count], rows, stream, threads=LANES)


def _shapes(matrix: Array, pt: Array, qt: Array) -> tuple[int, int, int]:
    """Return rows, columns and rank; the rank is at most the rows."""
    check("matrix", matrix, _FLOAT, ndim=2)
    rows, columns = matrix.shape
    rank = min(len(qt), rows)
    check("pt", pt, _FLOAT, rank * rows, ndim=2)
    check("qt", qt, _FLOAT, rank * columns, ndim=2)
    return rows, columns, rank


def _launch(name: str, threads: int, arguments: list[Any], like: Array, stream: Any) -> None:
    if threads:
        launch(FILE, f"low_rank_{name}", blocks_for(threads, like), arguments, like, stream)
