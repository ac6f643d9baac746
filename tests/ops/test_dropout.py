"""Dropout's mask: the kernel keeps what torch keeps."""

from __future__ import annotations

import pytest
import torch

from ctr_pe.ops import native
from ctr_pe.ops.dropout import in_torch, keep_mask
from tests.support.comparing import calls, needs_kernels, threads
from tests.support.fenced import Fenced

COUNTS = [0, 1, 3, 4, 31, 32, 33, 63, 64, 65, 1003]


@needs_kernels
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5, 1 - 2**-16, 1.0])
@pytest.mark.parametrize("count", COUNTS)
def test_the_kernel_keeps_what_torch_keeps(count: int, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (torch.tensor([-(2**62) - 5]), torch.tensor([7])):
        masks = []
        for number in (1, 3):
            with threads(number), calls() as seen:
                masks.append(keep_mask(seed, torch.Size([count]), rate))
                assert seen == ([] if rate == 1 else ["keep_mask"])
        with monkeypatch.context() as patch:
            patch.setattr(native, "LIBRARY", None)
            masks.append(keep_mask(seed, torch.Size([count]), rate))
        assert all(torch.equal(mask, masks[0]) for mask in masks)
        assert all(mask.dtype == torch.int16 and set(mask.tolist()) <= {0, 1} for mask in masks)


def test_seeds_and_rates_differ() -> None:
    seeds = torch.tensor([3]), torch.tensor([4])
    first, second = (keep_mask(seed, torch.Size([50, 40]), 0.3) for seed in seeds)
    assert not torch.equal(first, second)
    assert 0.6 < first.float().mean() < 0.8
    assert keep_mask(seeds[0], torch.Size([9]), 1.0).sum() == 0
    assert keep_mask(seeds[0], torch.Size([9]), 0.0).sum() == 9


@needs_kernels
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("count", COUNTS)
def test_no_memory_of_others_is_touched(count: int, at_end: bool) -> None:
    seed = torch.tensor([9])
    fence = Fenced(torch.zeros(count + 1, dtype=torch.int16), at_end)
    kept = fence.held[1:] if at_end else fence.held[:-1]
    native.call("keep_mask", seed, count, 100, kept)
    assert torch.equal(kept, in_torch(seed, torch.Size([count]), 100))
    fence.protect()
