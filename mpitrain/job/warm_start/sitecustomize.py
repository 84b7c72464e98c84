"""Python imports this before it runs the program, where the holder of a warm interpreter has put it on PYTHONPATH."""

import os
import traceback

try:
    from mpitrain.job.warm import serve

    serve()
except BaseException:  # Python itself would continue with the program
    traceback.print_exc()
    os._exit(1)
