"""Jobs that go wrong, seen from outside: real processes, real signals, and what is left of them."""
