"""Block learning rates on many ranks are those of one process that holds the global batch."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import blockopt
from blockopt.curvature import ESTIMATORS
from tests.helpers import parallel_models
from tests.helpers.parallel_models import Parallel
from tests.helpers.ranks import run_on_ranks, run_on_two_ranks
from tests.helpers.ranks import whole as gathered

SHARDED = [name for name, estimator in ESTIMATORS.items() if estimator.works_sharded]
# The last needs five windows of gradients before it can measure.
STEPS = {name: 28 if estimator.needs_slopes else 2 for name, estimator in ESTIMATORS.items()}
pytestmark = pytest.mark.filterwarnings("ignore:.*curvature")


def trained(parallel: Parallel, curvature: str):
    """Scales and weights after two refreshes; each is measured on two fresh batches.

    With "newton", rows of tables differ too, as under SGD.
    """
    model = parallel.model
    optimizer = blockopt.BlockAdamW(blockopt.param_groups(model), lr=1e-2, second_moment="block")
    options = {"by": "tensor", "num_probes": 2, "rows": curvature == "newton"}
    block_lr = blockopt.BlockLR(optimizer, model, curvature=curvature, every=1, **options)
    for step in range(STEPS[curvature]):
        optimizer.zero_grad()
        parallel.loss(step).backward()
        optimizer.step()
        block_lr.step([lambda s=s: parallel.loss(s) for s in (100 + step, 200 + step)])
    assert block_lr.failures == 0, curvature
    assert block_lr.history, curvature
    scales = block_lr.last_scales.as_dict()
    return (
        {n.removeprefix("module."): scale for n, scale in scales.items()},
        {n.removeprefix("module."): gathered(p.detach()) for n, p in model.named_parameters()},
    )


def assert_equal(found, expected, what):
    for kind, some, others, tolerance in zip(
        ("scales", "weights"), found, expected, (1e-6, 1e-7), strict=True
    ):
        assert some.keys() == others.keys()
        for name, value in others.items():
            torch.testing.assert_close(
                some[name],
                value,
                rtol=tolerance,
                atol=1e-7,
                msg=lambda t, name=name, kind=kind: f"{what}, {kind} of {name}: {t}",
            )


def on_two_ranks(expected, rank):
    mesh = init_device_mesh("cpu", (2,))
    for name in ESTIMATORS:
        assert_equal(trained(parallel_models.replicated(), name), expected[name], f"DDP, {name}")
    layouts = {
        "FSDP2": parallel_models.fsdp,
        "TP": parallel_models.tensor_parallel,
        "SP": parallel_models.sequence_parallel,
    }
    for layout, build in layouts.items():
        for name in SHARDED:
            assert_equal(trained(build(mesh), name), expected[name], f"{layout}, {name}")
    for name in ("newton", "gauss_newton"):
        assert_equal(trained(parallel_models.two_meshes(), name), expected[name], "two meshes")


def on_four_ranks(expected, rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for name in ESTIMATORS:
        assert_equal(trained(parallel_models.replicated(), name), expected[name], f"DDP, {name}")
    layouts = {
        "HSDP": parallel_models.fsdp,
        "TP x FSDP2": parallel_models.tensor_parallel_and_fsdp,
        "SP x FSDP2": partial(parallel_models.tensor_parallel_and_fsdp, sequence=True),
    }
    for layout, build in layouts.items():
        for name in SHARDED:
            assert_equal(trained(build(mesh), name), expected[name], f"{layout}, {name}")


@pytest.fixture(scope="module")
def expected():
    """What one process finds, without any other."""
    torch.set_num_threads(1)
    return {name: trained(parallel_models.whole(), name) for name in ESTIMATORS}


def test_two_ranks_find_the_curvature_of_the_global_batch(expected):
    run_on_two_ranks(partial(on_two_ranks, expected))


@pytest.mark.distributed
def test_four_ranks_find_the_curvature_of_the_global_batch(expected):
    run_on_ranks(4, partial(on_four_ranks, expected))
