"""Where `mpitrain.Record` and `mpitrain.record_loop` put their rows: files of a run, or services such as MLflow.

A writer of your own is any object with the methods of `Writer`. A service is imported when its writer is opened.
"""

from mpitrain.training.writers.csv_table import Csv
from mpitrain.training.writers.json_lines import JsonLines
from mpitrain.training.writers.mlflow import Mlflow
from mpitrain.training.writers.tensorboard import TensorBoard
from mpitrain.training.writers.wandb import Wandb
from mpitrain.training.writers.writer import Writer

__all__ = ["Csv", "JsonLines", "Mlflow", "TensorBoard", "Wandb", "Writer"]
