"""BatchNorm1d: torch's, in training and in evaluation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ctr_pe.units.batch_norm import BatchNorm1d


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_torchs_in_training_and_evaluation(dtype: torch.dtype) -> None:
    ours, theirs = BatchNorm1d(5), nn.BatchNorm1d(5)
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    theirs.load_state_dict(ours.state_dict())
    for training in (True, True, False):
        x = (3 * torch.randn(16, 5) + 2).to(dtype)
        found, expected = ours.train(training)(x), theirs.train(training)(x)
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-5)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
