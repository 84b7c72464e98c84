"""Tags are recognised however the pipe cuts them. Every example is real output of the mpiexec that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.launch.dialects import JobSpec, command_for
from mpitrain.launch.libraries import Mpiexec, Vendor
from mpitrain.launch.output import MPIEXEC, Tag, TagDecoder
from mpitrain.launch.placement import Place, Placement


def tag(vendor: Vendor) -> Tag:
    mpiexec, placement = Mpiexec(Path("mpiexec"), vendor, "5.0"), Placement((Place("a", 0, 2),))
    job = JobSpec(mpiexec=mpiexec, program=["python"], placement=placement, num_cores=2, as_root=False)
    return command_for(job, {}).tag


def decoded(vendor: Vendor, *reads: bytes) -> dict[int, bytes]:
    decoder = TagDecoder(tag(vendor))
    by_rank: dict[int, bytes] = {}
    for pieces in [*(decoder.feed(data) for data in reads), decoder.close()]:
        for rank, text in pieces:
            assert text
            by_rank[rank] = by_rank.get(rank, b"") + text
    return by_rank


HYDRA = b"<mpitrain-rank-1>hello<mpitrain-rank-1> <mpitrain-rank-0>hel<mpitrain-rank-1>1\n<mpitrain-rank-0>lo 0\n"
HYDRA += b"\n= BAD TERMINATION\n"
OPEN_MPI = b"[1,0]<stdout>: a [1/2]\n[1,1]<stdout>: \nprterun noticed\n[1,0]<stdout>: end[1,1]<stdout>: end"


def test_hydra_tags_pieces_of_lines() -> None:
    assert decoded("mpich", HYDRA) == {0: b"hello 0\n", 1: b"hello 1\n", MPIEXEC: b"\n= BAD TERMINATION\n"}


def test_open_mpi_tags_lines() -> None:
    assert decoded("openmpi", OPEN_MPI) == {0: b"a [1/2]\nend", 1: b"\nend", MPIEXEC: b"prterun noticed\n"}


@pytest.mark.parametrize(("vendor", "data"), [("mpich", HYDRA), ("openmpi", OPEN_MPI)])
def test_a_read_may_end_anywhere(vendor: Vendor, data: bytes) -> None:
    whole = decoded(vendor, data)
    assert decoded(vendor, *(data[i : i + 1] for i in range(len(data)))) == whole
    for cut in range(len(data)):
        assert decoded(vendor, data[:cut], data[cut:]) == whole


def test_what_only_looks_like_the_beginning_of_a_tag_is_not_lost() -> None:
    assert decoded("openmpi", b"[1,0]<stdout>: x\n[1") == {0: b"x\n", MPIEXEC: b"[1"}
