"""The maps between a parameter and its blocks equal a loop over an explicit entry-to-block map."""

import pytest
import torch

from blockopt import Split, block_sum, expand
from blockopt.blocks import block_numel
from tests.helpers.models import block_index

CASES = {
    "scalar": ((), None),
    "vector whole": ((7,), None),
    "matrix whole": ((3, 4), None),
    "three dimensions whole": ((2, 3, 4), None),
    "vector, one block": ((6,), Split(0, (6,), (1,))),
    "vector, even": ((6,), Split(0, (6,), (3,))),
    "vector, entry by entry": ((6,), Split(0, (6,), (6,))),
    "vector, uneven sections": ((10,), Split(0, (6, 2, 2), (3, 2, 1))),
    "vector, repeat": ((12,), Split(0, (4, 1, 1), (2, 1, 1), repeat=2)),
    "vector, pooled": ((12,), Split(0, (4, 1, 1), (2, 1, 1), repeat=2, pooled=True)),
    "rows": ((5, 3), Split(0, (5,), (5,))),
    "columns": ((5, 3), Split(1, (3,), (3,))),
    "heads": ((8, 3), Split(0, (8,), (4,))),
    "heads on the input side": ((3, 8), Split(1, (8,), (4,))),
    "fused": ((12, 5), Split(0, (4, 4, 4), (2, 2, 2))),
    "fused, stored input first": ((5, 12), Split(1, (4, 4, 4), (2, 2, 2))),
    "fused, grouped-query": ((16, 5), Split(0, (8, 4, 4), (4, 2, 2))),
    "fused, parts of unequal size": ((16, 5), Split(0, (8, 4, 4), (2, 2, 1))),
    "one section by row, one whole": ((8, 5), Split(0, (4, 4), (4, 1))),
    "interleaved": ((18, 5), Split(0, (2, 2, 2), (1, 1, 1), repeat=3)),
    "interleaved, grouped-query": ((16, 5), Split(0, (4, 2, 2), (2, 1, 1), repeat=2)),
    "interleaved, unequal": ((5, 14), Split(1, (4, 2, 1), (1, 2, 1), repeat=2)),
    "interleaved, pooled": ((18, 5), Split(0, (2, 2, 2), (1, 1, 1), repeat=3, pooled=True)),
    "interleaved, pooled, one section": ((6, 5), Split(0, (2,), (2,), repeat=3, pooled=True)),
    "interleaved, pooled, unequal": (
        (5, 14),
        Split(1, (4, 2, 1), (1, 2, 1), repeat=2, pooled=True),
    ),
    "pooled without repeat": ((12, 5), Split(0, (6, 6), (3, 1), pooled=True)),
    "experts": ((3, 4, 5), Split(0, (3,), (3,))),
    "middle of three": ((3, 4, 5), Split(1, (4,), (2,))),
    "last of three": ((1, 1, 8), Split(2, (8,), (4,))),
    "last of three, uneven": ((2, 3, 10), Split(2, (6, 4), (3, 1))),
    "stack, whole matrices": ((3, 4, 5), Split(1, (4,), (1,), stack=3)),
    "stack, rows": ((3, 4, 5), Split(1, (4,), (4,), stack=3)),
    "stack, columns": ((3, 4, 5), Split(2, (5,), (5,), stack=3)),
    "stack, fused": ((3, 8, 5), Split(1, (4, 4), (4, 1), stack=3)),
    "stack, fused, stored input first": ((3, 5, 8), Split(2, (4, 4), (2, 2), stack=3)),
    "stack, interleaved": ((3, 5, 8), Split(2, (1, 1), (1, 1), repeat=4, stack=3)),
    "stack, interleaved, pooled": (
        (3, 5, 8),
        Split(2, (1, 1), (1, 1), repeat=4, pooled=True, stack=3),
    ),
    "stack, biases": ((3, 8), Split(1, (4, 4), (4, 4), stack=3)),
    "convolution": ((4, 3, 2, 2), Split(0, (4,), (2,))),
}


@pytest.fixture(params=CASES, ids=str)
def case(request):
    shape, split = CASES[request.param]
    index = block_index(shape, split)
    return shape, split, index, int(index.max()) + 1


def test_the_cases_are_valid_and_their_block_counts_add_up(case):
    shape, split, index, count = case
    assert set(index.flatten().tolist()) == set(range(count))
    if split is not None:
        split.check(shape)
        assert split.num_blocks == count
        assert split.length == shape[split.dim]


def test_block_sum_equals_the_loop(case):
    shape, split, index, count = case
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    looped = torch.zeros(count, dtype=torch.float64)
    for entry, block in zip(x.flatten(), index.flatten().tolist()):
        looped[block] += entry
    torch.testing.assert_close(block_sum(x, split), looped, rtol=1e-12, atol=1e-12)


def test_block_sum_takes_a_tensor_that_is_not_contiguous(case):
    shape, split, _, _ = case
    x = torch.randn((*shape, 2), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = x[..., 0]
    contiguous = x.clone(memory_format=torch.contiguous_format)
    torch.testing.assert_close(block_sum(x, split), block_sum(contiguous, split))


def test_block_numel_equals_the_loop(case):
    shape, split, index, count = case
    numel = block_numel(shape, split)
    assert numel.dtype == torch.int64
    assert numel.tolist() == [int((index == block).sum()) for block in range(count)]


def test_expand_gives_every_entry_the_value_of_its_block(case):
    shape, split, index, count = case
    values = torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wide = expand(values, split, len(shape))
    assert wide.ndim == len(shape)
    assert torch.equal(wide.expand(shape), values[index])


def test_expand_stays_short_along_the_dimensions_that_are_not_cut(case):
    shape, split, _, count = case
    expected = [1] * len(shape)
    for dim in () if split is None else split.dims:
        expected[dim] = shape[dim]
    assert list(expand(torch.zeros(count), split, len(shape)).shape) == expected


def test_is_even_says_whether_all_blocks_have_one_size(case):
    shape, split, _, _ = case
    if split is not None:
        widths = {size // parts for size, parts in zip(split.sizes, split.parts)}
        assert split.is_even == (len(widths) == 1)
        if not split.pooled:
            assert split.is_even == (len(set(block_numel(shape, split).tolist())) == 1)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (Split(2, (4,), (2,)), r"dim=2 for a parameter of shape \(4, 6\)\. Must be in 0\.\.1\."),
        (Split(-1, (6,), (2,)), r"Invalid dim=-1"),
        (Split(0, (4,), (2, 2)), r"Invalid sizes=\(4,\), parts=\(2, 2\)"),
        (Split(0, (), ()), r"Invalid sizes=\(\), parts=\(\)"),
        (Split(0, (4,), (3,)), r"positive multiple of its parts"),
        (Split(0, (4,), (0,)), r"positive multiple of its parts"),
        (Split(0, (4, 0), (1, 1)), r"positive multiple of its parts"),
        (Split(0, (4,), (2,), repeat=0), r"repeat at least 1"),
        (Split(0, (2,), (2,)), r"cover 2 of the 4 entries in dimension 0 .* of shape \(4, 6\)"),
        (Split(1, (6,), (2,), stack=3), r"Invalid stack=3 with dim=1 .* of shape \(4, 6\)"),
        (Split(0, (4,), (2,), stack=4), r"Invalid stack=4 with dim=0"),
        (Split(1, (4,), (2,), repeat=2), r"cover 8 of the 6 entries in dimension 1"),
    ],
)
def test_check_refuses_a_split_that_does_not_fit(split, message):
    with pytest.raises(ValueError, match=message):
        split.check((4, 6))
