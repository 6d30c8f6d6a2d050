"""The Hessian of stacked transformer blocks equals autograd in float64, embeddings included."""

import itertools

import pytest
import torch
from torch.func import jacrev

from blockopt.analysis import INPUT, LayerWeight, StackedBlocksHessian, lookup_rows
from blockopt.analysis.closed_forms.output_loss import CrossEntropy, SquaredError
from tests.analysis.closed_forms.test_transformer_block import CASES, make_loss
from tests.helpers.transformer_block import D, L, close, draw, forward, make_weights


@pytest.mark.parametrize("names", [("gpt2, not last", "qwen3"), ("paper",) * 3])
def test_all_pairs_equal_autograd(names):
    """Blocks of different kinds in one stack; the loss is that of the last."""
    shapes, options, kinds, batches = zip(*(CASES[name] for name in names))
    batch = batches[0]
    X, loss = draw(*batch, L, D), make_loss(kinds[-1], batch)
    layers = [make_weights(**shape) for shape in shapes]
    layers = [{r: (1 + 0.2 * n) * w for r, w in layer.items()} for n, layer in enumerate(layers)]
    ours = StackedBlocksHessian(X, layers, loss, options)
    params = {INPUT: X} | {w: layers[w.layer][w.role] for w in ours.weights}

    def run(params):
        x = params["-1 input"]
        for number, (layer, chosen) in enumerate(zip(layers, options)):
            weights = {role: params[f"{number} {role}"] for role in layer}
            x = forward(x, weights, **{"norm": "layer"} | chosen)
        return x

    named = {f"{w.layer} {w.role}": p for w, p in params.items()}
    close(ours.output.reshape(X.shape), run(named))
    second = jacrev(jacrev(lambda p: loss.value(run(p))))(named)
    first = jacrev(run)(named)
    for w in params:
        close(ours.jacobian(w), first[f"{w.layer} {w.role}"].reshape(X.numel(), -1))
    for a, b in itertools.product(params, params):
        exact = second[f"{a.layer} {a.role}"][f"{b.layer} {b.role}"]
        exact = exact.reshape(params[a].numel(), -1)
        close(ours.block(a, b), exact)
        if a.layer <= b.layer:
            close(ours.block(a, b, "outer") + ours.block(a, b, "functional"), exact)
    whole = ours.dense()
    close(whole, whole.mT)
    gradient = jacrev(lambda p: loss.value(run(p)))(named)["-1 input"]
    close(ours.gradient_of_input.reshape(X.shape), gradient)


def test_embedding_of_a_two_layer_model():
    ids = torch.tensor([[1, 0, 1], [4, 4, 2]])
    table, head = draw(5, D, seed=1), draw(D, 5, seed=2)
    targets = torch.tensor([[0, -100, 2], [4, 1, 1]])
    loss, layers = CrossEntropy(head, targets), [make_weights(heads=2), make_weights(heads=2)]
    ours = StackedBlocksHessian(table[ids], layers, loss)

    def value(table):
        x = table[ids]
        for number, layer in enumerate(layers):
            x = forward(x, layer, "pre", "layer", final_norm=number == 1)
        return loss.value(x)

    close(ours.value(), value(table))
    by_table = lookup_rows(ours.block(INPUT, INPUT), ids, 5)
    exact = jacrev(jacrev(value))(table).reshape(5 * D, -1)
    close(lookup_rows(by_table.mT, ids, 5), exact)


def test_errors():
    X, layer, loss = draw(L, D), make_weights(), SquaredError(draw(L, D, seed=3))
    with pytest.raises(ValueError, match="Invalid layers: there are none"):
        StackedBlocksHessian(X, [], loss)
    with pytest.raises(ValueError, match=r"Invalid options for 1 blocks\. Must be for all 2"):
        StackedBlocksHessian(X, [layer, layer], loss, [{}])
    stack = StackedBlocksHessian(X, [layer], loss)
    with pytest.raises(ValueError, match="Invalid layer=1"):
        stack.block(LayerWeight(1, "query"), INPUT)
    with pytest.raises(ValueError, match="Invalid role='gate'"):
        stack.jacobian(LayerWeight(0, "gate"))
