"""Train an image classifier on one or many ranks.

    python examples/train.py                                    # this process alone
    mpiexec -n 2 python examples/train.py                       # two ranks, the same result to rounding
    mpiexec -n 4 -ppn 1 -hosts a,b python examples/train.py --model cnn
    mpiexec -n 2 python examples/train.py --framework torch     # the same model in PyTorch, the same result to rounding
    export OMP_NUM_THREADS=1                                    # the bits depend on the number of threads
    mpiexec -n 3 python examples/train.py --virtual-ranks 8     # the same bits on 1 to 8 ranks

The data is Fashion-MNIST (get it with scripts/get-data fashion), or with --data digits the 1,797 small images that
come with scikit-learn.
"""

import argparse
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy

import mpitrain as mt
from arguments import add_run, add_virtual_ranks, positive, print_digest, recorded
from datasets import load_images, standardised
from mpitrain.cuda.device import array_module
from mpitrain.strategies import STRATEGIES

# The files in models/, by framework and model.
MODELS = {"numpy": {"mlp": "mlp", "cnn": "cnn"}, "torch": {"mlp": "torch_mlp", "cnn": "torch_cnn"}}


def main() -> None:
    arguments = parse()
    model = import_module(f"models.{MODELS[arguments.framework][arguments.model]}")
    world = mt.init()
    xp = array_module(world, arguments.device)
    with world.together("load the data"):
        train_x, train_y, test_x, test_y = load_images(arguments.data, arguments.data_directory)
        train_x, test_x = standardised(train_x, test_x)
    steps_per_epoch = -(-len(train_x) // arguments.global_batch)
    total_steps = arguments.epochs * steps_per_epoch

    def build(world: mt.World) -> mt.Parts:
        data = mt.data.ArrayData(world, (train_x, train_y), global_batch=arguments.global_batch, seed=arguments.seed)
        schedule = mt.optim.warmup_cosine(
            arguments.learning_rate, warmup_steps=min(200, total_steps // 10), total_steps=total_steps
        )
        rng = numpy.random.default_rng(arguments.seed)
        adapter = model.adapter(rng, xp, inputs=train_x.shape[1], schedule=schedule, precision=arguments.precision)
        if arguments.virtual_ranks:
            return mt.Parts(adapter, mt.Sync(virtual_ranks=arguments.virtual_ranks, seed=arguments.seed), data)
        return mt.Parts(adapter, mt.strategies.make_strategy(arguments.strategy), data)

    def test_metrics(trainer: mt.Trainer) -> dict[str, float]:
        parameters = trainer.adapter.parameters()

        def metrics(batch: tuple[numpy.ndarray, numpy.ndarray]) -> dict[str, float]:
            x, y = batch
            right = model.scores(parameters, xp.asarray(x)).argmax(axis=1) == xp.asarray(y)
            return {"test accuracy": float(right.mean())}

        return mt.evaluate(trainer.world, metrics, (test_x, test_y), virtual_ranks=arguments.virtual_ranks)

    hooks = [
        mt.StopAtStep(total_steps if arguments.steps is None else arguments.steps),
        mt.Log(),
        mt.Evaluation(steps_per_epoch, test_metrics),
    ]
    hooks += recorded(arguments)
    if arguments.checkpoints:
        hooks.append(mt.Checkpoint(arguments.checkpoints, steps=steps_per_epoch))
    place = "torch" if arguments.framework == "torch" else xp.__name__
    world.print(f"ranks: {world.size}, nodes: {world.num_nodes}, {arguments.model} on {place}, {arguments.data}")
    trainer = mt.Trainer(build, hooks)
    trainer.run()
    if arguments.virtual_ranks:
        print_digest(trainer)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train an image classifier on one or many ranks.")
    parser.add_argument("--framework", choices=MODELS, default="numpy")
    parser.add_argument("--model", choices=MODELS["numpy"], default="mlp")
    parser.add_argument("--data", choices=("fashion", "digits"), default="fashion")
    parser.add_argument("--data-directory", type=Path, help="default: data/ here, else ~/.cache/mpitrain")
    parser.add_argument("--strategy", choices=STRATEGIES, default="sync", help="what the ranks exchange, and when")
    parser.add_argument("--epochs", type=positive, default=5)
    parser.add_argument("--steps", type=positive, help="stop after this many steps, whatever the epochs")
    parser.add_argument("--global-batch", type=positive, default=128, help="samples of all ranks together in a step")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "host", "cuda"), default="auto")
    parser.add_argument(
        "--precision", choices=("float32", "bf16", "fp16"), default="float32", help="precision of the computation"
    )
    parser.add_argument("--checkpoints", type=Path, help="save here after every epoch, and resume from here")
    add_virtual_ranks(parser)
    add_run(parser)
    arguments = parser.parse_args()
    if arguments.virtual_ranks and arguments.strategy != "sync":
        parser.error(f"--virtual-ranks is for --strategy sync, not {arguments.strategy}: leave one of the two out")
    if arguments.framework == "torch":
        if find_spec("torch") is None:
            parser.error("--framework torch needs PyTorch: pip install 'mpitrain[torch]'")
        if arguments.device == "cuda":
            parser.error("--framework torch computes on the host here: --device host")
        arguments.device = "host"
    return arguments


if __name__ == "__main__":
    main()
