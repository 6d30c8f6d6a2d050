"""Attention that a forward pass does not show: names decide, and a warning says so."""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from blockopt import find_blocks
from tests.helpers.expected_blocks import cut

D, H = 12, 3


def recurrence(q, k, v):
    """Linear attention as a running sum of outer products."""
    q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in (q, k, v))
    state = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(dim=2)
    return (q.unsqueeze(-1) * state).sum(dim=-2).transpose(1, 2).flatten(2)


class RecurrentAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = H
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(D, D, bias=False) for _ in range(4)
        )

    def forward(self, x):
        return x + self.o_proj(recurrence(self.q_proj(x), self.k_proj(x), self.v_proj(x)))


class Letters(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x):
        return x + self.b(recurrence(*self.a(x).chunk(3, dim=-1)))


def test_names_decide_about_a_recurrence_and_a_warning_says_so():
    model, x = RecurrentAttention(), torch.randn(2, 5, D)
    with pytest.warns(UserWarning, match=r"no attention that uses 'q_proj.weight' and 2 more"):
        found = find_blocks(model, example=x)
    assert found == find_blocks(model)
    assert found["q_proj.weight"] == cut(0, query=(D, H))


def test_without_names_the_warning_says_that_the_pass_shows_no_attention():
    with pytest.warns(UserWarning, match=r"100% .* no role .*shows no attention, so that names"):
        find_blocks(Letters(), example=torch.randn(2, 5, D))


class Flexible(RecurrentAttention):
    def forward(self, x):
        maps = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (m(x).unflatten(-1, (H, -1)).transpose(1, 2) for m in maps)
        return x + self.o_proj(flex_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile
def test_flex_attention_in_a_pass_is_refused_and_names_work():
    model = Flexible()
    with pytest.raises(ValueError, match=r"flex_attention, .*F\.scaled_dot_product_attention"):
        find_blocks(model, example=torch.randn(2, 5, D))
    assert find_blocks(model)["o_proj.weight"] == cut(1, output=(D, H))


class Merged(nn.Module):
    """An adapter whose factors are multiplied before they meet an activation."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D) / 4, requires_grad=False)
        self.lora_A, self.lora_B = nn.Parameter(torch.rand(2, D)), nn.Parameter(torch.zeros(D, 2))

    def forward(self, x):
        return nn.functional.linear(x, self.weight + self.lora_B @ self.lora_A)


class Adapted(RecurrentAttention):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Merged() for _ in range(4))

    def forward(self, x):
        maps = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (m(x).unflatten(-1, (H, -1)).transpose(1, 2) for m in maps)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.o_proj(y.transpose(1, 2).flatten(2))


def test_merged_factors_are_a_part_of_what_the_pass_shows():
    found = find_blocks(Adapted(), example=torch.randn(2, 5, D))  # a warning is an error
    assert found["k_proj.lora_B"] == cut(0, key=(D, H))
    assert found["k_proj.lora_A"].roles == ("key",)
