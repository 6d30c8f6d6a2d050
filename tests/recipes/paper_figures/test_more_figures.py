"""What the figures on heads, top eigenvalues and training measure, against torch.func."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, jacfwd

from recipes.data.addition import addition
from recipes.paper_figures.heads import ROLES, HeadsAttention, parts, share_of_entries
from recipes.paper_figures.models import PatchTransformer, cross_entropy, synthetic_images
from recipes.paper_figures.outcome import TINY, Run
from recipes.paper_figures.top_eigenvalue import LinearNetwork, missed
from recipes.paper_figures.vision_training import norms_of_means, sample_gradients

# torch.func.jvp uses it
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")


def test_parts_of_the_hessian_of_heads_add_up_and_have_no_blocks_between_heads():
    outer, functional = parts(Run(TINY), 2, 0, squared=False)
    model, (inputs, targets) = HeadsAttention(TINY.small, 2, 0), addition(2)
    weights = {role: model.get_parameter(role).detach() for role in ROLES}
    flat = torch.cat([weight.flatten() for weight in weights.values()])

    def loss(vector):
        pieces = vector.split([w.numel() for w in weights.values()])
        given = {r: p.reshape(w.shape) for (r, w), p in zip(weights.items(), pieces)}
        return cross_entropy(functional_call(model, given, (inputs,)), targets)

    whole = jacfwd(grad(loss))(flat)
    torch.testing.assert_close(outer + functional, whole, rtol=1e-9, atol=1e-12)
    head = (torch.arange(4) // 2).repeat(4)  # of each query weight, by its column
    between = functional[:16, :16][head[:, None] != head]
    assert float(between.abs().max()) < 1e-12 * float(functional.abs().max())
    assert float(outer[:16, :16][head[:, None] != head].abs().max()) > 0
    assert share_of_entries(functional) < 0.6 * share_of_entries(
        parts(Run(TINY), 1, 0, squared=False)[1]
    )


def test_what_gauss_newton_misses_of_a_linear_network():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    w_Q, w_K = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    model = LinearNetwork(w_Q, w_K, torch.tensor(0.7, dtype=torch.float64))

    def output(vector):
        return vector[6] * (vector[:3] @ vector[3:6]) * x / 3**0.5

    at = torch.cat([w_Q, w_K, torch.tensor([0.7]).double()])
    H = torch.autograd.functional.hessian(lambda v: F.mse_loss(output(v), y), at)
    J = torch.autograd.functional.jacobian(output, at)
    tops = [float(torch.linalg.eigvalsh(A)[-1]) for A in (H, 2 / 7 * J.T @ J)]
    expected = abs(tops[0] - tops[1]) / tops[0]
    assert missed(model, lambda: F.mse_loss(model(x), y)) == pytest.approx(expected, rel=1e-8)


def test_sample_gradients_average_to_that_of_the_batch():
    images, labels = synthetic_images(6)
    model = PatchTransformer(16, images.shape[1], 4, 10)
    norms = norms_of_means(sample_gradients(model, images, labels))
    for k in (1, 5, 6):
        loss = F.cross_entropy(model(images[:k]), labels[:k])
        whole = torch.autograd.grad(loss, list(model.parameters()))
        expected = torch.cat([g.flatten() for g in whole]).norm()
        assert float(norms[k - 1]) == pytest.approx(float(expected), rel=1e-10)
