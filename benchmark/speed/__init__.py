"""The speed suite: ``python benchmark/speed/run.py --help``."""
