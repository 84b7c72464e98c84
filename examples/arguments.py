"""Options that the examples share."""

import argparse
import hashlib
from pathlib import Path

import mpitrain as mt


def positive(text: str) -> int:
    """Convert to a whole number above 0; argparse reports anything else and exits with code 2."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def add_virtual_ranks(parser: argparse.ArgumentParser) -> None:
    """Declare the option for the same bits on any number of ranks."""
    parser.add_argument(
        "--virtual-ranks",
        type=positive,
        metavar="V",
        help="compute each batch in V equal parts, with the same bits on 1 to V ranks if OMP_NUM_THREADS is the same "
        "(docs/explanation/numerics.md#bitwise-identical-results-on-any-number-of-ranks)",
    )


def print_digest(trainer: mt.Trainer) -> None:
    """Print the SHA-256 of all parameters: equal digests, equal bits."""
    parameters = trainer.adapter.parameters()
    digest = hashlib.sha256(b"".join(parameters[name].tobytes() for name in sorted(parameters)))
    trainer.world.print(f"SHA-256 of all parameters: {digest.hexdigest()}")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the run's record."""
    parser.add_argument("--run", type=Path, metavar="DIR", help="record the run here, for mpitrain plot DIR")
    parser.add_argument("--tensorboard", action="store_true", help="also record for TensorBoard (needs tensorboardX)")


def recorded(arguments: argparse.Namespace, *, tokens_per_sample: int | None = None) -> list[mt.Hook]:
    """The hooks that keep the record: after Evaluation, before Checkpoint."""
    if arguments.run is None:
        return []
    writers = [mt.writers.JsonLines(arguments.run), mt.writers.Csv(arguments.run)]
    if arguments.tensorboard:
        writers.append(mt.writers.TensorBoard(arguments.run))
    return [mt.Record(writers, tokens_per_sample=tokens_per_sample)]
