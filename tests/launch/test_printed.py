"""Steps and losses in what scripts print: lines as these programs print them, and lines that only look so."""

from __future__ import annotations

import math

import pytest

from mpitrain.launch.printed import newest_progress, progress_in

LINES = [
    ("step 12 loss 0.3", 12, 0.3),
    ("step=12, loss=0.25", 12, 0.25),
    ("[rank0]: epoch 3, step 120, Loss: 4.1e-01", 120, 0.41),
    ("iter 100: loss 2.3012, time 5.02ms, mfu 1.20%", 100, 2.3012),  # nanoGPT
    ("step 250: train loss 2.4, val loss 2.5", 250, 2.4),  # nanoGPT, an evaluation
    ("step 00010/21400 (0.05%) | loss: 8.123 | lrm: 1.00 | dt: 80.1ms | tok/sec: 6,400", 10, 8.123),  # nanochat
    ("step:125/1750 train_loss:3.2701 train_time:1230ms step_avg:9.8ms", 125, 3.2701),  # modded-nanogpt
    ("[titan] step: 10  loss:  7.5012  grad_norm:  1.2  memory:  0.9GiB(1%)  tps: 80", 10, 7.5012),  # torchtitan
    ("Epoch 1:  50%|█████     | 235/469 [00:02<00:02, 99.5it/s, v_num=0, train_loss=0.31]", 235, 0.31),  # Lightning
    ("Epoch 1: 100%|██| 10/10 [00:01<00:00, loss=0.31]", 10, 0.31),
    ("loss 0.31:  40%|████      | 40/100 [00:02<00:03, 20.0it/s]", 40, 0.31),  # tqdm.set_description
    ("  3%|▎         | 10/300 [00:01<00:30,  9.5it/s]", 10, None),  # transformers.Trainer, its bar
    ("{'loss': 0.4321, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': 1.0}", None, 0.4321),  # and its log
    (" 120/1875 ━━━━━━━━━━━━━━━━━━━━ 4s 2ms/step - accuracy: 0.8125 - loss: 0.6543", 120, 0.6543),  # Keras 3
    ("Epoch: [0][ 10/391]\tTime  0.3 ( 0.4)\tData  0.0 ( 0.1)\tLoss 6.9e+00 (7.0e+00)\tAcc@1   0.0", 10, 6.9),
    ("Train: 0 [  50/390 ( 13%)]  Loss: 6.95 (6.96)  Time: 0.313s", 50, 6.95),  # timm
    ("Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.293", None, 2.293),  # PyTorch's mnist example: these are samples
    ("loss: 2.303494  [   64/60000]", None, 2.303494),  # PyTorch's tutorial: samples too
    (" iteration      100/     500 | consumed samples: 800 | lm loss: 6.500E+00 | loss scale: 1.0 |", 100, 6.5),
    ("[GPU0] Epoch 1 | Iter 100 | Train Loss 2.31075", 100, 2.31075),  # minGPT-ddp
    ("steps: 10 loss: 0.6101 iter time (s): 0.212 samples/sec: 75.4", 10, 0.6101),  # DeepSpeed
    ('| INFO | train_inner | {"epoch": 1, "update": 0.5, "loss": "9.1", "num_updates": "100"}', 100, 9.1),  # fairseq
    ("Global step: 500", 500, None),
    ("saved checkpoint_step_100.pt", None, None),
    ("Downloading:  40%|████ | 4/10 [00:02<00:03]", None, None),
    ("val loss 2.5", None, None),
    ("[GPU0] Epoch 3 | Batchsize: 32 | Steps: 32", None, None),  # PyTorch's DDP tutorial: it says how many
    ("lossless 3, dropout 0.1", None, None),
    ("", None, None),
]


@pytest.mark.parametrize(("line", "step", "loss"), LINES)
def test_a_line(line: str, step: int | None, loss: float | None) -> None:
    assert progress_in(line) == (step, loss)


def test_a_loss_that_is_no_number() -> None:
    step, loss = progress_in("step 7 loss nan")
    assert step == 7
    assert math.isnan(loss)


def test_the_newest() -> None:
    """The bar has the step, and another line the loss."""
    lines = ["  3%|▎  | 10/300 [00:01<00:30]", "done", "{'loss': 0.4, 'epoch': 1.0}", "{'loss': 0.5, 'epoch': 0.9}"]
    assert newest_progress(lines) == (10, 0.4)
    assert newest_progress(["hello"]) == (None, None)
