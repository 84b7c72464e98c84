"""Python imports this before it runs the program, if the launcher has put it on PYTHONPATH: in each rank (rank.py),
so that a script that never imports mpitrain can be watched too, and in a warm interpreter."""

import os
import traceback

try:
    from mpitrain.early import leave_hook, run_own_sitecustomize

    folder = os.path.dirname(__file__)  # noqa: PTH120 (pathlib costs the start some ms)
    leave_hook(folder)
    if "_MPITRAIN_WARM_LINE" in os.environ:
        from mpitrain.job.warm import serve

        serve()
        leave_hook(folder)  # this is a fork, with the environment of the rank
    if "_MPITRAIN_EXCHANGE" in os.environ:
        from mpitrain.job.exchange import begin

        begin()
    if "_MPITRAIN_RANK" in os.environ:
        from mpitrain.job import without_mpi

        without_mpi.begin()
    run_own_sitecustomize()
except BaseException:  # Python itself would continue with the program
    traceback.print_exc()
    os._exit(1)
