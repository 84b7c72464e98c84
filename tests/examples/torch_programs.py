"""The examples for PyTorch, run one after the other in the same processes: alone, each would spend most of its time in
imports."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
from jobs import run_job

AUSTEN = datasets.default_directory() / "austen"
# What an example needs besides PyTorch.
MODULES = {"accelerate_train": "accelerate", "fabric_train": "lightning_fabric"}
# Fabric leaves variables for its launcher in the environment, so it comes last.
STEPS: dict[str, list[str]] = {
    "torch_ddp": [],
    "torch_fsdp2": [],
    "torch_gpt": [],
    "torch_images": ["--data", "digits"],
    "accelerate_train": [],
    "fabric_train": [],
}
MARK = "=== the next program ===\n"
IN_TURN = f"""
import json, os, runpy, sys

sys.path.insert(0, "examples")
for name, *options in json.loads(sys.argv[1]):
    if os.environ.get("PMI_RANK", "0") == "0":
        print({MARK!r}, end="", flush=True)
    sys.argv = [name, *options]
    runpy.run_path(f"examples/{{name}}.py", run_name="__main__")
"""


@dataclass(frozen=True)
class Printed:
    """What the examples for PyTorch printed in one process and on two ranks, by program, and where they saved."""

    alone: dict[str, list[str]]
    together: dict[str, list[str]]
    folder: Path


def run_all(folder: Path) -> Printed:
    """Run each example in one process and on two ranks, for few steps. What they save goes to `folder`."""
    checkpoint = ["--checkpoint", str(folder / "state.pt")]
    alone = {"whole loop": ["torch_whole_loop"], "first epoch": ["torch_whole_loop", *checkpoint, "--epochs", "1"]}
    run = ["torch_trainer", "--directory", str(folder / "run")]
    alone |= {"trainer": [*run[:2], str(folder / "undisturbed"), "--epochs", "3"], "begun": [*run, "--epochs", "1"]}
    together = {"other epochs": ["torch_whole_loop", *checkpoint], "prepare": ["torch_prepare", "--epochs", "2"]}
    together |= {"resumed": [*run, "--epochs", "3"]}
    for name, options in STEPS.items():
        if importlib.util.find_spec(MODULES.get(name, "torch")) and (name != "torch_gpt" or AUSTEN.is_dir()):
            words = [name, "--steps", "3", *options, "--save"]
            alone[name] = [*words, str(folder / f"{name}-1.pt")]
            together[name] = [*words, str(folder / f"{name}-2.pt")]
    return Printed(in_turn(None, alone), in_turn(2, together), folder)


def in_turn(num_ranks: int | None, programs: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Run the programs, each an example and its options, one after the other in one job."""
    job = run_job(num_ranks, IN_TURN, json.dumps(list(programs.values())), timeout=300.0)
    assert (job.code, job.left) == (0, []), job.output
    return dict(zip(programs, (text.splitlines() for text in job.stdout.split(MARK)[1:]), strict=True))
