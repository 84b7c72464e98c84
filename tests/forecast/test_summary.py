"""The lines above a table."""

from __future__ import annotations

from mpitrain.forecast.bench_table import tuning_of


def test_tuning() -> None:
    tuned = {
        "FI_PROVIDER": "tcp",
        "MALLOC_MMAP_THRESHOLD_": "1",
        "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "ring",
        "OMPI_MCA_btl_tcp_flags": "send",
        "UCX_RNDV_THRESH": "inf",
    }
    launcher = {"OMPI_MCA_initial_wdir": "/tmp", "OMPI_COMM_WORLD_RANK": "0", "PMI_RANK": "0"}
    assert (
        tuning_of(tuned | launcher | {"HOME": "/root", "OMP_NUM_THREADS": "1", "MPITRAIN_ALGORITHM": "ring"}) == tuned
    )
    assert tuning_of(launcher) == {}
