"""``deterministic``: a device adds in the same order every time, or refuses."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ctr_pe.utils.errors import UserError


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Where it is ``wanted``, torch runs operations whose result does not vary from run to run and no others.

    Raises UserError for an operation that has no such form. On a CPU all that is trained here has one.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by CUDA's products when the first one runs
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        named = re.match(r"(\S+) does not have a deterministic implementation", str(error))
        if named is None:
            raise
        raise UserError(f"deterministic: {named[1]} has no deterministic form here: leave it out") from None
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
