"""The examples for PyTorch end on 2 ranks with the parameters that they end with in one process, to rounding."""

from __future__ import annotations

import pytest
from torch_programs import AUSTEN, MODULES, Printed

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


@pytest.mark.parametrize("name", TOLERANCES)
def test_two_ranks_do_what_one_process_does(name: str, printed: Printed) -> None:
    pytest.importorskip(MODULES.get(name, "torch"))
    if name == "torch_gpt" and not AUSTEN.is_dir():
        pytest.skip(f"no {AUSTEN}; get it with: scripts/get-data austen")
    alone, together = (lines[name][-1 - (name == "torch_fsdp2")] for lines in (printed.alone, printed.together))
    assert alone.startswith("ranks: 1, step 3: "), alone
    assert together.startswith("ranks: 2, step 3: "), together
    one, two = (torch.load(printed.folder / f"{name}-{ranks}.pt") for ranks in (1, 2))
    assert one.keys() == two.keys()
    assert max(float((one[key] - two[key]).abs().max()) for key in one) <= TOLERANCES[name]
