"""Classify images with a convolutional network on several machines and GPUs: the same script on any machines.

    python examples/images.py                                       # this process alone
    mpiexec -n 4 -ppn 2 -hosts a,b python examples/images.py        # all ranks in step, on GPUs where there are some
    mpitrain run --hosts a/cuda:0-1,b/cuda:0-1 examples/images.py   # the same, on these GPUs
    mpitrain run -n 5 --servers 1 examples/images.py --backup 1     # four workers: a step is made of the first three
    mpitrain run -n 4 examples/images.py --stages 2                 # two pipelines: each rank has some of the layers

Without servers, each step has the mean gradient of all ranks. With --backup B a server makes a step of the answers that
come first, so B slow workers hold nobody up. Images are shifted by up to a pixel; the shift belongs to the image and
the epoch, not to the rank. So the ranks without a server compute what one process does, to rounding. With --stages S
the layers are on S ranks, on the host.

The data is Fashion-MNIST (get it with scripts/get-data fashion), or with --data digits the 1,797 small images that come
with scikit-learn. CIFAR-10 is in no package that we know of.
"""

import argparse
from pathlib import Path

import numpy

import mpitrain as mt
from arguments import add_run, positive, recorded
from datasets import load_images, standardised
from models import cnn, cnn_layers
from mpitrain.cuda.device import array_module


def shifted(
    sample: tuple[numpy.ndarray, numpy.ndarray], random: numpy.random.Generator
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The image (side * side,) moved by -1 to 1 pixels each way, with its border repeated."""
    image, label = sample
    side = int(len(image) ** 0.5)
    row, column = random.integers(0, 3, 2)
    padded = numpy.pad(image.reshape(side, side), 1, mode="edge")
    return padded[row : row + side, column : column + side].reshape(-1), label


def main() -> None:
    arguments = parse()
    world = mt.init()
    xp = array_module(world, arguments.device)
    with world.together("load the data"):
        train_x, train_y, test_x, test_y = load_images(arguments.data, arguments.data_directory)
        train_x, test_x = standardised(train_x, test_x)
    steps_per_epoch = -(-len(train_x) // arguments.global_batch)
    steps = arguments.steps or arguments.epochs * steps_per_epoch

    def build(world: mt.World) -> mt.Parts:
        pipeline = mt.Pipeline(arguments.stages, micro_batches=4) if arguments.stages else None
        replicas = pipeline.replicas(world) if pipeline else world
        data = mt.data.ArrayData(
            replicas, (train_x, train_y), global_batch=arguments.global_batch, seed=0, augment=shifted
        )
        schedule = mt.optim.warmup_cosine(0.05, warmup_steps=min(200, steps // 10), total_steps=steps)
        model = cnn_layers if pipeline else cnn
        adapter = model.adapter(numpy.random.default_rng(0), xp, inputs=train_x.shape[1], schedule=schedule)
        if pipeline:
            return mt.Parts(adapter, pipeline, data)
        backup = arguments.backup
        return mt.Parts(adapter, mt.Sync() if backup is None else mt.ParameterServer("sync", backup=backup), data)

    def test_metrics(trainer: mt.Trainer) -> dict[str, float]:
        parameters = trainer.adapter.parameters()
        if arguments.stages:  # a rank has its own layers only: bring all of them together
            trainer.own_state()
            parameters = cnn_layers.named(trainer.adapter.state()["parameters"])

        def metrics(batch: tuple[numpy.ndarray, numpy.ndarray]) -> dict[str, float]:
            right = cnn.scores(parameters, xp.asarray(batch[0])).argmax(axis=1) == xp.asarray(batch[1])
            return {"test accuracy": float(right.mean())}

        return mt.evaluate(trainer.world, metrics, (test_x, test_y))

    hooks = [mt.StopAtStep(steps), mt.Log(), mt.Evaluation(steps_per_epoch, test_metrics), *recorded(arguments)]
    if arguments.checkpoints:
        hooks.append(mt.Checkpoint(arguments.checkpoints, steps=steps_per_epoch))
    mt.Trainer(build, hooks).run()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Classify images with a CNN on several machines and GPUs.")
    parser.add_argument("--data", choices=("fashion", "digits"), default="fashion")
    parser.add_argument("--data-directory", type=Path, help="default: data/ here, else ~/.cache/mpitrain")
    parser.add_argument("--epochs", type=positive, default=5)
    parser.add_argument("--steps", type=positive, help="stop after this many steps, whatever the epochs")
    parser.add_argument("--global-batch", type=positive, default=128, help="samples of all ranks together in a step")
    parser.add_argument(
        "--backup", type=int, metavar="B", help="with servers: the answers of a step that are not waited for"
    )
    parser.add_argument(
        "--stages", type=positive, metavar="S", help="cut the model over S ranks, at most 3; --backup goes without"
    )
    parser.add_argument("--device", choices=("auto", "host", "cuda"), default="auto")
    parser.add_argument("--checkpoints", type=Path, help="save here after every epoch, and resume from here")
    add_run(parser)
    arguments = parser.parse_args()
    if arguments.stages and arguments.backup is not None:
        parser.error("--stages is for ranks in step, --backup for a server; give one of them")
    return arguments


if __name__ == "__main__":
    main()
