"""Memory that nobody may touch beyond what is given."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor


class Fenced:
    """A copy between pages that may be neither read nor written: a step further, and this process is gone. It ends
    where the page after it begins, or begins where the one before it ends."""

    def __init__(self, given: Tensor, at_end: bool) -> None:
        page, size = mmap.PAGESIZE, given.numel() * given.element_size()
        self.last = (1 + -(-size // page)) * page
        self.whole = torch.frombuffer(mmap.mmap(-1, self.last + page), dtype=torch.uint8)
        first = self.last - size if at_end else page
        self.held = self.whole[first : first + size].view(given.dtype).view(given.shape).copy_(given)
        self.protect(0)

    def protect(self, how: int = 3) -> None:
        for page in (0, self.last):
            assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(self.whole.data_ptr() + page), mmap.PAGESIZE, how) == 0
