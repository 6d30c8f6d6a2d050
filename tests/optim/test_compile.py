"""A compiled step equals the eager one, and setting scales does not recompile it."""

import pytest
import torch
from torch import nn

import blockopt
from tests.helpers.optimizers import (
    OPTIMIZERS,
    assert_same_weights,
    random_gradients,
    random_scales,
    set_gradients,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)


# Inductor takes 20 s where nothing is cached: it compiles the step with orthogonalization and block
# second moments. For the others the graph is enough, which decides about recompilation.
WITH_INDUCTOR = "muon-block"


def few_parameters():
    """Rows, heads in a fused matrix and in columns, and vectors: compilation is slow for more."""
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"embedding": nn.Embedding(19, 8), "attention": nn.MultiheadAttention(8, 2)}
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_step_equals_eager_and_scales_do_not_recompile(name, monkeypatch):
    # bfloat16 would round differently where it is fused.
    monkeypatch.setattr("blockopt.optim.newton_schulz.CPU_DTYPE", torch.float32)
    torch._dynamo.reset()
    eager, compiled = few_parameters(), few_parameters()
    a = OPTIMIZERS[name](blockopt.param_groups(eager), lr=torch.tensor(1e-2))
    b = OPTIMIZERS[name](blockopt.param_groups(compiled), lr=torch.tensor(1e-2))
    step = torch.compile(b.step, backend="inductor" if name == WITH_INDUCTOR else "aot_eager")
    for turn in range(6):
        if turn in (2, 4):
            a.set_block_scales(random_scales(a, seed=turn))
            b.set_block_scales(random_scales(b, seed=turn))
        gradients = random_gradients(eager, turn)
        for model in (eager, compiled):
            for parameter_name, parameter in model.named_parameters():
                if parameter.grad is None:
                    set_gradients(model, gradients)
                with torch.no_grad():
                    parameter.grad.copy_(gradients[parameter_name])
        a.step()
        with torch._dynamo.config.patch(error_on_recompile=turn >= 2):
            step()
    assert_same_weights(eager, compiled, rtol=1e-5, atol=1e-5)


def test_compiled_step_refuses_a_nonfinite_gradient():
    torch._dynamo.reset()
    model, untouched = few_parameters(), few_parameters()
    optimizer = blockopt.BlockAdamW(blockopt.param_groups(model), lr=torch.tensor(1e-2))
    gradients = random_gradients(model, 0)
    gradients["embedding.weight"][0, 0] = float("nan")
    set_gradients(model, gradients)
    with pytest.raises(FloatingPointError, match=r"embedding\.weight"):
        torch.compile(optimizer.step, backend="aot_eager")()
    assert_same_weights(model, untouched)
