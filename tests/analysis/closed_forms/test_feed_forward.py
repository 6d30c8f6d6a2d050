"""MLP blocks and linear networks: closed forms against autograd in float64."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, jacrev

from blockopt.analysis.closed_forms.activations import activation_derivatives
from blockopt.analysis.closed_forms.feed_forward import FeedForwardHessian, FeedForwardMap
from blockopt.analysis.closed_forms.linear_network import LinearNetworkHessian
from blockopt.analysis.closed_forms.output_loss import CrossEntropy, SquaredError
from tests.helpers.transformer_block import ACTS as NONLINEAR
from tests.helpers.transformer_block import close, draw

ACTS = {"identity": lambda z: z, **NONLINEAR}
CASES = [(activation, gated) for activation in ACTS for gated in (False, True)]


def weights(gated, d=3, m=4, out=2):
    drawn = {
        "mlp_in": draw(d, m, seed=1),
        "mlp_in_bias": draw(m, seed=2),
        "mlp_gate": draw(d, m, seed=3),
    }
    drawn |= {"mlp_out": draw(m, out, seed=4), "mlp_out_bias": draw(out, seed=5)}
    return drawn if gated else {role: W for role, W in drawn.items() if role != "mlp_gate"}


def reference(Y, w, activation):
    u = Y @ w["mlp_in"] + w["mlp_in_bias"]
    hidden = ACTS[activation](Y @ w["mlp_gate"]) * u if "mlp_gate" in w else ACTS[activation](u)
    return hidden @ w["mlp_out"] + w["mlp_out_bias"]


def build(Y, w, activation):
    options = {
        "W_gate": w.get("mlp_gate"),
        "b_in": w["mlp_in_bias"],
        "b_out": w["mlp_out_bias"],
        "activation": activation,
    }
    return FeedForwardMap(Y, w["mlp_in"], w["mlp_out"], **options)


@pytest.mark.parametrize("activation", ACTS)
def test_activation_derivatives(activation):
    z = torch.tensor([-30.0, -3.0, -1.5, -0.2, 0.1, 0.8, 2.5, 30.0]).double()
    first = jacrev(lambda t: ACTS[activation](t).sum())
    expected = ACTS[activation](z), first(z), jacrev(lambda t: first(t).sum())(z)
    for ours, theirs in zip(activation_derivatives(z, activation), expected):
        close(ours, theirs, 1e-12)


@pytest.mark.parametrize(("activation", "gated"), CASES)
def test_jacobians_and_contracted_hessians(activation, gated):
    Y, w, g = draw(2, 3, 3), weights(gated), draw(2, 3, 2, seed=6)
    mlp = build(Y, w, activation)
    assert mlp.roles == tuple(w)
    close(mlp.output, reference(Y, w, activation))
    jacobians = jacrev(lambda w: reference(Y, w, activation))(w)
    for role in w:
        close(mlp.jacobian(role), jacobians[role].reshape(12, -1))
    rows = Y.reshape(6, 3)
    close(
        mlp.input_jacobian(),
        torch.stack([jacrev(lambda y: reference(y, w, activation))(row) for row in rows]),
    )
    second = jacrev(
        jacrev(lambda w, Y: (g * reference(Y, w, activation)).sum(), argnums=(0, 1)), argnums=(0, 1)
    )(w, Y)
    for a in w:
        for b in w:
            close(mlp.functional(a, b, g), second[0][a][0][b].reshape(w[a].numel(), w[b].numel()))
        close(mlp.mixed_hessian(a, g), second[0][a][1].reshape(w[a].numel(), 6, 3))
    whole = second[1][1].reshape(6, 3, 6, 3)
    close(torch.block_diag(*mlp.input_hessian(g)), whole.reshape(18, 18))


def losses(out):
    targets = torch.tensor([[0, 3, 1], [2, 2, 0]])
    return {
        "mse": SquaredError(draw(2, 3, out, seed=8)),
        "ce": CrossEntropy(draw(out, 4, seed=9), targets, draw(4, seed=10)),
    }


@pytest.mark.parametrize(("activation", "gated"), CASES)
@pytest.mark.parametrize("kind", ["mse", "ce"])
def test_loss_hessian_and_its_parts(activation, gated, kind):
    Y, w, loss = draw(2, 3, 3), weights(gated), losses(2)[kind]
    ours = FeedForwardHessian(build(Y, w, activation), loss)
    second = jacrev(jacrev(lambda w: loss.value(reference(Y, w, activation))))(w)
    rows = [torch.cat([second[a][b].reshape(w[a].numel(), -1) for b in w], 1) for a in w]
    close(ours.dense(), torch.cat(rows))
    jacobians = jacrev(lambda w: reference(Y, w, activation))(w)
    J = torch.cat([jacobians[a].reshape(12, -1) for a in w], 1)
    output = reference(Y, w, activation)
    curvature = jacrev(jacrev(loss.value))(output).reshape(12, 12)
    close(ours.dense("outer"), J.T @ curvature @ J)
    close(ours.dense("outer") + ours.dense("functional"), ours.dense())
    close(ours.block("mlp_in", "mlp_out"), second["mlp_in"]["mlp_out"].reshape(12, 8))
    for role in w:
        for part in ("outer", "functional", "full"):
            block, factored = ours.block(role, role, part), ours.factored(role, part)
            close(factored.trace(), block.trace())
            close(factored.diagonal(), block.diagonal())
            close(factored.squared_frobenius(), block.square().sum())
            v = draw(len(block), 2, seed=11)
            close(factored @ v, block @ v)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
def test_chunks_change_nothing(gated, rows, monkeypatch):
    """4 of the 6 rows at a time, or 1; and so for the slabs of the factored matrices."""
    Y, w, loss, g = draw(2, 3, 3), weights(gated), losses(2)["ce"], draw(2, 3, 2, seed=6)

    def results():
        mlp = build(Y, w, "gelu")
        block = FeedForwardHessian(mlp, loss).factored("mlp_in")
        return (
            mlp.input_jacobian(),
            mlp.input_hessian(g),
            block.diagonal(),
            block.squared_frobenius(),
        )

    expected = results()
    monkeypatch.setattr("blockopt.analysis.closed_forms.feed_forward.CHUNK_BYTES", rows * 12 * 8)
    monkeypatch.setattr(
        "blockopt.analysis.closed_forms.unit_matrices.CHUNK_BYTES", 3 * rows * 6 * 4 * 8 // 4
    )
    for ours, theirs in zip(results(), expected):
        close(ours, theirs, 1e-13)


def test_relu_diagonal_blocks_have_no_functional_part():
    ours = FeedForwardHessian(build(draw(2, 3, 3), weights(False), "relu"), losses(2)["mse"])
    assert ours.block("mlp_in", "mlp_in", "functional").abs().max() == 0
    assert ours.block("mlp_in", "mlp_out", "functional").abs().max() > 0


def test_agrees_with_a_module():
    module = torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.GELU(), torch.nn.Linear(5, 2)
    ).double()
    Y, target = draw(4, 3), draw(4, 2, seed=1)
    params = {name: p.detach() for name, p in module.named_parameters()}
    second = jacrev(jacrev(lambda p: F.mse_loss(functional_call(module, p, Y), target)))(params)
    names = {
        "mlp_in": "0.weight",
        "mlp_in_bias": "0.bias",
        "mlp_out": "2.weight",
        "mlp_out_bias": "2.bias",
    }
    w = {role: params[name].T for role, name in names.items() if params[name].ndim == 2}
    mlp = FeedForwardMap(
        Y, w["mlp_in"], w["mlp_out"], b_in=params["0.bias"], b_out=params["2.bias"]
    )
    block = (
        FeedForwardHessian(mlp, SquaredError(target))
        .block("mlp_in", "mlp_out_bias")
        .reshape(3, 5, 2)
    )
    close(block, second["0.weight"]["2.bias"].transpose(0, 1))


@pytest.mark.parametrize("sizes", [(3, 2), (3, 4, 2), (2, 3, 4, 2), (2, 3, 2, 3, 2)])
@pytest.mark.parametrize("kind", ["mse", "ce"])
def test_linear_networks(sizes, kind):
    X, loss = draw(2, 3, sizes[0]), losses(2)[kind]
    W = tuple(draw(a, b, seed=20 + i) for i, (a, b) in enumerate(pairwise(sizes)))

    def network(W):
        return (
            torch.linalg.multi_dot([X.flatten(0, 1), *W]).unflatten(0, (2, 3))
            if len(W) > 1
            else X @ W[0]
        )

    ours = LinearNetworkHessian(X, W, loss)
    second = jacrev(jacrev(lambda W: loss.value(network(W))))(W)
    rows = [
        torch.cat([block.reshape(a.numel(), -1) for block in row], 1) for a, row in zip(W, second)
    ]
    close(ours.dense(), torch.cat(rows))
    J = torch.cat([block.reshape(12, -1) for block in jacrev(network)(W)], 1)
    close(ours.dense("outer"), J.T @ jacrev(jacrev(loss.value))(network(W)).reshape(12, 12) @ J)
    for i in range(len(W)):
        assert ours.block(i, i, "functional").abs().max() == 0  # block-hollow
    close(ours.dense("outer") + ours.dense("functional"), ours.dense())
    if kind == "mse":  # Singh et al.: data enter a diagonal block through the covariance alone
        before = torch.linalg.multi_dot(
            [torch.eye(sizes[0]).double(), *W[:-1], torch.eye(sizes[-2]).double()]
        )
        covariance = X.flatten(0, 1).T @ X.flatten(0, 1)
        expected = (
            2
            / 12
            * torch.kron((before.T @ covariance @ before).contiguous(), torch.eye(2).double())
        )
        close(ours.block(len(W) - 1, len(W) - 1, "outer"), expected)


def test_errors():
    w = weights(False)
    mlp = build(draw(6, 3), w, "gelu")
    with pytest.raises(ValueError, match="Invalid activation='tanh'"):
        build(draw(6, 3), w, "tanh")
    with pytest.raises(ValueError, match="Invalid W_in of shape"):
        build(draw(6, 2), w, "gelu")
    with pytest.raises(ValueError, match="Invalid weights of shapes"):
        FeedForwardMap(draw(6, 3), draw(3), draw(4, 2))
    with pytest.raises(ValueError, match="Invalid role='mlp_gate'"):
        mlp.jacobian("mlp_gate")
    hessian = FeedForwardHessian(mlp, SquaredError(draw(6, 2)))
    with pytest.raises(ValueError, match="Invalid part='inner'"):
        hessian.block("mlp_in", "mlp_in", "inner")
    with pytest.raises(ValueError, match="at least one"):
        LinearNetworkHessian(draw(6, 2), [], SquaredError(draw(6, 2)))
    with pytest.raises(ValueError, match="Invalid weight 1 of shape"):
        LinearNetworkHessian(draw(6, 2), [draw(2, 3), draw(2, 2)], SquaredError(draw(6, 2)))
    linear = LinearNetworkHessian(draw(6, 2), [draw(2, 3), draw(3, 2)], SquaredError(draw(6, 2)))
    for number in (-1, 2):  # no counting from the end
        with pytest.raises(
            ValueError, match=f"Invalid column={number}. Must be an integer from 0 to 1"
        ):
            linear.block(0, number)
    with pytest.raises(ValueError, match=r"Invalid W_in of torch\.float32"):
        FeedForwardMap(draw(6, 3), draw(3, 4).float(), draw(4, 2))


def test_what_does_not_fit_is_refused():
    large = torch.ones(1, 1024, dtype=torch.float64)
    W = torch.ones(1024, 1024, dtype=torch.float64)
    with pytest.raises(ValueError, match="GiB"):
        LinearNetworkHessian(large, [W, W], SquaredError(large)).dense()
    with pytest.raises(ValueError, match="GiB"):
        FeedForwardHessian(FeedForwardMap(large, W, W), SquaredError(large)).dense()
