"""Block scales by loops over entries: slow, and plain to read."""

import math

import torch

from blockopt.block_lr.scales import block_scales
from tests.helpers.models import FAMILIES, block_index

LEVELS = ("role", "layer", "tensor", "head")
MODELS = {
    name: FAMILIES[name]() for name in ("nanogpt", "gpt_neox", "llama", "phi3")
}  # fused, interleaved, grouped-query


def random_curvature(blocks, seed=0, dtype=torch.float64):
    """Between 1e-6 and 1e2, evenly in the logarithm."""
    generator = torch.Generator().manual_seed(seed)
    draw = {
        n: torch.rand(entry.num_blocks, generator=generator, dtype=torch.float64)
        for n, entry in blocks.items()
    }
    return {name: (10 ** (8 * u - 6)).to(dtype) for name, u in draw.items()}


def entries(model, blocks):
    """(parameter name, block) of every single entry of the model."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            for block in block_index(tuple(parameter.shape), blocks[name].split).flatten().tolist():
                yield name, block


def group_of(name, block, blocks, by):
    role = blocks[name].block_roles[block]
    return {
        "role": role,
        "layer": (blocks[name].layer, role),
        "tensor": (name, role),
        "head": (name, block),
    }[by]


def reference(curvature, model, blocks, power, bounds, by):
    plain = {name: values.tolist() for name, values in curvature.items()}
    keys = {
        (n, b): group_of(n, b, blocks, by)
        for n, entry in blocks.items()
        for b in range(entry.num_blocks)
    }
    members, size = {}, {}
    for place in entries(model, blocks):
        members.setdefault(keys[place], []).append(plain[place[0]][place[1]])
        size[keys[place]] = size.get(keys[place], 0) + 1
    pooled = {}
    for key, values in members.items():
        finite = [v for v in values if math.isfinite(v)]
        pooled[key] = math.fsum(finite) / len(finite) if finite else sum(values)
    usable = [v for v in pooled.values() if 0 < v < math.inf]
    for key, value in pooled.items():
        if value <= 0:
            pooled[key] = min(usable)
        elif not math.isfinite(value):
            pooled[key] = max(usable)
    y = {key: power * math.log(value) for key, value in pooled.items()}
    low, high = map(math.log, bounds)

    def clipped(key, shift):
        return min(max(y[key] - shift, low), high)

    def total(shift):
        return math.fsum(size[key] * clipped(key, shift) for key in y)

    # The total is linear between the shifts at which some group meets a bound, and falls:
    # interpolate where it meets zero.
    corners = sorted({v - bound for v in y.values() for bound in (low, high)})
    above, below = 0, len(corners) - 1
    while below - above > 1:
        middle = (above + below) // 2
        above, below = (middle, below) if total(corners[middle]) > 0 else (above, middle)
    left, right = corners[above], corners[below]
    rise = total(left) - total(right)
    shift = left + (right - left) * total(left) / rise if rise else left
    return {
        n: [math.exp(clipped(keys[n, b], shift)) for b in range(entry.num_blocks)]
        for n, entry in blocks.items()
    }


def check_against_reference(curvature, model, blocks, power, bounds, by):
    scales = block_scales(curvature, model, blocks, power=power, bounds=bounds, by=by)
    expected = reference(curvature, model, blocks, power, bounds, by)
    assert scales.keys() == expected.keys()
    for name, values in scales.items():
        torch.testing.assert_close(values, torch.tensor(expected[name]), rtol=3e-6, atol=0.0)


def mean_log(scales, model, blocks):
    logs = {name: values.double().log().tolist() for name, values in scales.items()}
    found = [logs[name][block] for name, block in entries(model, blocks)]
    return math.fsum(found) / len(found)
