"""The speed suite: ``python -m benchmark.speed.run --help``."""
