"""Train a small GPT in PyTorch on Jane Austen's novels, character by character, with DDP over MPI.

    mpiexec -n 2 python examples/torch_gpt.py
    python examples/torch_gpt.py                # this process alone, the same result to rounding

Get the text with scripts/get-data austen. The same model in NumPy is in examples/train_gpt.py; losses are in nats per
character. The loop is the one for torchrun and gloo.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import mpitrain.torch  # noqa: F401 - makes the backend known
from datasets import load_text
from models.torch_block import Block

CONTEXT, WIDTH, HEADS, LAYERS = 64, 96, 4, 2


class Gpt(torch.nn.Module):
    """Tokens to scores of the next one; the output is tied to the embedding."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.token, self.place = torch.nn.Embedding(vocabulary, WIDTH), torch.nn.Embedding(CONTEXT, WIDTH)
        self.blocks = torch.nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(LAYERS)))
        self.norm = torch.nn.LayerNorm(WIDTH)
        for embedding in (self.token, self.place):
            torch.nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        return self.norm(self.blocks(x)) @ self.token.weight.T


def main() -> None:
    arguments = parse()
    dist.init_process_group("mpitrain")
    rank, size = dist.get_rank(), dist.get_world_size()
    train, validation, vocabulary = load_text("austen", arguments.data_directory)
    train, validation = torch.from_numpy(train), torch.from_numpy(validation)
    torch.manual_seed(0)
    net = Gpt(len(vocabulary))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1)

    places = torch.Generator().manual_seed(1)  # the same on every rank; a rank takes its part of each batch
    for step in range(1, arguments.steps + 1):
        starts = torch.randint(len(train) - CONTEXT, (arguments.global_batch,), generator=places)
        x, y = windows(train, starts.tensor_split(size)[rank])
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 and rank == 0:
            print(f"step {step}: loss {loss.item():.4f} on the first rank's part")
    with torch.no_grad():
        x, y = windows(validation, torch.arange(0, 64 * CONTEXT, CONTEXT))
        loss = cross_entropy(net(x).flatten(0, 1), y.flatten())
    if rank == 0:
        print(f"ranks: {size}, step {step}: validation loss {loss.item():.6f}")
        if arguments.save:
            torch.save(net.state_dict(), arguments.save)
    dist.destroy_process_group()


def windows(tokens: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces of the text from these places on, and the same shifted by one character: two tensors (n, CONTEXT)."""
    places = starts[:, None] + torch.arange(CONTEXT)
    return tokens[places], tokens[places + 1]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT in PyTorch on Jane Austen's novels.")
    parser.add_argument("--data-directory", type=Path, help="default: data/ here, else ~/.cache/mpitrain")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--global-batch", type=int, default=32, help="samples over all ranks; a multiple of the ranks")
    parser.add_argument("--save", metavar="FILE", help="save the parameters to this file at the end")
    return parser.parse_args()


if __name__ == "__main__":
    main()
