"""The examples for PyTorch compute on 2 ranks what they compute in one process, to rounding, also over a break.

All sums are in float32, and in another order on 2 ranks.
"""

from __future__ import annotations

import re
import sys

import pytest
from torch_programs import AUSTEN, MODULES, Printed

from jobs import REPOSITORY, run_command

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

# The largest difference of a parameter after three steps. In float32 the sums of two halves of a batch differ from that
# of the whole by some 1e-7 of a gradient; Adam, as in the GPT, divides small ones by their size.
TOLERANCES = {
    "torch_ddp": 1e-6,
    "torch_fsdp2": 1e-6,
    "torch_gpt": 1e-4,
    "torch_images": 1e-5,
    "accelerate_train": 1e-6,
    "fabric_train": 1e-6,
}


def numbers_of(lines: list[str], pattern: str) -> list[tuple[float, ...]]:
    """The numbers of each line that matches."""
    return [tuple(map(float, found)) for found in re.findall(pattern, "\n".join(lines), re.M)]


@pytest.mark.parametrize("name", TOLERANCES)
def test_two_ranks_end_with_the_parameters_of_one_process(name: str, printed: Printed) -> None:
    pytest.importorskip(MODULES.get(name, "torch"))
    if name == "torch_gpt" and not AUSTEN.is_dir():
        pytest.skip(f"no {AUSTEN}; get it with: scripts/get-data austen")
    alone, together = (lines[name][-1 - (name == "torch_fsdp2")] for lines in (printed.alone, printed.together))
    assert alone.startswith("ranks: 1, step 3: "), alone
    assert together.startswith("ranks: 2, step 3: "), together
    one, two = (torch.load(printed.folder / f"{name}-{ranks}.pt") for ranks in (1, 2))
    assert one.keys() == two.keys()
    assert max(float((one[key] - two[key]).abs().max()) for key in one) <= TOLERANCES[name]


def test_prepare_computes_what_the_script_does_without_its_lines_of_mpitrain(printed: Printed) -> None:
    script = REPOSITORY / "examples/torch_prepare.py"
    lines = script.read_text().splitlines()
    theirs = [line for line in lines if "mpitrain.torch" in line and not line.startswith((" " * 5, '"'))]
    assert len(theirs) == 2
    plain = "\n".join(line for line in lines if line not in theirs).replace("mpitrain.init().is_root", "True")
    # datasets.py is found beside the script, and needs no more of mpitrain than its errors.
    path = {"PYTHONPATH": f"{REPOSITORY}:{script.parent}"}
    alone = run_command([sys.executable, "-c", plain, "--epochs", "2"], timeout=100, env=path)
    assert alone.code == 0, alone.output
    pattern = r"^test loss ([\d.]+), test accuracy ([\d.]+)$"
    ((loss, accuracy),) = numbers_of(alone.stdout.splitlines(), pattern)
    assert accuracy > 0.8
    found = numbers_of(printed.together["prepare"], pattern)  # said once
    assert found == [(pytest.approx(loss, rel=1e-5), pytest.approx(accuracy, abs=0.003))]


@pytest.mark.parametrize(
    ("whole", "first", "rest", "pattern", "steps", "tolerance"),
    [
        # 1,442 samples in batches of 128. Four digits of the loss are printed.
        (
            *("trainer", "begun", "resumed", r"^step (\d+): evaluation loss ([\d.]+), test accuracy ([\d.]+)$"),
            *([12, 24, 36], {"abs": 2e-4}),
        ),
        (
            *("whole loop", "first epoch", "other epochs", r"^epoch (\d+): loss ([\d.]+), test accuracy ([\d.]+)$"),
            *([1, 2, 3], {"rel": 1e-4}),
        ),
    ],
    ids=["trainer", "whole loop"],
)
def test_a_break_and_another_number_of_ranks_change_nothing(
    printed: Printed, whole: str, first: str, rest: str, pattern: str, steps: list[int], tolerance: dict[str, float]
) -> None:
    """Each line is said once."""
    alone = numbers_of(printed.alone[whole], pattern)
    assert [step for step, _, _ in alone] == steps
    assert alone[-1][2] > 0.85
    resumed = numbers_of(printed.alone[first], pattern) + numbers_of(printed.together[rest], pattern)
    assert [step for step, _, _ in resumed] == steps
    for (_, loss, accuracy), (_, expected_loss, expected_accuracy) in zip(resumed, alone, strict=True):
        assert loss == pytest.approx(expected_loss, **tolerance)
        assert accuracy == pytest.approx(expected_accuracy, abs=0.003)


def test_where_the_states_are(printed: Printed) -> None:
    assert [path.name for path in printed.folder.glob("*state*")] == ["state.pt"]
    place = printed.folder / "run/checkpoints/step-00000012"
    assert f"resumed from {place} at step 12" in printed.together["resumed"]
