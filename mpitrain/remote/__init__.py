"""A function on a named rank, node or device of a running World: mt.workers, mt.run_on and mt.map_on."""
