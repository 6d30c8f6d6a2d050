"""Steps of tables: the formula in float64, whatever basis the columns have, on every path."""

import pytest
import torch

import blockopt
from blockopt.optim import chunks, muon
from blockopt.optim.whitened_table import root_and_inverse, whitening
from tests.helpers.optimizers import random_gradients, set_gradients, tiny_gpt

ROWS, COLUMNS, DAMPING = 12, 5, 0.1
PROBES = torch.randn(COLUMNS, COLUMNS, generator=torch.Generator().manual_seed(0)).double()


class Table(torch.nn.Module):
    def __init__(self, dtype=torch.float64, rows=ROWS):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(rows, COLUMNS, dtype=dtype)


def optimizer_of(model, name="muon", **options):
    kind = blockopt.BlockMuon if name == "muon" else blockopt.BlockAdamW
    groups = blockopt.param_groups(model, weight_decay=options.pop("weight_decay", 0.1))
    return kind(groups, lr=0.1, betas=(0.8, 0.9), second_moment="whitened", **options)


def gradients(steps, seed=0, dtype=torch.float64, rows=ROWS):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(COLUMNS, COLUMNS, generator=generator, dtype=torch.float64)
    noise = torch.randn(steps, rows, COLUMNS, generator=generator, dtype=torch.float64)
    return (noise @ mix).to(dtype)


def train(model, optimizer, given):
    for gradient in given:
        model.embedding.weight.grad = gradient.clone()
        optimizer.step()
    return model.embedding.weight.detach().clone()


def inverse_root(matrix):
    """By Denman and Beavers' iteration, which uses no eigenvectors."""
    Y, Z = matrix, torch.eye(len(matrix), dtype=matrix.dtype)
    for _ in range(30):
        Y, Z = (Y + torch.linalg.inv(Z)) / 2, (Z + torch.linalg.inv(Y)) / 2
    return Z


def approximation(C, probes):
    """Of a second moment of trace 1, as the docstring of `nystrom.py` has it, dense."""
    core = probes.T @ C @ probes
    core += 1e-4 * core.diagonal().mean() * torch.eye(len(core), dtype=C.dtype)
    found = C @ probes @ torch.linalg.inv(core) @ probes.T @ C
    rest = (max(0.0, 1 - found.trace().item()) + DAMPING) / len(C)
    return found + rest * torch.eye(len(C), dtype=C.dtype)


def reference(start, given, lr=0.1, decay=0.1, scale=1.0, probes=PROBES):
    p, m, v, C = start.clone(), 0, 0, 0
    for t, g in enumerate(given, start=1):
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * (g * g).mean(1, keepdim=True)
        C = 0.9 * C + 0.1 * g.T @ g
        W = inverse_root(COLUMNS * approximation(C / C.trace(), probes))
        step = m / (1 - 0.8**t) / ((v / (1 - 0.9**t)).sqrt() + 1e-8)
        p = p - lr * decay * p - lr * scale * step @ W
    return p


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_equals_the_formula(name):
    model = Table()
    start, given = model.embedding.weight.detach().clone(), gradients(13)
    found = train(model, optimizer_of(model, name), given)
    scale = {"adamw": 3.0, "muon": 1.0}[name]  # AdamW's tables take longer steps than its matrices
    torch.testing.assert_close(found, reference(start, given, scale=scale), rtol=0, atol=1e-12)


def test_each_row_has_its_own_scale():
    model = Table()
    start, given = model.embedding.weight.detach().clone(), gradients(3)
    optimizer, scale = optimizer_of(model), torch.linspace(0, 2, ROWS)
    optimizer.set_block_scales({"embedding.weight": scale})
    expected = reference(start, given, scale=scale.double()[:, None])
    torch.testing.assert_close(train(model, optimizer, given), expected, rtol=0, atol=1e-7)


class InputFirst(torch.nn.Module):
    """The same table, stored with a column for each token."""

    def __init__(self):
        super().__init__()
        self.unembed = torch.nn.Parameter(Table().embedding.weight.detach().mT.contiguous())


@pytest.mark.parametrize("second_moment", ["whitened", "block"])
@pytest.mark.parametrize("kind", [blockopt.BlockMuon, blockopt.BlockAdamW])
def test_the_step_does_not_depend_on_how_a_table_is_stored(kind, second_moment):
    by_row, by_column, scale = Table(), InputFirst(), torch.rand(ROWS) + 0.5
    split = blockopt.Split(1, (ROWS,), (ROWS,))
    blocks = {"unembed": blockopt.Blocks(("embedding",), None, split)}
    options = {"lr": 0.1, "second_moment": second_moment}
    one = kind(blockopt.param_groups(by_row, weight_decay=0.1), **options)
    other = kind(blockopt.param_groups(by_column, blocks, weight_decay=0.1), **options)
    other.param_groups[0]["weight_decay"] = 0.1  # parameters beside layers do not decay by default
    one.set_block_scales({"embedding.weight": scale})
    other.set_block_scales({"unembed": scale})
    for gradient in gradients(5):
        by_row.embedding.weight.grad = gradient.clone()
        by_column.unembed.grad = gradient.mT.contiguous()
        one.step()
        other.step()
    torch.testing.assert_close(by_column.unembed.mT, by_row.embedding.weight, rtol=1e-12, atol=0)


def test_fewer_probes_than_columns(monkeypatch):
    monkeypatch.setattr(muon, "TABLE_PROBES", 2)
    model = Table()
    start, given = model.embedding.weight.detach().clone(), gradients(7)
    probes = torch.randn(COLUMNS, 2, generator=torch.Generator().manual_seed(0)).double()
    found = train(model, optimizer_of(model), given)
    expected = reference(start, given, probes=probes)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert not torch.allclose(expected, reference(start, given), rtol=0, atol=1e-3)


def test_the_basis_of_the_columns_hardly_matters():
    """Rotated columns move in the rotated way, which is not so for AdamW."""
    Q = torch.linalg.qr(gradients(1, seed=3)[0, :COLUMNS])[0]
    for second_moment, same in (("whitened", True), ("coordinate", False)):
        found = []
        for turn in (torch.eye(COLUMNS, dtype=torch.float64), Q):
            model = Table()
            with torch.no_grad():
                model.embedding.weight.copy_(model.embedding.weight @ turn)
            optimizer = optimizer_of(model)
            for group in optimizer.param_groups:
                group["second_moment"] = second_moment
            found.append(train(model, optimizer, gradients(12) @ turn))
        assert torch.allclose(found[0] @ Q, found[1], rtol=0, atol=1e-2) == same


def state_of(C, probes):
    names = ("column_probes", "column_sketch", "column_trace")
    return dict(zip(names, (probes, C @ probes, C.trace()[None])))


@pytest.mark.parametrize(("size", "number"), [(1, 1), (64, 16), (1024, 16)])
def test_whitening_of_one_direction_only(size, number):
    """The widest spread of eigenvalues that there can be, in float32."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(size, generator=generator).double()
    u /= u.norm()
    expected = torch.eye(size, dtype=torch.float64) * DAMPING**-0.5
    expected += torch.outer(u, u) * ((size + DAMPING) ** -0.5 - DAMPING**-0.5)
    probes = torch.randn(size, number, generator=generator)
    own, basis, inner = whitening(state_of(torch.outer(u, u).float(), probes))
    found = own * torch.eye(size) + basis @ inner @ basis.mT
    assert (found.double() - expected).norm() < 1e-2 * expected.norm()  # the ridge is 1e-4


def test_roots_are_those_of_eigenvectors():
    x = gradients(1)[0].T @ gradients(1)[0] + 0.1 * torch.eye(COLUMNS)
    values, vectors = torch.linalg.eigh(x)
    found = root_and_inverse(x, float(values[0]) / 2, float(values[-1]) * 1.1)
    for power, matrix in zip((0.5, -0.5), found):
        torch.testing.assert_close(
            matrix, (vectors * values**power) @ vectors.T, rtol=1e-10, atol=0
        )


def test_rows_without_gradients_stay_and_no_gradient_at_all_is_no_trouble():
    model = Table()
    start, given = model.embedding.weight.detach().clone(), gradients(4)
    given[:, 3] = 0
    optimizer = optimizer_of(model, weight_decay=0.0)
    found = train(model, optimizer, torch.cat([torch.zeros_like(given[:1]), given]))
    assert torch.equal(found[3], start[3])
    assert bool(torch.isfinite(found).all())
    assert not torch.equal(found[2], start[2])


def test_pieces_of_rows_change_nothing(monkeypatch):
    results = []
    for chunk in (1 << 22, 2 * COLUMNS):
        monkeypatch.setattr(chunks, "CPU_CHUNK", chunk)
        model = Table()
        results.append(train(model, optimizer_of(model), gradients(4)))
    torch.testing.assert_close(*results, rtol=0, atol=1e-14)


def test_bfloat16_keeps_its_statistics_in_float32():
    model = Table(torch.bfloat16)
    optimizer = optimizer_of(model)
    found = train(model, optimizer, gradients(12, dtype=torch.bfloat16))
    state = optimizer.state[model.embedding.weight]
    assert {state[key].dtype for key in ("exp_avg_sq", "column_sketch", "column_trace")} == {
        torch.float32
    }
    assert bool(torch.isfinite(found).all())


def test_what_is_a_table():
    model = tiny_gpt()
    blocks = blockopt.find_blocks(model)
    tables = [n for n, p in model.named_parameters() if blocks[n].is_table(tuple(p.shape))]
    assert tables == ["wte.weight"]
    narrow = Table(rows=COLUMNS - 1)  # too few rows to tell how the columns vary
    few = blockopt.find_blocks(narrow)["embedding.weight"]
    assert not few.is_table(tuple(narrow.embedding.weight.shape))


def test_state_is_half_of_adamw_for_a_long_table():
    model = Table(torch.float32, rows=1000)
    optimizer = optimizer_of(model)
    train(model, optimizer, gradients(1, dtype=torch.float32, rows=1000))
    numbers = sum(t.numel() for t in optimizer.state[model.embedding.weight].values())
    assert numbers == 1000 * COLUMNS + 2 * 1000 + 2 * COLUMNS**2 + 2  # and scales per row


def test_all_other_parameters_take_adamw():
    models = [tiny_gpt(dtype=torch.float64) for _ in range(2)]
    options = ({"second_moment": "whitened"}, {"second_moment": "coordinate"})
    for model, option in zip(models, options):
        optimizer = blockopt.BlockMuon(blockopt.param_groups(model), lr=1e-2, **option)
        for step in range(3):
            set_gradients(model, random_gradients(model, step))
            optimizer.step()
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters()):
        assert torch.equal(one, other) == (name != "wte.weight")
