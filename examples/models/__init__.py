"""Three small models with hand-written backward passes, for NumPy and CuPy: `mlp`, `cnn` and `gpt`.

Each module has the same three functions:

    initial(rng, xp, ...)                                 the parameters, {name: array}, in forward order
    loss_and_gradients(parameters, batch, on_gradient, loss_scale=1.0)
                                                          mean loss of a batch (x, y); hands in every gradient, times
                                                          loss_scale
    scores(parameters, x)                                 the logits

`on_gradient(name, array)` is called once per parameter, as soon as its gradient is final: last layer first.
The array is never written again, so its exchange with other ranks can start at once. An empty batch has loss 0 and
zero gradients, so a rank without samples still takes part.

`torch_mlp` and `torch_cnn` are `mlp` and `cnn` in PyTorch, with gradients by autograd. These four modules have the
functions that examples/train.py needs:

    adapter(rng, xp, inputs=..., schedule=..., precision=...)
                                                          the model with its optimizer: ArrayFunction or TorchModule
    scores(parameters, x)                                 the logits, of what the adapter's parameters() gives

`cnn_layers` is `cnn` as a list of layers, for examples/images.py. `torch_block` is the part that both GPTs in PyTorch
have.
"""
