"""Dense matrices against row-by-row autograd, cross blocks, and refusals for lack of memory."""

import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacfwd
from torch.nn.attention import SDPBackend, sdpa_kernel

from blockopt import find_blocks
from blockopt.analysis.memory import memory_needed
from blockopt.analysis.operators.dense import dense, dense_block
from blockopt.analysis.operators.model_operators import (
    FunctionalOperator,
    GaussNewtonOperator,
    HessianOperator,
)
from blockopt.blocks import BlockGroup
from recipes.common.gpt2 import GPT2, GPT2Config
from tests.helpers.dense_hessians import Net, build, hessian, language_loss

OPERATORS = (HessianOperator, GaussNewtonOperator, FunctionalOperator)


def tiny(dtype=torch.float64):
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocab_size=7, context=4, width=4, depth=2, heads=2)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    tokens = torch.randint(7, (3, 5), generator=torch.Generator().manual_seed(0))
    return model, (tokens[:, :-1], tokens[:, 1:])


def near(found, expected, tolerance=1e-11):
    assert found.shape == expected.shape
    assert float(expected.norm()) > 0
    return float((found - expected).norm() / expected.norm()) < tolerance


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_gpt_equals_torch_func():
    """`jacfwd` of `grad`: `torch.func.hessian` is wrong for `layer_norm`, see test_closures."""
    model, batch = tiny()
    H, G, R = (dense(cls(model, lambda: model(*batch))) for cls in OPERATORS)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    with sdpa_kernel(SDPBackend.MATH):
        blocks = jacfwd(grad(lambda at: functional_call(model, at, batch)))(parameters)
    sizes = {name: p.numel() for name, p in parameters.items()}
    expected = torch.cat(
        [torch.cat([blocks[a][b].reshape(sizes[a], sizes[b]) for b in sizes], 1) for a in sizes]
    )
    assert near(H, expected)
    assert torch.equal(H, H.T)
    assert near(G + R, expected)
    assert float(torch.linalg.eigvalsh(G)[0]) > -1e-12 * float(G.norm())


@pytest.mark.parametrize("chunk", [1, 37, 1000])
def test_any_chunk(chunk):
    model = build(Net, top=nn.LayerNorm(6))
    closure = language_loss(model)
    assert near(dense(HessianOperator(model, closure), chunk=chunk), hessian(model, closure)[1])


def test_plain_matrices_and_heads():
    matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    assert torch.equal(dense(matrix), matrix)
    model, batch = tiny()
    H = HessianOperator(model, lambda: model(*batch), blocks=find_blocks(model, per_row=()))
    whole = dense(H)
    for group, part in H.blocks().items():
        where = H.entries(group)
        torch.testing.assert_close(
            dense(part), whole[where][:, where], rtol=1e-9, atol=1e-13 * float(whole.abs().max())
        )


def test_cross_blocks():
    model, batch = tiny()
    first, second = "h.0.attn.c_attn.weight", "h.1.attn.c_attn.weight"
    pairs = [
        (BlockGroup("query", 0, first, 1), BlockGroup("key", 1, second, 0)),
        (BlockGroup("query", 0, first, 1), BlockGroup("key", 0, first, 1)),
        (BlockGroup("query", 0, first), BlockGroup("key", parameter=first)),  # all heads
        (BlockGroup("query", 0, first, 0), "wte.weight"),
        ("wte.weight", "h.1.attn.c_proj.bias"),
        ("h.0.ln_1.weight", "h.0.ln_1.weight"),
        (
            BlockGroup("embedding", None, "wte.weight", 3),
            BlockGroup("position", None, "wpe.weight", 1),
        ),
    ]
    for cls in OPERATORS:
        A = cls(model, lambda: model(*batch))
        whole = dense(A)
        for rows, columns in pairs:
            found = dense_block(A, rows, columns, chunk=5)
            expected = whole[A.entries(rows)][:, A.entries(columns)]
            torch.testing.assert_close(
                found, expected, rtol=1e-9, atol=1e-13 * float(whole.abs().max())
            )
    head = A.block(BlockGroup("query", 0, first, 1))
    assert near(dense_block(head, head.names[0], head.names[0]), dense(head))
    with pytest.raises(ValueError, match="Invalid name='nobody'"):
        dense_block(A, "nobody", "wte.weight")
    with pytest.raises(
        ValueError, match=r"28 x 4 in float64 needs 0.00 GiB, and 0.00 GiB are allowed"
    ):
        dense_block(A, "wte.weight", "h.0.ln_1.weight", max_bytes=10)


def test_cross_blocks_differentiate_two_parameters_only(monkeypatch):
    model, batch = tiny()
    A = HessianOperator(model, lambda: model(*batch))
    asked = []
    gradient = torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd,
        "grad",
        lambda o, i, *a, **k: asked.append(len(i)) or gradient(o, i, *a, **k),
    )
    dense_block(A, "wte.weight", "h.0.ln_1.weight")
    assert set(asked) == {2}


def test_refuses_what_does_not_fit():
    model = nn.Linear(1200, 1200, bias=False)
    H = HessianOperator(model, lambda: model(torch.ones(1, 1200)).square().sum())
    with pytest.raises(
        ValueError,
        match=r"1,440,000 x 1,440,000 in float32 needs 7,72\d\.\d\d GiB, and .* GiB are free",
    ) as error:
        dense(H)
    for way in (
        "operator.block(name, index)",
        "blockopt.analysis.spectral",
        "SelfAttentionHessian(...).factored",
    ):
        assert way in str(error.value)
    with pytest.raises(ValueError, match=r"needs .* GiB, and 1\.00 GiB are allowed by max_bytes"):
        dense(H, max_bytes=2**30)
    small = torch.eye(100, dtype=torch.float64)
    needed = memory_needed(100, 100, torch.float64)
    assert needed == 8 * (100**2 + 3 * 100**2)
    assert torch.equal(dense(small, max_bytes=needed), small)
    with pytest.raises(ValueError, match="are allowed by max_bytes"):
        dense(small, max_bytes=needed - 1)


def test_free_memory_without_proc(monkeypatch):
    module = sys.modules["blockopt.analysis.memory"]
    cpu = torch.device("cpu")
    proc = module.free_memory(cpu)
    assert proc is None or proc > 2**20
    monkeypatch.setattr("builtins.open", partial(_raise, OSError))
    monkeypatch.setattr(
        "os.sysconf", {"SC_AVPHYS_PAGES": 3, "SC_PAGE_SIZE": 4096}.__getitem__, raising=False
    )
    assert module.free_memory(cpu) == 3 * 4096
    monkeypatch.delattr("os.sysconf")
    assert module.free_memory(cpu) is None
    monkeypatch.undo()
    monkeypatch.setattr(module, "free_memory", lambda device: None)
    assert torch.equal(dense(torch.eye(3)), torch.eye(3))


def _raise(error, *args, **kwargs):
    raise error


def test_tells_asymmetry():
    with pytest.warns(
        UserWarning, match=r"not symmetric: entries differ .* by up to 0\.5, the largest is 3"
    ):
        found = dense(torch.tensor([[3.0, 1.0], [0.5, 3.0]]), chunk=1)
    torch.testing.assert_close(found, torch.tensor([[3.0, 0.75], [0.75, 3.0]]))


def test_progress(capsys):
    assert torch.equal(dense(torch.eye(3), chunk=1, progress=True), torch.eye(3))
    assert not capsys.readouterr().out


@pytest.mark.parametrize("options", [{"chunk": 0}, {"chunk": 1.5}, {"max_bytes": 0}])
def test_wrong_options(options):
    with pytest.raises(ValueError, match=f"Invalid {next(iter(options))}="):
        dense(torch.eye(3), **options)
