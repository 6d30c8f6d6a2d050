"""The Hessian of a transformer block against autograd in float64, and the pieces of Theorems 4 and 5 of arXiv 2510.16927."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jacrev

from blockopt.analysis.output_loss import CrossEntropy, SquaredError
from blockopt.analysis.transformer import TransformerBlockHessian

L, D, M = 3, 4, 5
ACTS = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"), "silu": F.silu}


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(a, b, tolerance=1e-10):
    assert a.shape == b.shape
    assert (a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max()))


def normalize(x, kind, gain, bias, epsilon):
    if kind is None:
        return x
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    y = centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt()
    y = y if gain is None else gain * y
    return y if bias is None else y + bias


def bias(w, role, head):
    given = w.get(f"{role}_bias", torch.zeros(()))
    return given if given.ndim < 2 else given[head]


def attend(x, w, mask):
    """Written head by head, with the usual softmax."""
    total = 0
    heads = {role: w[role] if w[role].ndim == 3 else w[role][None] for role in ("query", "key", "value", "output") if role in w}
    for h in range(len(heads["query"])):
        q, k, v = (x @ heads[role][h] + bias(w, role, h) for role in ("query", "key", "value"))
        scores = q @ k.transpose(-1, -2) / k.shape[-1] ** 0.5
        scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        value = scores.softmax(-1) @ v
        total = total + (value @ heads["output"][h] if "output" in heads else value)
    return total + w.get("output_bias", 0)


def forward(X, w, arrangement, norm, final_norm=True, activation="gelu", epsilon=1e-5, mask=None):
    def norm_of(x, name):
        return normalize(x, norm, w.get(f"{name}_gain"), w.get(f"{name}_bias"), epsilon)

    pre = arrangement == "pre"
    R = X + attend(norm_of(X, "first") if pre else X, w, mask)
    Y = norm_of(R, "middle")
    u = Y @ w["mlp_in"] + w.get("mlp_in_bias", 0)
    hidden = ACTS[activation](Y @ w["mlp_gate"]) * u if "mlp_gate" in w else ACTS[activation](u)
    S = (R if pre else Y) + hidden @ w["mlp_out"] + w.get("mlp_out_bias", 0)
    return norm_of(S, "final") if final_norm else S


def make_weights(heads=1, gated=False, extras=(), dk=2):
    shape = {"query": (D, dk), "key": (D, dk), "value": (D, D)}
    if heads > 1:
        shape = {"query": (heads, D, dk), "key": (heads, D, dk), "value": (heads, D, dk), "output": (heads, dk, D)}
    shape |= {"mlp_in": (D, M), "mlp_out": (M, D)} | ({"mlp_gate": (D, M)} if gated else {})
    sizes = {"mlp_in_bias": (M,)}
    sizes |= {f"{role}_bias": (heads, dk) if heads > 1 else shape[role][-1:] for role in ("query", "key", "value")}
    shape |= {role: sizes.get(role, (D,)) for role in extras}
    return {role: draw(*size, seed=number) for number, (role, size) in enumerate(shape.items(), start=1)}


def make_loss(kind, batch):
    if kind == "mse":
        return SquaredError(draw(*batch, L, D, seed=90))
    return CrossEntropy(draw(D, 6, seed=91), torch.randint(6, (*batch, L), generator=torch.Generator().manual_seed(0)))


CAUSAL = torch.ones(L, L).tril().bool()
BIASES = ("mlp_in_bias", "mlp_out_bias")
PROJECTION_BIASES = ("query_bias", "key_bias", "value_bias", "output_bias")
FIRST = ("first_gain", "first_bias")
GAINS = ("middle_gain", "middle_bias", "final_gain", "final_bias")
CASES = {
    "paper": ({}, {"arrangement": "post", "activation": "relu", "epsilon": 0.0}, "mse", ()),
    "paper, ce": ({}, {"arrangement": "post", "activation": "relu", "epsilon": 0.0, "mask": CAUSAL}, "ce", ()),
    "gpt2": (
        {"heads": 2, "extras": (*PROJECTION_BIASES, *BIASES, *FIRST, *GAINS)},
        {"arrangement": "pre", "activation": "gelu_tanh", "mask": CAUSAL},
        "ce",
        (2,),
    ),
    "gpt2, not last": ({"heads": 2}, {"arrangement": "pre", "final_norm": False, "mask": CAUSAL}, "mse", (2,)),
    "llama": (
        {"heads": 2, "gated": True, "extras": ("first_gain", "middle_gain", "final_gain")},
        {"arrangement": "pre", "norm": "rms", "activation": "silu", "mask": CAUSAL},
        "ce",
        (),
    ),
    "post, two heads": ({"heads": 2, "extras": (*BIASES, *GAINS)}, {"arrangement": "post", "norm": "layer"}, "ce", ()),
    "post, rms, gate": (
        {"gated": True, "extras": GAINS},
        {"arrangement": "post", "norm": "rms", "activation": "silu"},
        "mse",
        (),
    ),
    "pre, one head": ({"extras": (*PROJECTION_BIASES, *FIRST)}, {"arrangement": "pre", "mask": CAUSAL}, "mse", ()),
    "bert": ({"heads": 2, "extras": (*PROJECTION_BIASES, *BIASES, *GAINS)}, {"arrangement": "post"}, "ce", (2,)),
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
    whole = torch.cat([torch.cat([second[a][b].reshape(sizes[a], -1) for b in params], 1) for a in params])
    close(ours.dense(), whole)
    close(ours.dense("functional"), whole - J.T @ curvature @ J)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_outer_part_equals_curvlinops():
    curvlinops = pytest.importorskip("curvlinops")
    X, w = draw(2, L, D), make_weights(heads=2)
    target = draw(2, L, D, seed=90)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.ParameterDict({role: torch.nn.Parameter(p) for role, p in w.items()})

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
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = transformers.GPT2Config(n_embd=D, n_head=2, n_inner=M, attn_implementation="eager", resid_pdrop=0, attn_pdrop=0)
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
    weights |= dict(zip(("query_bias", "key_bias", "value_bias"), heads(params["attn.c_attn.bias"])))
    names = {"attn.c_proj.bias": "output_bias", "mlp.c_fc.weight": "mlp_in", "mlp.c_fc.bias": "mlp_in_bias"}
    names |= {"mlp.c_proj.weight": "mlp_out", "mlp.c_proj.bias": "mlp_out_bias", "ln_1.weight": "first_gain"}
    names |= {"ln_1.bias": "first_bias", "ln_2.weight": "middle_gain", "ln_2.bias": "middle_bias"}
    weights |= {"output": params["attn.c_proj.weight"].reshape(2, 2, D)}
    weights |= {role: params[name] for name, role in names.items()}
    ours = TransformerBlockHessian(X, weights, SquaredError(target), activation="gelu_tanh", final_norm=False, mask=CAUSAL)
    assert sum(ours.sizes.values()) == sum(p.numel() for p in params.values())

    def by_role(gradients):
        """Gradients of the packed parameters as one vector in the order of our roles."""
        given = dict(zip(params, gradients))
        found = dict(zip(("query", "key", "value"), heads(given["attn.c_attn.weight"])))
        found |= dict(zip(("query_bias", "key_bias", "value_bias"), heads(given["attn.c_attn.bias"])))
        found |= {role: given[name] for name, role in names.items()} | {"output": given["attn.c_proj.weight"]}
        return torch.cat([found[role].flatten() for role in ours.roles])

    result = block(X, attention_mask=mask)
    loss = F.mse_loss(result if isinstance(result, Tensor) else result[0], target)
    close(ours.value(), loss.detach())
    gradient = by_role(torch.autograd.grad(loss, params.values(), create_graph=True))
    rows = [by_role(torch.autograd.grad(entry, params.values(), retain_graph=True)) for entry in gradient]
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
        TransformerBlockHessian(draw(L, D), make_weights() | weights, make_loss("mse", ()), **options)


def test_errors_of_names():
    weights = make_weights()
    hessian = TransformerBlockHessian(draw(L, D), weights, make_loss("mse", ()))
    with pytest.raises(ValueError, match="Invalid role 'output'"):
        hessian.block("query", "output")
    with pytest.raises(ValueError, match="Invalid part='all'"):
        hessian.block("query", "query", "all")
    del weights["key"]
    with pytest.raises(ValueError, match="key missing"):
        TransformerBlockHessian(draw(L, D), weights, make_loss("mse", ()))


# Theorems 4 and 5 of arXiv 2510.16927 in their own matrices, with the corrections of the module's docstring.


def eye(n: int) -> Tensor:
    return torch.eye(n).double()


def kron(*factors: Tensor) -> Tensor:
    result = factors[0].contiguous()
    for factor in factors[1:]:
        result = torch.kron(result, factor.contiguous())
    return result


def commutation(q: int, n: int) -> Tensor:
    """K_{q,n} vec X = vec Xᵀ for X of n × q."""
    return eye(n * q).reshape(n, q, n * q).transpose(0, 1).reshape(n * q, n * q)


class Paper:
    """One head, post-norm, ReLU, ε = 0: what the theorems name, from autograd of the single steps."""

    def __init__(self):
        self.X, self.w = draw(L, D), make_weights()
        self.Y = self.middle(self.w)
        self.mask = (self.Y @ self.w["mlp_in"] > 0).double().flatten().diag()
        self.J_Y = jacrev(lambda r: normalize(r, "layer", None, None, 0.0))(self.X + attend(self.X, self.w, None))
        self.J_Y = self.J_Y.reshape(L * D, L * D)
        W_1, W_2 = self.w["mlp_in"], self.w["mlp_out"]
        self.J_SY = kron(eye(L), W_2.T) @ self.mask @ kron(eye(L), W_1.T) + eye(L * D)

    def middle(self, w):
        return normalize(self.X + attend(self.X, w, None), "layer", None, None, 0.0)

    def summed(self, w):
        Y = self.middle(w)
        return (Y @ w["mlp_in"]).relu() @ w["mlp_out"] + Y

    def final(self, w):
        return normalize(self.summed(w), "layer", None, None, 0.0)

    def G(self, role):
        """∂F/∂W."""
        return jacrev(lambda p: attend(self.X, self.w | {role: p}, None))(self.w[role]).reshape(L * D, -1)

    def B(self, role, w=None):
        """∂S/∂W by autograd."""
        w = self.w if w is None else w
        return jacrev(lambda p: self.summed(w | {role: p}))(w[role]).reshape(L * D, -1)

    def xi(self, row, column):
        """∂B_row/∂W_column by autograd, (L·d·n_row, n_column)."""
        return jacrev(lambda p: self.B(row, self.w | {column: p}))(self.w[column]).reshape(-1, self.w[column].numel())


@pytest.fixture(scope="module")
def paper():
    return Paper()


ATTENTION = ("query", "key", "value")


def test_theorem_4(paper):
    W_2 = paper.w["mlp_out"]
    close(kron(eye(L), W_2.T) @ paper.mask @ kron(paper.Y, eye(M)), paper.B("mlp_in"))
    close(kron((paper.Y @ paper.w["mlp_in"]).relu(), eye(D)), paper.B("mlp_out"))
    for role in ATTENTION:
        close(paper.J_SY @ paper.J_Y @ paper.G(role), paper.B(role))


def xi_12(paper):
    first = kron(eye(L * D), kron(paper.Y, eye(M)).T @ paper.mask)
    return first @ kron(eye(L), commutation(D, L), eye(M)) @ kron(eye(L).reshape(-1, 1), eye(D * M)) @ commutation(D, M)


def xi_21(paper):
    """The formula that is printed as ξ_12."""
    first = kron(eye(L), commutation(D, M), eye(D)) @ kron(eye(L * M), eye(D).reshape(-1, 1))
    return first @ paper.mask @ kron(paper.Y, eye(M))


def test_xi_between_the_weights_of_the_mlp(paper):
    close(xi_12(paper), paper.xi("mlp_in", "mlp_out"))
    close(xi_21(paper), paper.xi("mlp_out", "mlp_in"))
    assert xi_21(paper).shape == xi_12(paper).shape  # so that the swapped label is no error of size
    assert (xi_21(paper) - xi_12(paper)).abs().max() > 0.1
    for role in ("mlp_in", "mlp_out"):
        assert paper.xi(role, role).abs().max() == 0


@pytest.mark.parametrize("role", ATTENTION)
def test_xi_of_the_mlp_and_attention(paper, role):
    W_1, W_2 = paper.w["mlp_in"], paper.w["mlp_out"]
    into = paper.J_Y @ paper.G(role)
    spread = kron(eye(L), commutation(M, D), eye(M)) @ kron(eye(L * D), eye(M).reshape(-1, 1))  # ∂(Y ⊗ I_m)/∂Y
    n_1 = W_1.numel()  # ⊗ I_{n_1} where ⊗ I_{n_k} is printed
    close(kron(kron(eye(L), W_2.T) @ paper.mask, eye(n_1)) @ spread @ into, paper.xi("mlp_in", role))
    shuffle = kron(eye(L), commutation(D, M), eye(D)) @ kron(eye(L * M), eye(D).reshape(-1, 1))
    close(shuffle @ paper.mask @ kron(eye(L), W_1.T) @ into, paper.xi("mlp_out", role))


@pytest.mark.parametrize(("row", "column"), list(itertools.product(ATTENTION, ATTENTION)))
def test_xi_between_weights_of_attention(paper, row, column):
    residual = paper.X + attend(paper.X, paper.w, None)
    H_Y = jacrev(jacrev(lambda r: normalize(r, "layer", None, None, 0.0)))(residual).reshape(-1, L * D)

    def jacobian(w):
        return jacrev(lambda p: attend(paper.X, w | {row: p}, None))(w[row])

    Phi = jacrev(lambda p: jacobian(paper.w | {column: p}))(paper.w[column]).reshape(-1, paper.w[column].numel())
    n = paper.w[row].numel()
    inner = kron(eye(L * D), paper.G(row).T) @ H_Y @ paper.G(column) + kron(paper.J_Y, eye(n)) @ Phi
    close(kron(paper.J_SY, eye(n)) @ inner, paper.xi(row, column))


@pytest.mark.parametrize(("row", "column"), [("mlp_in", "mlp_out"), ("mlp_in", "query"), ("value", "key"), ("query", "query")])
def test_theorem_5(paper, row, column):
    """H_tr(i,j) of Z, and the loss Hessian from it, are what `TransformerBlockHessian` gives."""
    S = paper.summed(paper.w)
    J_Z = jacrev(lambda s: normalize(s, "layer", None, None, 0.0))(S).reshape(L * D, L * D)
    H_Z = jacrev(jacrev(lambda s: normalize(s, "layer", None, None, 0.0)))(S).reshape(-1, L * D)
    n = paper.w[row].numel()
    B_i, B_j = paper.B(row), paper.B(column)
    H_tr = kron(J_Z, eye(n)) @ paper.xi(row, column) + kron(eye(L * D), B_i.T) @ H_Z @ B_j
    target = draw(L, D, seed=90)
    gradient = 2 / (L * D) * (paper.final(paper.w) - target).reshape(1, -1)
    whole = 2 / (L * D) * (J_Z @ B_i).T @ (J_Z @ B_j) + kron(gradient, eye(n)) @ H_tr
    options = {"arrangement": "post", "activation": "relu", "epsilon": 0.0}
    ours = TransformerBlockHessian(paper.X, paper.w, SquaredError(target), **options)
    close(ours.block(row, column), whole)
