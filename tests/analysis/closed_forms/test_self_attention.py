"""The closed-form Hessian of self-attention equals autograd's in float64, in every variant."""

import pytest
import torch
import torch.nn.functional as F

from blockopt.analysis.closed_forms.attention_map import AttentionMap
from blockopt.analysis.closed_forms.output_loss import CrossEntropy, SquaredError
from blockopt.analysis.closed_forms.self_attention import SelfAttentionHessian
from tests.helpers.attention_reference import (
    assert_close,
    attend,
    autograd_functional,
    autograd_hessian,
    autograd_jacobian,
    autograd_outer,
    draw,
    mean_squared,
    sizes_of,
)

CAUSAL = torch.ones(4, 4, dtype=torch.bool).tril()
SHAPES = {
    "paper": {},
    "wide keys": {"L": 3, "d": 2, "dk": 4},
    "narrow values": {"dv": 2},
    "batch": {"batch": 3},
    "heads": {"heads": 2},
    "heads with output matrices": {"heads": 2, "dv": 2, "d_out": 3, "batch": 2},
    "one head with an output matrix": {"dv": 2, "d_out": 4},
    "single matrix": {"single": True},
    "single matrix, heads, batch, output": {
        "single": True,
        "heads": 2,
        "batch": 2,
        "dv": 2,
        "d_out": 3,
    },
    "one token": {"L": 1},
}


def make(X, weights, target, cross_entropy, **options):
    """The closed form and the loss for autograd."""
    width = target.shape[-1]
    if cross_entropy:
        generator = torch.Generator().manual_seed(7)
        W = torch.randn(width, 5, generator=generator, dtype=torch.float64)
        classes = torch.randint(5, X.shape[:2], generator=generator)
        loss, plain = (
            CrossEntropy(W, classes),
            lambda o: F.cross_entropy((o @ W).flatten(0, 1), classes.flatten()),
        )
    else:
        loss, plain = SquaredError(target), lambda o: mean_squared(o, target)
    single = "query_key" in weights
    hessian = SelfAttentionHessian(
        X,
        weights["query_key"] if single else weights["query"],
        weights.get("key"),
        weights["value"],
        loss=loss,
        W_U=weights.get("output"),
        parametrization="single" if single else "query_key",
        **options,
    )
    return hessian, plain


@pytest.mark.parametrize("cross_entropy", [False, True], ids=["squared error", "cross-entropy"])
@pytest.mark.parametrize("activation", ["softmax", "linear"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("shape", SHAPES)
def test_dense_equals_autograd(shape, causal, activation, cross_entropy):
    X, weights, target = draw(**SHAPES[shape])
    options = {
        "activation": activation,
        "mask": CAUSAL[: X.shape[1], : X.shape[1]] if causal else None,
    }
    hessian, plain = make(X, weights, target, cross_entropy, **options)
    assert_close(hessian.attention.output, attend(X, weights, **options), 1e-14)
    assert_close(hessian.value(), plain(attend(X, weights, **options)), 1e-14)
    assert_close(hessian.dense(), autograd_hessian(X, weights, plain, **options))
    assert_close(hessian.dense("outer"), autograd_outer(X, weights, plain, **options))
    assert_close(hessian.dense("functional"), autograd_functional(X, weights, plain, **options))


@pytest.mark.parametrize("part", ["outer", "functional", "full"])
@pytest.mark.parametrize("shape", ["paper", "heads with output matrices", "single matrix"])
def test_every_pair_of_roles_and_heads_is_a_block_of_the_whole(shape, part):
    X, weights, target = draw(**SHAPES[shape])
    hessian, _ = make(X, weights, target, cross_entropy=True)
    whole, slices = hessian.dense(part), sizes_of(weights)
    for row in hessian.roles:
        for column in hessian.roles:
            block = hessian.block(row, column, part)
            assert_close(block, whole[slices[row], slices[column]], 1e-12)
            heads = hessian.num_heads
            rows, columns = len(block) // heads, block.shape[1] // heads
            for h in range(heads):
                for other in range(heads):
                    one = hessian.block(row, column, part, heads=(h, other))
                    assert torch.equal(
                        one,
                        block[h * rows : (h + 1) * rows, other * columns : (other + 1) * columns],
                    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ["softmax", "linear"])
def test_jacobians_equal_autograd(shape, activation):
    X, weights, _ = draw(**SHAPES[shape])
    single = "query_key" in weights
    attention = AttentionMap(
        X,
        weights["query_key" if single else "query"],
        weights.get("key"),
        weights["value"],
        W_U=weights.get("output"),
        activation=activation,
        parametrization="single" if single else "query_key",
    )
    found = torch.cat([attention.jacobian(role) for role in attention.roles], 1)
    assert_close(found, autograd_jacobian(X, weights, activation=activation))


def test_functional_part_between_heads_is_zero():
    """Appendix E: with many heads the outer product part is all there is between them."""
    X, weights, target = draw(heads=3, dv=2, d_out=3)
    hessian, plain = make(X, weights, target, cross_entropy=True)
    exact, slices = autograd_functional(X, weights, plain), sizes_of(weights)
    for row in hessian.roles:
        for column in hessian.roles:
            assert float(hessian.block(row, column, "functional", heads=(0, 2)).abs().max()) == 0
            block = exact[slices[row], slices[column]]
            rows, columns = block.shape[0] // 3, block.shape[1] // 3
            assert float(block[:rows, 2 * columns :].abs().max()) < 1e-14
            assert (
                row == column == "value"
                or float(hessian.block(row, column, "outer", heads=(0, 2)).abs().max()) > 1e-6
            )


def test_masks_biases_scales_and_batches_of_masks():
    X, weights, target = draw(batch=2)
    by_sequence = torch.stack([CAUSAL, torch.eye(4, dtype=torch.bool).logical_or(CAUSAL.mT)])
    added = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for options in (
        {"mask": by_sequence},
        {"mask": added},
        {"mask": added.masked_fill(~CAUSAL, -torch.inf)},
        {"scale": 0.3},
    ):
        hessian, plain = make(X, weights, target, True, **options)
        reference = {
            key: value.unsqueeze(1) if key == "mask" and value.ndim == 3 else value
            for key, value in options.items()
        }
        assert_close(hessian.dense(), autograd_hessian(X, weights, plain, **reference))


@pytest.mark.parametrize("activation", ["softmax", "linear"])
def test_biases_are_constants(activation):
    X, weights, target = draw(heads=2, dv=2, d_out=3, batch=2)
    generator = torch.Generator().manual_seed(5)
    roles = ("query", "key", "value")
    biases = {
        role: torch.randn(2, weights[role].shape[-1], generator=generator, dtype=torch.float64)
        for role in roles
    }
    hessian, plain = make(X, weights, target, True, biases=biases, activation=activation)
    assert_close(
        hessian.dense(), autograd_hessian(X, weights, plain, biases=biases, activation=activation)
    )
    assert_close(
        hessian.factored("key", 1).diagonal(), hessian.block("key", "key", heads=(1, 1)).diagonal()
    )
    with pytest.raises(ValueError, match=r"Invalid bias of key of shape \(3,\)\. Must be \(2, 2\)"):
        make(X, weights, target, True, biases={"key": torch.ones(3).double()})
    with pytest.raises(
        ValueError, match=r"Invalid biases \['gate'\]\. Must be of query, key, value, output"
    ):
        make(X, weights, target, True, biases={"gate": torch.ones(3).double()})
    with pytest.raises(
        ValueError, match=r"Invalid bias of output of shape \(2,\)\. Must be \(3,\)"
    ):
        make(X, weights, target, True, biases={"output": torch.ones(2).double()})


def test_one_sequence_without_a_batch_dimension():
    X, weights, target = draw()
    plain = SelfAttentionHessian(
        X[0], *(weights[role][0] for role in ("query", "key", "value")), target[0]
    )
    batched = SelfAttentionHessian(X, *weights.values(), target)
    assert torch.equal(plain.dense(), batched.dense())


def test_tokens_far_from_the_origin_keep_their_digits():
    """With zero queries attention is uniform, and moments do not see a shift of the tokens."""
    X, weights, _ = draw()
    near, far = (
        AttentionMap(x, 0 * weights["query"], weights["key"], weights["value"]).heads[0]
        for x in (X, X + 1e6)
    )
    assert_close(far.covariance("value", "key"), near.covariance("value", "key"), 1e-8)
    g = torch.ones_like(near.value)
    w = near.score_gradient(g)
    assert_close(far.score_gradient(g), w, 1e-8)
    assert_close(far.third_moment(w, "key", "x"), near.third_moment(w, "key", "x"), 1e-8)


class TestErrors:
    def test_shapes_and_options(self):
        X, weights, target = draw()
        q, k, v = weights.values()
        for arguments, options, message in (
            ((X, q, k, v), {}, "Give either Y"),
            ((X, q, k, v, target), {"loss": SquaredError(target)}, "Give either Y"),
            ((X[0, 0], q, k, v, target), {}, "Invalid X of shape"),
            ((X.long(), q, k, v, target), {}, "of floating point"),
            ((X, q.float(), k, v, target), {}, r"Invalid W_Q of torch.float32.*W_Q\.to\(X\)"),
            ((X * torch.nan, q, k, v, target), {}, "Invalid X: it has entries that are not finite"),
            ((X[:, :0], q, k, v, target), {}, "Must not be empty"),
            ((X, q, k, v, target), {"mask": CAUSAL.long()}, r"Use mask\.bool\(\)"),
            ((X, q, k, v, target), {"mask": CAUSAL.double()}, r"Use mask\.bool\(\)"),
            ((X, q, k, v, target), {"mask": CAUSAL.double() * torch.inf}, "must not be NaN or"),
            ((X, q, k[:, :, :1], v, target), {}, "Invalid W_K of shape"),
            ((X, q, k, v[:, :2], target), {}, "Invalid W_V of shape"),
            ((X, q[0, 0], k, v, target), {}, "Invalid W_Q of shape"),
            ((X, q, None, v, target), {}, "pass W_K"),
            ((X, q, k, v, target), {"parametrization": "single"}, "None for W_K"),
            ((X, q, k, v, target), {"parametrization": "double"}, "Invalid parametrization"),
            ((X, q, k, v, target), {"activation": "relu"}, "Invalid activation"),
            ((X, q, k, v, target), {"mask": CAUSAL[:2, :2]}, "Invalid mask of shape"),
            ((X, q, k, v, target), {"mask": torch.zeros(4, 4, dtype=torch.bool)}, "sees no other"),
            (
                (X, q, k, v, target),
                {"mask": torch.zeros(4, 4), "activation": "linear"},
                "Must be bool",
            ),
            ((X, q, k, v, target[:, :2]), {}, "Invalid target of shape"),
            (
                (X, q, k, v),
                {"loss": CrossEntropy(torch.ones(2, 5), torch.zeros(1, 4, dtype=torch.long))},
                "Invalid weight of shape",
            ),
            (
                (X, q, k, v),
                {"loss": CrossEntropy(torch.ones(3, 5).double(), torch.zeros(1, 3).long())},
                "Invalid targets of shape",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                SelfAttentionHessian(*arguments, **options)

    def test_roles_and_parts(self):
        X, weights, target = draw()
        hessian = SelfAttentionHessian(X, *weights.values(), target)
        with pytest.raises(ValueError, match="Invalid role='output'"):
            hessian.block("output", "query")
        with pytest.raises(ValueError, match="Invalid part='half'"):
            hessian.block("query", "query", part="half")
        with pytest.raises(ValueError, match="Must be one of 'outer', 'functional', 'full'"):
            hessian.factored("query", part="score_outer")
        for head in (-1, 1, True, 0.0):
            with pytest.raises(
                ValueError, match=f"Invalid head={head!r}. Must be an integer from 0 to 0"
            ):
                hessian.factored("query", head)
            with pytest.raises(ValueError, match="Invalid head="):
                hessian.block("query", "query", heads=(0, head))
            with pytest.raises(ValueError, match="Invalid head="):
                hessian.score_functional_spectrum(head)
        with pytest.raises(ValueError, match=r"Invalid heads=\(0,\)"):
            hessian.block("query", "query", heads=(0,))
        with pytest.raises(ValueError, match="Invalid g of shape"):
            hessian.attention.functional("query", "key", target.mT)

    def test_targets_of_cross_entropy(self):
        for targets, message in (
            (torch.zeros(2), "Must be the numbers of the classes"),
            (torch.tensor([0, -1]), "or -100 for positions that do not count"),
            (torch.tensor([-100, -100]), "none counts"),
            (torch.tensor([0, 3]), "from 0 to 2"),
            (torch.tensor([0, 1], dtype=torch.int32), "torch.int64"),
        ):
            with pytest.raises(ValueError, match=message):
                CrossEntropy(torch.ones(2, 3), targets)
        with pytest.raises(ValueError, match="Invalid bias of shape"):
            CrossEntropy(torch.ones(2, 3), torch.tensor([0, 1]), torch.ones(2))


@pytest.mark.parametrize("shape", ["heads with output matrices", "wide keys"])
def test_targets_that_do_not_count(shape):
    X, weights, target = draw(**SHAPES[shape])
    generator = torch.Generator().manual_seed(7)
    W = torch.randn(target.shape[-1], 5, generator=generator, dtype=torch.float64)
    classes = torch.randint(5, X.shape[:2], generator=generator)
    classes[0, ::2] = -100
    hessian = SelfAttentionHessian(
        *(X, weights["query"], weights["key"], weights["value"]),
        loss=CrossEntropy(W, classes),
        W_U=weights.get("output"),
    )
    plain = lambda o: F.cross_entropy((o @ W).flatten(0, 1), classes.flatten())  # noqa: E731
    assert_close(hessian.value(), plain(attend(X, weights)), 1e-14)
    assert_close(hessian.dense(), autograd_hessian(X, weights, plain))
    assert_close(hessian.dense("outer"), autograd_outer(X, weights, plain))
    for role in hessian.roles:
        block = hessian.block(role, role, heads=(0, 0))
        assert_close(hessian.factored(role).squared_frobenius(), block.square().sum())


def test_weights_that_require_gradients():
    """Parameters of a model go in as they are, and no graph comes out."""
    X, weights, target = draw()
    head = torch.nn.Linear(3, 5, bias=False).double()
    trained = {role: w.clone().requires_grad_() for role, w in weights.items()}
    for loss in (
        CrossEntropy(head.weight.T, torch.zeros(1, 4, dtype=torch.long)),
        SquaredError(target.requires_grad_()),
    ):
        hessian = SelfAttentionHessian(X.requires_grad_(), *trained.values(), loss=loss)
        plain = SelfAttentionHessian(X, *weights.values(), loss=loss)
        assert not hessian.dense().requires_grad
        assert torch.equal(hessian.dense(), plain.dense())
        assert not hessian.factored("key").trace().requires_grad
