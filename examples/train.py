"""Train an image classifier on one or many ranks.

    python examples/train.py                                    # this process alone
    mpiexec -n 2 python examples/train.py                       # two ranks, the same result to rounding
    mpiexec -n 4 -ppn 1 -hosts a,b python examples/train.py --model cnn

The data is Fashion-MNIST (get it with scripts/get-data fashion), or with --data digits the 1,797 small images that
scikit-learn brings.
"""

import argparse
from pathlib import Path

import numpy

import mpitrain as mt
from arguments import add_run, positive, recorded
from datasets import load_images
from models import cnn, mlp
from mpitrain.cuda.device import array_module

MODELS = {"mlp": mlp, "cnn": cnn}


def main() -> None:
    arguments = parse()
    world = mt.init()
    xp = array_module(world, arguments.device)
    with world.together("load the data"):
        train_x, train_y, test_x, test_y = load_images(arguments.data, arguments.data_directory)
        train_x, test_x = standardised(train_x, test_x)
    model = MODELS[arguments.model]
    steps_per_epoch = -(-len(train_x) // arguments.global_batch)
    total_steps = arguments.epochs * steps_per_epoch

    def build(world: mt.World) -> mt.Parts:
        data = mt.ArrayData(world, (train_x, train_y), global_batch=arguments.global_batch, seed=arguments.seed)
        parameters = model.initial(numpy.random.default_rng(arguments.seed), xp, inputs=train_x.shape[1])
        schedule = mt.warmup_cosine(
            arguments.learning_rate, warmup_steps=min(200, total_steps // 10), total_steps=total_steps
        )
        optimizer = mt.Sgd(schedule, momentum=0.9, nesterov=True, weight_decay=5e-4)
        adapter = mt.ArrayFunction(model.loss_and_gradients, parameters, optimizer, precision=arguments.precision)
        return mt.Parts(adapter, mt.Sync(), data)

    def test_metrics(trainer: mt.Trainer) -> dict[str, float]:
        parameters = trainer.adapter.parameters()

        def metrics(batch: tuple[numpy.ndarray, numpy.ndarray]) -> dict[str, float]:
            x, y = batch
            right = model.scores(parameters, xp.asarray(x)).argmax(axis=1) == xp.asarray(y)
            return {"test accuracy": float(right.mean())}

        return mt.evaluate(trainer.world, metrics, (test_x, test_y))

    hooks = [
        mt.StopAtStep(total_steps if arguments.steps is None else arguments.steps),
        mt.Log(),
        mt.Evaluate(steps_per_epoch, test_metrics),
    ]
    hooks += recorded(arguments)
    if arguments.checkpoints:
        hooks.append(mt.Checkpoint(arguments.checkpoints, steps=steps_per_epoch))
    world.print(f"ranks: {world.size}, nodes: {world.num_nodes}, {arguments.model} on {xp.__name__}, {arguments.data}")
    mt.Trainer(build, hooks).run()


def standardised(train: numpy.ndarray, test: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Mean 0 and standard deviation 1 over all pixels of the training images."""
    mean, deviation = train.mean(), train.std()
    return (train - mean) / deviation, (test - mean) / deviation


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train an image classifier on one or many ranks.")
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--data", choices=("fashion", "digits"), default="fashion")
    parser.add_argument("--data-directory", type=Path, help="default: ~/.cache/mpitrain")
    parser.add_argument("--epochs", type=positive, default=5)
    parser.add_argument("--steps", type=positive, help="stop after so many steps, whatever the epochs")
    parser.add_argument("--global-batch", type=positive, default=128, help="samples of all ranks together in a step")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "host", "cuda"), default="auto")
    parser.add_argument(
        "--precision", choices=("float32", "bf16", "fp16"), default="float32", help="of the computation"
    )
    parser.add_argument("--checkpoints", type=Path, help="save here after every epoch, and resume from here")
    add_run(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
