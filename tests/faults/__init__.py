"""Jobs that go wrong, seen from outside: real processes, real signals, and what the jobs leave behind."""
