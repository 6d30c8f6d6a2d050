"""The Hessian of a transformer block against autograd in float64, whole and factored."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jacrev

from blockopt.analysis.closed_forms.output_loss import CrossEntropy, SquaredError
from blockopt.analysis.closed_forms.rotary_positions import RotaryPositions
from blockopt.analysis.closed_forms.score_vectors import HeadNorm
from blockopt.analysis.closed_forms.transformer_block import TransformerBlockHessian
from tests.helpers.transformer_block import D, L, M, close, draw, forward, make_weights


def make_loss(kind, batch):
    if kind == "mse":
        return SquaredError(draw(*batch, L, D, seed=90))
    return CrossEntropy(
        draw(D, 6, seed=91),
        torch.randint(6, (*batch, L), generator=torch.Generator().manual_seed(0)),
    )


CAUSAL = torch.ones(L, L).tril().bool()
BIASES = ("mlp_in_bias", "mlp_out_bias")
PROJECTION_BIASES = ("query_bias", "key_bias", "value_bias", "output_bias")
FIRST = ("first_gain", "first_bias")
GAINS = ("middle_gain", "middle_bias", "final_gain", "final_bias")
CASES = {
    "paper": ({}, {"arrangement": "post", "activation": "relu", "epsilon": 0.0}, "mse", ()),
    "paper, ce": (
        {},
        {"arrangement": "post", "activation": "relu", "epsilon": 0.0, "mask": CAUSAL},
        "ce",
        (),
    ),
    "gpt2": (
        {"heads": 2, "extras": (*PROJECTION_BIASES, *BIASES, *FIRST, *GAINS)},
        {"arrangement": "pre", "activation": "gelu_tanh", "mask": CAUSAL},
        "ce",
        (2,),
    ),
    "gpt2, not last": (
        {"heads": 2},
        {"arrangement": "pre", "final_norm": False, "mask": CAUSAL},
        "mse",
        (2,),
    ),
    "llama": (
        {"heads": 2, "gated": True, "extras": ("first_gain", "middle_gain", "final_gain")},
        {"arrangement": "pre", "norm": "rms", "activation": "silu", "mask": CAUSAL},
        "ce",
        (),
    ),
    "qwen3": (
        {
            "heads": 4,
            "groups": 2,
            "gated": True,
            "extras": ("query_bias", "key_bias", "first_gain", "middle_gain"),
        },
        {
            "arrangement": "pre",
            "norm": "rms",
            "activation": "silu",
            "final_norm": False,
            "mask": CAUSAL,
            "rotary": RotaryPositions.of_length(L, 2),
            "norms": {
                "query": HeadNorm(draw(2, seed=60).abs(), epsilon=1e-3),
                "key": HeadNorm(draw(2, seed=61).abs(), epsilon=1e-3),
            },
        },
        "ce",
        (2,),
    ),
    "post, two heads": (
        {"heads": 2, "extras": (*BIASES, *GAINS)},
        {"arrangement": "post", "norm": "layer"},
        "ce",
        (),
    ),
    "post, rms, gate": (
        {"gated": True, "extras": GAINS},
        {"arrangement": "post", "norm": "rms", "activation": "silu"},
        "mse",
        (),
    ),
    "pre, one head": (
        {"extras": (*PROJECTION_BIASES, *FIRST)},
        {"arrangement": "pre", "mask": CAUSAL},
        "mse",
        (),
    ),
    "bert": (
        {"heads": 2, "extras": (*PROJECTION_BIASES, *BIASES, *GAINS)},
        {"arrangement": "post"},
        "ce",
        (2,),
    ),
    "pre, relu": ({}, {"arrangement": "pre", "activation": "relu", "epsilon": 0.1}, "mse", ()),
    "no norm": ({"extras": BIASES}, {"arrangement": "pre", "norm": None}, "mse", ()),
    "no norm, post": ({"gated": True}, {"arrangement": "post", "norm": None}, "ce", ()),
}


@pytest.mark.parametrize("case", CASES)
def test_all_pairs_equal_autograd(case):
    shape, options, kind, batch = CASES[case]
    X, w, loss = draw(*batch, L, D), make_weights(**shape), make_loss(kind, batch)
    ours = TransformerBlockHessian(X, w, loss, **options)
    params = {role: w[role] for role in ours.roles}
    assert params.keys() == w.keys()

    def run(params):
        return forward(X, params, **{"norm": "layer"} | options)

    close(ours.output.reshape(X.shape), run(params))
    close(ours.value(), loss.value(run(params)))
    second = jacrev(jacrev(lambda p: loss.value(run(p))))(params)
    sizes = {role: p.numel() for role, p in params.items()}
    for a, b in itertools.product(params, params):
        close(ours.block(a, b), second[a][b].reshape(sizes[a], sizes[b]))
    jacobians = {role: J.reshape(X.numel(), -1) for role, J in jacrev(run)(params).items()}
    J = torch.cat([jacobians[role] for role in params], 1)
    close(torch.cat([ours.jacobian(role) for role in params], 1), J)
    curvature = jacrev(jacrev(loss.value))(run(params)).reshape(X.numel(), X.numel())
    close(ours.dense("outer"), J.T @ curvature @ J)
    whole = torch.cat(
        [torch.cat([second[a][b].reshape(sizes[a], -1) for b in params], 1) for a in params]
    )
    close(ours.dense(), whole)
    close(ours.dense("functional"), whole - J.T @ curvature @ J)


@pytest.mark.parametrize("case", CASES)
def test_factored_blocks(case):
    """Trace, diagonal, norm and products of the diagonal blocks, without building them."""
    shape, options, kind, batch = CASES[case]
    w = make_weights(**shape)
    hessian = TransformerBlockHessian(draw(*batch, L, D), w, make_loss(kind, batch), **options)
    for role in hessian.roles:
        if (
            "gain" in role
            or role.startswith(("middle", "final", "first"))
            or role in PROJECTION_BIASES
        ):
            with pytest.raises(ValueError, match="use `block`"):
                hessian.factored(role)
            continue
        heads = w[role].shape[0] if w[role].ndim == 3 else 1
        for part, head in itertools.product(("outer", "functional", "full"), range(heads)):
            size = hessian.sizes[role] // heads
            block = hessian.block(role, role, part)[
                head * size : (head + 1) * size, head * size : (head + 1) * size
            ]
            factored = hessian.factored(role, head, part)
            close(factored.trace(), block.trace())
            close(factored.diagonal(), block.diagonal())
            close(factored.squared_frobenius(), block.square().sum())
            v = draw(size, seed=70)
            close(factored @ v, block @ v)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_outer_part_equals_curvlinops():
    import curvlinops

    X, w = draw(2, L, D), make_weights(heads=2)
    target = draw(2, L, D, seed=90)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.ParameterDict(
                {role: torch.nn.Parameter(p) for role, p in w.items()}
            )

        def forward(self, x):
            return forward(x, dict(self.weights.items()), "pre", "layer", mask=CAUSAL)

    model = Model()
    params = dict(model.named_parameters())
    ours = TransformerBlockHessian(X, w, SquaredError(target), mask=CAUSAL)
    order = [name.removeprefix("weights.") for name in params]
    theirs = curvlinops.GGNLinearOperator(
        model, torch.nn.MSELoss(), list(params.values()), [(X, target)], check_deterministic=False
    )
    dense = theirs @ torch.eye(theirs.shape[0], dtype=torch.float64)
    blocks = [torch.cat([ours.block(a, b, "outer") for b in order], 1) for a in order]
    close(torch.cat(blocks), dense.detach())


def test_whole_hessian_of_a_gpt2_block():
    """All parameters of a Hugging Face block, whose `Conv1D` has the orientation used here."""
    import transformers
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = transformers.GPT2Config(
        n_embd=D, n_head=2, n_inner=M, attn_implementation="eager", resid_pdrop=0, attn_pdrop=0
    )
    block = GPT2Block(config, layer_idx=0).double()
    with torch.no_grad():
        for number, p in enumerate(block.parameters()):
            p.copy_(draw(*p.shape, seed=number))
    X, target = draw(1, L, D), draw(1, L, D, seed=50)
    mask = torch.zeros(1, 1, L, L).double().masked_fill(~CAUSAL, -torch.inf)
    params = dict(block.named_parameters())

    def heads(packed):
        """(..., 3 · 2 · 2), queries, keys and values: to three of (2, ..., 2)."""
        return [part.unflatten(-1, (2, 2)).movedim(-2, 0) for part in packed.split(D, -1)]

    weights = dict(zip(("query", "key", "value"), heads(params["attn.c_attn.weight"])))
    weights |= dict(
        zip(("query_bias", "key_bias", "value_bias"), heads(params["attn.c_attn.bias"]))
    )
    names = {
        "attn.c_proj.bias": "output_bias",
        "mlp.c_fc.weight": "mlp_in",
        "mlp.c_fc.bias": "mlp_in_bias",
    }
    names |= {
        "mlp.c_proj.weight": "mlp_out",
        "mlp.c_proj.bias": "mlp_out_bias",
        "ln_1.weight": "first_gain",
    }
    names |= {"ln_1.bias": "first_bias", "ln_2.weight": "middle_gain", "ln_2.bias": "middle_bias"}
    weights |= {"output": params["attn.c_proj.weight"].reshape(2, 2, D)}
    weights |= {role: params[name] for name, role in names.items()}
    ours = TransformerBlockHessian(
        X, weights, SquaredError(target), activation="gelu_tanh", final_norm=False, mask=CAUSAL
    )
    assert sum(ours.sizes.values()) == sum(p.numel() for p in params.values())

    def by_role(gradients):
        """Gradients of the packed parameters as one vector in the order of our roles."""
        given = dict(zip(params, gradients))
        found = dict(zip(("query", "key", "value"), heads(given["attn.c_attn.weight"])))
        found |= dict(
            zip(("query_bias", "key_bias", "value_bias"), heads(given["attn.c_attn.bias"]))
        )
        found |= {role: given[name] for name, role in names.items()} | {
            "output": given["attn.c_proj.weight"]
        }
        return torch.cat([found[role].flatten() for role in ours.roles])

    result = block(X, attention_mask=mask)
    loss = F.mse_loss(result if isinstance(result, Tensor) else result[0], target)
    close(ours.value(), loss.detach())
    gradient = by_role(torch.autograd.grad(loss, params.values(), create_graph=True))
    rows = [
        by_role(torch.autograd.grad(entry, params.values(), retain_graph=True))
        for entry in gradient
    ]
    close(ours.dense(), torch.stack(rows))


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ({}, {"arrangement": "middle"}, "arrangement='middle'"),
        ({}, {"norm": "batch"}, "norm='batch'"),
        ({"mlp_up": draw(2, 2)}, {}, "mlp_up not used"),
        ({"first_gain": draw(D)}, {"arrangement": "post"}, "first_gain not used"),
        ({"final_gain": draw(D)}, {"final_norm": False}, "final_gain not used"),
        ({"query": draw(2, D)}, {}, "Invalid query of shape"),
        ({"key_bias": draw(3)}, {}, "Invalid key_bias of shape"),
        ({"first_gain": draw(3)}, {}, "Invalid first_gain of shape"),
        ({"value": draw(D, 2)}, {}, "check the weights value and output"),
        ({"mlp_out": draw(M, 2)}, {}, "check the weights mlp_out"),
    ],
)
def test_errors(weights, options, message):
    with pytest.raises(ValueError, match=message):
        TransformerBlockHessian(
            draw(L, D), make_weights() | weights, make_loss("mse", ()), **options
        )


def test_errors_of_names():
    weights = make_weights()
    hessian = TransformerBlockHessian(draw(L, D), weights, make_loss("mse", ()))
    with pytest.raises(ValueError, match="Invalid role='output'"):
        hessian.block("query", "output")
    with pytest.raises(ValueError, match="Invalid part='all'"):
        hessian.block("query", "query", "all")
    del weights["key"]
    with pytest.raises(ValueError, match="key missing"):
        TransformerBlockHessian(draw(L, D), weights, make_loss("mse", ()))
