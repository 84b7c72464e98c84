"""Tests of the test beds, on real beds."""
