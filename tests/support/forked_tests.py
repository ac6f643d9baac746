"""Runs of pytest without the seconds in which torch is imported.

``python -m tests.support.forked_tests`` reads lines, each with the arguments of a run as JSON. The run is a fork of
this process, which has imported what faults do not touch; a line [exit code, output] answers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile

import h5py  # noqa: F401
import polars  # noqa: F401
import pyarrow  # noqa: F401
import pydantic  # noqa: F401
import pytest
import torch._dynamo  # noqa: F401  so is what an optimiser needs

LIMIT = 300
"""Seconds after which a run ends by a signal."""


def main() -> None:
    for line in sys.stdin:
        with tempfile.TemporaryFile() as output:
            if (child := os.fork()) == 0:
                signal.alarm(LIMIT)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                code = pytest.main(json.loads(line))
                sys.stdout.flush()
                os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            output.seek(0)
            print(json.dumps([code, output.read().decode()]), flush=True)


if __name__ == "__main__":
    main()
