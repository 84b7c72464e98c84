"""The vendor of an MPI library and of an mpiexec, recognised from texts as they really were."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from mpitrain.errors import LaunchError
from mpitrain.launch.libraries import (
    Vendor,
    can_launch,
    describe_mpiexec,
    find_library,
    vendor_of_library,
    vendor_of_mpiexec_text,
)


@pytest.mark.parametrize(
    ("text", "vendor"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25\n", "mpich"),
        ("Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11\0", "openmpi"),
        ("Intel(R) MPI Library 2021.18.1 for Linux* OS\n", "impi"),
        ("MVAPICH2 Version      :\t2.3.7\n", "other"),
        ("MPI VERSION    : CRAY MPICH version 8.1.25.17", "other"),
    ],
)
def test_vendor_of_library(text: str, vendor: Vendor) -> None:
    assert vendor_of_library(text) == vendor


@pytest.mark.parametrize(
    ("text", "vendor", "version"),
    [
        ("HYDRA build details:\n    Version:                                 5.0.2\n", "mpich", "5.0.2"),
        ("mpiexec (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/\n", "openmpi", "5.0.11"),
        ("mpiexec (OpenRTE) 4.1.4\n", "openmpi", "4.1.4"),
        ("prterun (PRRTE) 3.0.7\n", "openmpi", "3.0.7"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626\n", "impi", "2021.18.1"),
        ("slurm 22.05.8\n", "other", ""),
    ],
)
def test_mpiexec_describes_itself(tmp_path: Path, text: str, vendor: Vendor, version: str) -> None:
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n")
    mpiexec.chmod(0o755)
    found = describe_mpiexec(mpiexec)
    assert (found.vendor, found.version) == (vendor, version)
    assert vendor_of_mpiexec_text(text) == vendor


def test_mpiexec_that_hangs_or_is_not_there(tmp_path: Path) -> None:
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text("#!/bin/sh\nexec sleep 60\n")
    mpiexec.chmod(0o755)
    with pytest.raises(LaunchError, match=r"did not answer within 0\.1 s"):
        describe_mpiexec(mpiexec, timeout_seconds=0.1)
    with pytest.raises(LaunchError, match="No such file"):
        describe_mpiexec(tmp_path / "none")


def test_find_library_says_why_there_is_none(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'RuntimeError: cannot load MPI library' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(LaunchError, match="cannot load MPI library"):
        find_library(python)


def test_a_module_in_the_working_folder_is_not_taken_for_python_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')\n")
    monkeypatch.chdir(tmp_path)
    assert find_library().version


def test_find_library_of_this_python() -> None:
    library = find_library(sys.executable)
    assert library.vendor == "mpich"
    assert re.fullmatch(r"MPICH \d[\w.]+", library.version)


@pytest.mark.parametrize(
    ("mpiexec", "library", "can"),
    [
        ("mpich", "mpich", True),
        ("mpich", "impi", True),
        ("impi", "mpich", True),
        ("openmpi", "openmpi", True),
        ("openmpi", "mpich", False),
        ("impi", "openmpi", False),
        ("other", "mpich", True),
        ("mpich", "other", True),
    ],
)
def test_can_launch(mpiexec: Vendor, library: Vendor, can: bool) -> None:
    assert can_launch(mpiexec, library) is can
