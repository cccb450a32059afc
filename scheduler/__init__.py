"""The scheduler: commands in, events out, and the laws that hold after every event. No I/O, no clock, no randomness."""
