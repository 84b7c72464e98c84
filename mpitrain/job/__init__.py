"""How a World comes to be, and how a job ends."""
