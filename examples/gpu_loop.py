"""A training loop of your own on GPUs, without the Trainer: direct calls of mpitrain's kernels and sums.

    mpiexec -n 2 python examples/gpu_loop.py --data digits

The model computes in fp16, and parameters are kept in float32. A step copies the gradients of all layers into one
buffer, sums it over the ranks, and updates in one pass: gradients divided by the loss scale, and AdamW. Then it makes
the fp16 copy for the next step. If a sum is not finite, it is not finite on every rank. So all ranks skip the same
steps without asking each other. The Trainer adds overlap, checks, checkpoints, and a loss scale that adapts itself.
"""

import argparse
from pathlib import Path

import numpy

import mpitrain as mt
from arguments import positive
from datasets import load_images
from models import mlp
from mpitrain.cuda import kernels
from mpitrain.cuda.device import array_module
from mpitrain.cuda.transports import make_transport
from mpitrain.reducer.bucket import Parameter, plan_layout

FLOAT32, FLOAT16 = numpy.dtype(numpy.float32), numpy.dtype(numpy.float16)


def main() -> None:
    arguments = parse()
    world = mt.init()
    cupy = array_module(world, "cuda")
    with world.together("load the data"):
        images, labels, *_ = load_images(arguments.data, arguments.data_directory)
    initial = mlp.initial(numpy.random.default_rng(0), cupy, inputs=images.shape[1])
    layout = plan_layout([Parameter(name, value.shape, FLOAT32) for name, value in initial.items()])
    count = layout.counts[FLOAT32]

    transport = make_transport(world)
    gradients = transport.allocate(count, FLOAT32)
    parameters, copy = cupy.empty(count, FLOAT32), cupy.empty(count, FLOAT16)
    first, second = cupy.zeros(count, FLOAT32), cupy.zeros(count, FLOAT32)
    not_finite, num_skipped = cupy.zeros(1, numpy.int32), 0
    fused = kernels.Fused(factor=cupy.full(1, 1 / arguments.loss_scale, numpy.float64))
    views = layout.views({FLOAT32: gradients})
    kernels.pack(list(initial.values()), parameters)
    copy[...] = parameters
    seen = dict(zip(initial, layout.views({FLOAT32: copy}), strict=True))

    if arguments.global_batch >= len(images):
        raise SystemExit(
            f"--global-batch {arguments.global_batch}: there are {len(images)} samples; give a smaller number"
        )
    size, order = arguments.global_batch, numpy.random.default_rng(0).permutation(len(images))
    begins = [number * size % (len(images) - size) for number in range(arguments.steps)]
    batches = ((images[chosen], labels[chosen]) for begin in begins for chosen in [order[begin : begin + size]])
    for step, (x, y) in enumerate(world.shard(batches), start=1):
        # The scale has this rank's share of the samples, so the sum over ranks is the mean over samples.
        scale = arguments.loss_scale * len(x) / size
        computed: dict[str, object] = {}
        batch = (cupy.asarray(x.astype(FLOAT16)), cupy.asarray(y))
        loss = mlp.loss_and_gradients(seen, batch, computed.__setitem__, loss_scale=scale)
        for view, name in zip(views, initial, strict=True):
            view[...] = computed[name]  # fp16 ones are widened
        transport.start(gradients).wait()
        not_finite.fill(0)
        kernels.all_finite(gradients, not_finite)
        if int(not_finite[0]):
            num_skipped += 1
        else:
            kernels.adamw(parameters, gradients, first, second, step=step, rate=1e-3, fused=fused)
            copy[...] = parameters
        world.print(f"step {step}/{arguments.steps} | loss {world.mean(loss, weight=len(x)):.4f}")
    world.print(f"skipped {num_skipped} of {arguments.steps} steps")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A training loop of your own on GPUs.")
    parser.add_argument("--data", choices=("fashion", "digits"), default="fashion")
    parser.add_argument("--data-directory", type=Path, help="default: data/ here, else ~/.cache/mpitrain")
    parser.add_argument("--steps", type=positive, default=100)
    parser.add_argument("--global-batch", type=positive, default=128, help="samples of all ranks together in a step")
    parser.add_argument("--loss-scale", type=float, default=1024.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
