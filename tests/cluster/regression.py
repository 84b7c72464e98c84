"""The training that jobs over the nodes of a bed make while a test does something to them: part of their scripts."""

# 60 samples in steps of 12, so the ranks of a job of 2, 3, 4 or 6 have equally many. Needs numpy and mpitrain as mt.
REGRESSION = """
def regression(parameters, batch, on_gradient):
    x, y = batch
    error = x @ parameters["w"] - y
    on_gradient("w", 2 * x.T @ error / len(x))
    return float((error**2).mean())

def build(world):
    random = numpy.random.default_rng(0)
    data = mt.data.ArrayData(world, (random.standard_normal((60, 5)), random.standard_normal(60)), global_batch=12)
    return mt.Parts(mt.ArrayFunction(regression, {"w": numpy.zeros(5)}, mt.optim.SGD(0.01)), mt.Sync(), data)
"""
