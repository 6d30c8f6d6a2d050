"""`capture_attention` leaves no trace, and sees fast paths, compiled and checkpointed models."""

from contextlib import nullcontext, suppress
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from blockopt.measure.attention_capture import capture_attention
from tests.helpers.attention_calls import (
    CALLS,
    HEADS,
    Attention,
    assert_consistent,
    family_model,
    mixed_values,
    seeded,
)
from tests.helpers.matrices import normal
from tests.helpers.models import BATCH, LENGTH, WIDTH, loss_of

HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)


def snapshot(model):
    hooks = [{name: dict(getattr(module, name)) for name in HOOKS} for module in model.modules()]
    stance = torch._dynamo.eval_frame._stance.stance
    return hooks, F.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled(), stance


@pytest.mark.parametrize("fastpath", [True, False])
@pytest.mark.parametrize("family", ["llama", "decoder_layer"])
def test_nothing_is_left_behind(family, fastpath):
    model = family_model(family)
    next(model.children()).register_forward_pre_hook(lambda *_: None)
    usual = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fastpath)
    try:
        before = snapshot(model)
        with capture_attention(model) as calls:
            loss_of(family, model)
            assert not torch.backends.mha.get_fastpath_enabled()
            assert snapshot(model) != before
        assert snapshot(model) == before
        loss_of(family, model)
        assert len(calls) == 2
    finally:
        torch.backends.mha.set_fastpath_enabled(usual)


def test_nothing_is_left_behind_after_an_exception():
    model = seeded(nn.TransformerDecoderLayer, WIDTH, HEADS, batch_first=True)
    x = normal(BATCH, LENGTH, WIDTH)
    before = snapshot(model)
    # The error is that of the model, not that nothing was seen.
    with pytest.raises(RuntimeError, match="attn_mask"), capture_attention(model):
        model(x, x, memory_mask=torch.zeros(2, 3, dtype=torch.float64))
    assert snapshot(model) == before


class Careful(nn.Module):
    """Attends without projections where attention with them fails."""

    def __init__(self):
        super().__init__()
        self.attention = Attention(self.fail)

    def fail(self, *_):
        raise ZeroDivisionError

    def forward(self, x):
        with suppress(ZeroDivisionError):
            self.attention(x)
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("in_hook", [False, True])
def test_exception_inside_does_not_confuse_the_names(in_hook):
    model = nn.Sequential(seeded(Careful), seeded(Attention, F.scaled_dot_product_attention))
    if in_hook:
        model[0].attention.register_forward_pre_hook(model[0].fail)
    with capture_attention(model) as calls:
        model(normal(BATCH, LENGTH, WIDTH))
    assert [call.module for call in calls] == ["0", "1"]


def test_attention_that_raised_is_not_unseen():
    model, x = seeded(Careful), normal(BATCH, LENGTH, WIDTH)
    model = nn.ModuleList([model, seeded(Attention, F.scaled_dot_product_attention)])
    with capture_attention(model) as calls:
        with pytest.raises(ZeroDivisionError):
            model[0].attention(x)
        model[1](x)
    assert [call.module for call in calls] == ["1"]


def loss_and_gradients(family, model, context):
    model.zero_grad()
    with context:
        loss = loss_of(family, model)
        loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", CALLS)
def test_loss_and_gradients_are_the_same_bit_by_bit(family):
    model = family_model(family).eval()
    plain_loss, plain = loss_and_gradients(family, model, nullcontext())
    loss, gradients = loss_and_gradients(family, model, capture_attention(model))
    assert torch.equal(loss, plain_loss)
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))


def test_dropout_is_recorded_and_draws_the_same_numbers():
    model = seeded(Attention, partial(F.scaled_dot_product_attention, dropout_p=0.25))
    x = normal(BATCH, LENGTH, WIDTH)
    torch.manual_seed(1)
    plain = model(x)
    torch.manual_seed(1)
    with capture_attention(model) as calls:
        output = model(x)
    assert torch.equal(output, plain)
    assert calls[0].dropout == 0.25
    assert not torch.allclose(mixed_values(calls[0]), calls[0].output)


@pytest.mark.parametrize("family", [f for f, calls in CALLS.items() if calls])
def test_gradients_at_the_tensors_of_a_call(family):
    model = family_model(family)
    with capture_attention(model) as calls:
        loss = loss_of(family, model)
    for call in calls:
        # LoRA leaves the first keys frozen.
        inputs = [t for t in (call.query, call.key, call.value) if t.requires_grad]
        *gradients, at_output = torch.autograd.grad(loss, [*inputs, call.output], retain_graph=True)
        chained = torch.autograd.grad(call.output, inputs, at_output, retain_graph=True)
        assert call.query.requires_grad
        assert all(g.count_nonzero() for g in gradients)
        assert all(torch.equal(a, b) for a, b in zip(gradients, chained, strict=True))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("padded", [False, True])
def test_inference_fast_path_is_seen(padded):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, dim_feedforward=24, batch_first=True)
    model = seeded(nn.TransformerEncoder, layer, num_layers=2).eval()
    x, padding = normal(BATCH, LENGTH, WIDTH), torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[0, -2:] = True
    options = {"src_key_padding_mask": padding} if padded else {}
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        fast = Mock(wraps=torch._transformer_encoder_layer_fwd)
        patch.setattr(torch, "_transformer_encoder_layer_fwd", fast)
        expected = model(x, **options)
        assert fast.call_count == 2  # or else there is nothing to test
        with capture_attention(model) as calls:
            output = model(x, **options)
        assert fast.call_count == 2
    assert [call.module for call in calls] == ["layers.0.self_attn", "layers.1.self_attn"]
    torch.testing.assert_close(output[~padding], expected[~padding])
    for call in calls:
        assert_consistent(call)
        assert (call.weights()[0, :, :, -2:] == 0).all() == padded


def test_fast_path_of_attention_alone_is_seen():
    model = seeded(nn.MultiheadAttention, WIDTH, HEADS, batch_first=True).eval()
    x = normal(BATCH, LENGTH, WIDTH)
    with torch.no_grad(), capture_attention(model) as calls:
        model(x, x, x, need_weights=False)
    assert_consistent(calls[0])


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_model_is_seen_and_not_compiled_again(in_place):
    torch._dynamo.reset()
    compilations = []

    def backend(graph, _):
        compilations.append(graph)
        return graph.forward

    model = family_model("nanogpt")
    if in_place:
        model.compile(backend=backend)
    else:
        model = torch.compile(model, backend=backend)
    loss = loss_of("nanogpt", model)
    before = len(compilations)
    assert before > 0
    with capture_attention(model) as calls:
        captured = loss_of("nanogpt", model)
    prefix = "" if in_place else "_orig_mod."
    assert [call.module for call in calls] == [f"{prefix}h.{i}.attn" for i in range(2)]
    torch.testing.assert_close(captured, loss)
    assert torch.autograd.grad(captured, calls[0].query)[0].count_nonzero()
    loss_of("nanogpt", model)
    assert len(compilations) == before


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.attention, self.reentrant = Attention(F.scaled_dot_product_attention), reentrant

    def forward(self, x):
        return checkpoint(self.attention, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("frozen", [(), ("q_proj", "o_proj")])
def test_recomputation_in_the_backward_pass_is_not_recorded(reentrant, frozen):
    model, x = seeded(Checkpointed, reentrant), normal(BATCH, LENGTH, WIDTH).requires_grad_()
    for name in frozen:
        getattr(model.attention, name).requires_grad_(False)
    with capture_attention(model) as calls:
        torch.autograd.backward(model(x).square().sum())
    assert [call.module for call in calls] == ["attention"]
    assert x.grad.count_nonzero()
    assert calls[0].query.requires_grad is not reentrant


def test_backward_pass_inside_of_a_forward_is_not_recorded():
    class Penalised(Checkpointed):
        def forward(self, x):
            y = super().forward(x)
            torch.autograd.backward(y.square().sum(), inputs=x)
            return y

    model, x = seeded(Penalised, reentrant=False), normal(BATCH, LENGTH, WIDTH).requires_grad_()
    with capture_attention(model) as calls:
        model(x)
    assert [call.module for call in calls] == ["attention"]
    assert x.grad.count_nonzero()
