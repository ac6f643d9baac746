"""Records of tensors that travel; that they arrive on a device is tested in on_elsewhere.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ctr_pe.sequence.positions import Positions
from ctr_pe.sequence.transfer import PinnedTransfer, to_device


def test_on_a_cpu_nothing_is_copied() -> None:
    x = torch.ones(2)
    content = [x, Positions.from_mask(torch.ones(2, 3, dtype=torch.bool))]
    assert PinnedTransfer(content, torch.device("cpu")).unpack() is content
    assert to_device(x, torch.device("cpu")) is x


def test_a_dtype_travels_in_one_copy_and_what_is_twice_in_it_once() -> None:
    x = torch.arange(6).view(2, 3)
    content: tuple[Tensor, tuple[Tensor, Tensor], dict[str, Tensor]]
    content = x, (x, torch.zeros(0, 4)), {"mask": x > 2, "more": torch.ones(5)}
    transfer = PinnedTransfer(content, torch.device("meta"))
    assert [buffer.dtype for buffer in transfer.buffers] == [torch.int64, torch.float32, torch.bool]
    assert [len(buffer) for buffer in transfer.buffers] == [6, 5, 6]
    one, (same, empty), others = transfer.unpack()
    assert one is same
    assert (one.shape, empty.shape, others["mask"].shape) == ((2, 3), (0, 4), (2, 3))
    assert {x.device.type for x in (one, empty, *others.values())} == {"meta"}


def test_what_the_host_needs_stays_with_it() -> None:
    positions = Positions.from_mask(torch.ones(2, 3, dtype=torch.bool))
    positions.plan(with_target=True)
    there = PinnedTransfer(positions, torch.device("meta")).unpack()
    assert there.mask.is_meta
    assert there.mask_cpu is positions.mask
    assert there.lengths_cpu is positions.lengths
    assert there.blocks[0].mask.is_meta
    assert there.whole[0].mask_cpu.tolist() == positions.mask.tolist()
    assert there.with_target().mask_cpu.tolist() == [[True] * 4] * 2
    assert positions.mask.is_cpu
