"""The creation of a World, and the end of a job."""
