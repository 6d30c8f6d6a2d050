"""BlockLR on every family of models, with every estimator."""

import warnings

import pytest
import torch

import blockopt
from blockopt.block_lr import BlockLR
from blockopt.curvature import ESTIMATORS
from tests.helpers.models import FAMILIES, loss_of

# "newton" is the default, "analytic" and "power_law" read the layers of a model: these see every
# family. The others know a model by its gradients alone: they see one family of each kind.
EVERYWHERE = ("newton", "analytic", "power_law")
KINDS = ("gpt2", "mixtral", "lora-llama", "nanogpt", "t5", "bert", "vit", "cnn", "attention")
AT_ONCE = [name for name, estimator in ESTIMATORS.items() if not estimator.needs_slopes]
PAIRS = [(f, c) for f in FAMILIES for c in AT_ONCE if f in KINDS or c in EVERYWHERE]


@pytest.mark.parametrize(("family", "curvature"), PAIRS)
@pytest.mark.filterwarnings("ignore:The refresh of the block learning rates")
def test_trains_with_every_estimator_that_applies(family, curvature):
    model = FAMILIES[family]()
    optimizer = blockopt.BlockAdamW(blockopt.param_groups(model), lr=1e-3)
    block_lr = BlockLR(optimizer, model, curvature=curvature, every=1, by="tensor")
    if curvature == "power_law" and family in ("lora-gpt2", "lora-llama", "cnn", "mlp"):
        expected = pytest.raises(ValueError, match="neither attention nor an MLP")
    else:
        expected = warnings.catch_warnings()
    with expected:
        for number in range(3):
            optimizer.zero_grad()
            loss_of(family, model, number).backward()
            optimizer.step()
            block_lr.step(lambda number=number: loss_of(family, model, number))
        assert len(block_lr.history) + block_lr.failures == 3
        assert block_lr.history
        assert all(torch.isfinite(p).all() for p in model.parameters())
        # The others may find nothing but negative curvature so early.
        if curvature in ("analytic", "gauss_newton", "gradient", "power_law"):
            scales = torch.cat(list(block_lr.last_scales.as_dict().values()))
            assert scales.max() > 1.02 > 0.95 > scales.min()
            assert block_lr.failures == 0
