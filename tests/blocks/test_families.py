"""The optimizers train every family of models that `find_blocks` knows."""

import pytest

import blockopt
from tests.helpers.models import FAMILIES, loss_of
from tests.helpers.optimizers import OPTIMIZERS


@pytest.mark.filterwarnings("ignore:BlockMuon orthogonalizes")  # models without known matrices
@pytest.mark.parametrize("optimizer_name", ["adamw-block", "muon-block", "sgd"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_falls_on_every_family(family, optimizer_name):
    model = FAMILIES[family]().eval()  # no dropout: the same loss at the same weights
    optimizer = OPTIMIZERS[optimizer_name](blockopt.param_groups(model), lr=1e-3)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = loss_of(family, model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
