"""Ranks that hold other batches are told from those that hold the same one."""

import pytest
import torch

from blockopt.measure.batch_shares import _fingerprint

LOGITS = torch.randn(2, 7, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([4, 6])


def is_same(logits, labels):
    return _fingerprint(2, LOGITS, LABELS).is_same(_fingerprint(2, logits, labels))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_batch_is_the_same_with_another_rounding(dtype):
    assert is_same((LOGITS * (1 + 1e-3)).to(dtype), LABELS)


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        (LOGITS, torch.tensor([6, 5])),  # with the same sum, however it is weighted
        (LOGITS, LABELS.flip(0)),
        (LOGITS.flip(0), LABELS),
        (LOGITS + 0.03 * torch.tensor([[1.0], [-1.0]]), LABELS),  # with the same mean
    ],
)
def test_another_batch_is_not(logits, labels):
    assert not is_same(logits, labels)
