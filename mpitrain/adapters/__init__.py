"""What the Trainer needs of a framework. Nothing is imported until it is asked for."""
