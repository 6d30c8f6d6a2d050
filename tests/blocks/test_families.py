"""The optimizers train every family of models that the finder knows."""

import pytest

import blockopt
from tests.helpers.models import FAMILIES, loss_of
from tests.helpers.optimizers import OPTIMIZERS


@pytest.mark.parametrize("optimizer_name", ["adamw-block", "muon-block", "sgd"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_falls_on_every_family(family, optimizer_name):
    model = FAMILIES[family]()
    model.eval()  # no dropout: the same loss at the same weights
    lr = {"adamw-block": 1e-3, "muon-block": 1e-3, "sgd": 1e-3}[optimizer_name]
    optimizer = OPTIMIZERS[optimizer_name](blockopt.param_groups(model), lr=lr)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = loss_of(family, model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
