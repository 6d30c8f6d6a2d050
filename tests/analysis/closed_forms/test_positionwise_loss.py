"""Networks that act on each position alone, and whole transformer blocks, against autograd."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import jacrev

from blockopt.analysis.closed_forms.output_loss import CrossEntropy, SquaredError
from blockopt.analysis.closed_forms.positionwise_loss import PositionwiseLoss
from blockopt.analysis.closed_forms.self_attention import SelfAttentionHessian
from tests.helpers.attention_reference import attend, autograd_hessian, draw, flat, hessian, unflat

BATCH, LENGTH, WIDTH, CLASSES = 2, 4, 3, 5
ROLES = ("query", "key", "value", "output")


def whole_block(activation=F.gelu, norm=True, seed=0):
    """Attention weights, the network from F to predictions, and the loss on them."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    X, weights, _ = draw(LENGTH, WIDTH, 2, dv=2, batch=BATCH, d_out=WIDTH, seed=seed)
    W_in, W_out, head = normal(WIDTH, 7), normal(7, WIDTH), normal(WIDTH, CLASSES)
    targets = torch.randint(CLASSES, (BATCH, LENGTH), generator=generator)
    normed = (lambda x: F.layer_norm(x, (WIDTH,))) if norm else (lambda x: x)

    def network(output):
        x = X + output
        return normed(x + activation(normed(x) @ W_in) @ W_out) @ head

    return X, weights, network, lambda z: F.cross_entropy(z.flatten(0, 1), targets.flatten())


def attention_hessian(X, weights, loss):
    arguments = (weights[role].squeeze(0) for role in ("query", "key", "value"))
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return SelfAttentionHessian(
        X, *arguments, W_U=weights["output"].squeeze(0), loss=loss, mask=mask
    ), mask


def close(found, expected):
    torch.testing.assert_close(
        found, expected, rtol=1e-10, atol=1e-12 * float(expected.abs().max())
    )


@pytest.mark.parametrize("activation", [F.gelu, F.relu])
@pytest.mark.parametrize("norm", [True, False])
def test_all_blocks_of_a_whole_transformer_block(activation, norm):
    X, weights, network, function = whole_block(activation, norm)
    found, mask = attention_hessian(X, weights, PositionwiseLoss(function, network))
    expected = autograd_hessian(X, weights, lambda output: function(network(output)), mask=mask)
    close(found.dense(), expected)
    start = 0
    for role in ROLES:
        size = weights[role].numel()
        block = expected[start : start + size, start : start + size]
        close(found.factored(role).frobenius(), block.norm())
        close(found.factored(role).diagonal(), block.diagonal())
        start += size


def test_outer_and_functional_parts_split_at_the_predictions():
    X, weights, network, function = whole_block()
    outer, mask = attention_hessian(X, weights, PositionwiseLoss(function, network, part="outer"))
    functional, _ = attention_hessian(
        X, weights, PositionwiseLoss(function, network, part="functional")
    )
    full, _ = attention_hessian(X, weights, PositionwiseLoss(function, network))

    def predict(vector):
        return network(attend(X, unflat(vector, weights), mask))

    J = jacrev(predict)(flat(weights)).flatten(0, -2)
    predictions = predict(flat(weights))
    expected = J.mT @ hessian(lambda z: function(z.view_as(predictions)))(predictions.flatten()) @ J
    close(outer.dense("outer"), expected)
    close(functional.dense("full"), full.dense("full") - expected)
    for role in ROLES:
        norm = functional.factored(role).frobenius()
        close(norm, functional.block(role, role).norm())
    assert float(functional.factored("value").frobenius()) > 0  # norms and GELU bend the network


def test_relu_network_has_no_functional_part():
    X, _, network, function = whole_block(F.relu, norm=False)
    assert (
        float(PositionwiseLoss(function, network, part="functional").curvature(X).abs().max())
        == 0.0
    )
    full, outer = (
        PositionwiseLoss(function, network, part=part).curvature(X) for part in ("full", "outer")
    )
    close(outer, full)


def test_agrees_with_the_closed_losses():
    generator = torch.Generator().manual_seed(1)
    output, Y = (torch.randn(2, 3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    W, left = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (6, 2))
    targets = torch.randint(6, (2, 3), generator=generator)
    pairs = [
        (PositionwiseLoss(lambda x: F.mse_loss(x, Y)), SquaredError(Y)),
        (
            PositionwiseLoss(
                lambda z: F.cross_entropy(z.flatten(0, 1), targets.flatten()), lambda x: x @ W.mT
            ),
            CrossEntropy(W.mT, targets),
        ),
    ]
    for found, expected in pairs:
        close(found.value(output), expected.value(output))
        close(found.gradient(output), expected.gradient(output))
        close(found.curvature(output), expected.curvature(output))
        close(found.curvature(output, left, W), expected.curvature(output, left, W))
        outer = PositionwiseLoss(found.function, found.network, part="outer")
        close(outer.curvature(output, left, W), expected.curvature(output, left, W))


def test_curvature_is_kept_until_a_tensor_changes():
    calls = []
    loss = PositionwiseLoss(lambda x: (calls.append(1), x.pow(4).sum())[1], check=False)
    output = torch.full((1, 2, 1), 2.0)
    assert loss.curvature(output).flatten().tolist() == [48.0, 48.0]
    number = len(calls)
    assert loss.curvature(output).flatten().tolist() == [48.0, 48.0]
    assert len(calls) == number + 1  # for the gradient
    output.fill_(1.0)
    assert loss.curvature(output).flatten().tolist() == [12.0, 12.0]


def test_curvature_after_the_network_has_changed():
    network, output = torch.nn.Linear(2, 1, bias=False), torch.ones(1, 1, 2)
    loss = PositionwiseLoss(lambda x: x.square().sum(), network)
    before = loss.curvature(output)
    with torch.no_grad():
        network.weight.mul_(3)
    torch.testing.assert_close(loss.curvature(output), 9 * before)


@pytest.mark.parametrize(
    "mix", [lambda x: x.cumsum(1), lambda x: x + x.mean(0), lambda x: x.flip(1) * x]
)
def test_mixed_positions_are_refused(mix):
    loss = PositionwiseLoss(lambda x: x.pow(3).mean(), mix)
    with pytest.raises(ValueError, match="Each position must act alone"):
        loss.curvature(torch.rand(2, 4, 3, dtype=torch.float64))


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="Must be one of 'outer', 'functional', 'full'"):
        PositionwiseLoss(torch.sum, part="half")
    with pytest.raises(ValueError, match="Must be a scalar"):
        PositionwiseLoss(torch.square).value(torch.ones(1, 1, 1))
