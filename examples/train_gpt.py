"""Train a small GPT on Jane Austen's novels, character by character, on one or many ranks.

    python examples/train_gpt.py
    mpiexec -n 2 python examples/train_gpt.py --steps 1000

Get the text with scripts/get-data austen. Losses are in nats per character.
"""

import argparse
from pathlib import Path

import numpy

import mpitrain as mt
from arguments import add_run, add_virtual_ranks, positive, print_digest, recorded
from datasets import load_text
from models import gpt
from mpitrain.cuda.device import array_module


def main() -> None:
    arguments = parse()
    world = mt.init()
    xp = array_module(world, arguments.device)
    with world.together("load the data"):
        train, validation, vocabulary = load_text("austen", arguments.data_directory)

    def build(world: mt.World) -> mt.Parts:
        data = mt.data.ArrayData(
            world, windows(train, arguments.context), global_batch=arguments.global_batch, seed=arguments.seed
        )
        parameters = gpt.initial(
            numpy.random.default_rng(arguments.seed),
            xp,
            vocabulary=len(vocabulary),
            context=arguments.context,
            width=96,
            heads=4,
            layers=2,
        )
        schedule = mt.optim.warmup_cosine(4e-3, warmup_steps=min(50, arguments.steps - 1), total_steps=arguments.steps)
        optimizer = mt.optim.AdamW(schedule, betas=(0.9, 0.99), weight_decay=0.1, clip_norm=1.0)
        adapter = mt.ArrayFunction(gpt.loss_and_gradients, parameters, optimizer, precision=arguments.precision)
        return mt.Parts(adapter, mt.Sync(virtual_ranks=arguments.virtual_ranks, seed=arguments.seed), data)

    some = [part[:1000] for part in windows(validation, arguments.context)]

    def validation_loss(trainer: mt.Trainer) -> dict[str, float]:
        parameters = trainer.adapter.parameters()

        def loss(batch: list[numpy.ndarray]) -> dict[str, float]:
            x, y = (xp.asarray(part) for part in batch)
            return {"validation loss": gpt.loss_and_gradients(parameters, (x, y), lambda name, gradient: None)}

        return mt.evaluate(trainer.world, loss, some, 100, arguments.virtual_ranks)

    world.print(f"ranks: {world.size}, nodes: {world.num_nodes}, GPT on {xp.__name__}, {len(train):,} characters")
    hooks = [mt.StopAtStep(arguments.steps), mt.Log(), mt.Evaluation(arguments.evaluate_steps, validation_loss)]
    hooks += recorded(arguments, tokens_per_sample=arguments.context)
    if arguments.checkpoints:
        hooks.append(mt.Checkpoint(arguments.checkpoints, steps=arguments.evaluate_steps))
    trainer = mt.Trainer(build, hooks)
    trainer.run()
    if arguments.virtual_ranks:
        print_digest(trainer)
    if world.is_root:
        prompt = numpy.array([vocabulary.index(letter) for letter in "It was "])
        tokens = gpt.generate(
            trainer.adapter.parameters(), xp.asarray(prompt), 200, numpy.random.default_rng(0), temperature=0.8
        )
        print("".join(vocabulary[int(token)] for token in tokens))


def windows(tokens: numpy.ndarray, context: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Neighbouring pieces of the text, and the same shifted by one character: two arrays (n, context)."""
    count = (len(tokens) - 1) // context
    x, y = tokens[: count * context], tokens[1 : count * context + 1]
    return x.reshape(count, context), y.reshape(count, context)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on Jane Austen's novels.")
    parser.add_argument("--data-directory", type=Path, help="default: data/ here, else ~/.cache/mpitrain")
    parser.add_argument("--steps", type=positive, default=500)
    parser.add_argument("--evaluate-steps", type=positive, default=250)
    parser.add_argument("--context", type=positive, default=64, help="characters per sample")
    parser.add_argument("--global-batch", type=positive, default=32, help="samples of all ranks together in a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "host", "cuda"), default="auto")
    parser.add_argument(
        "--precision", choices=("float32", "bf16", "fp16"), default="float32", help="precision of the computation"
    )
    parser.add_argument("--checkpoints", type=Path, help="save here at every evaluation, and resume from here")
    add_virtual_ranks(parser)
    add_run(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
