"""The block finder against the models: disturbing a block disturbs only one head or one unit."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
import transformers

from blockopt import find_blocks
from tests.helpers.expected_blocks import ATTENTION, EXPECTED, section_roles
from tests.helpers.models import FAMILIES, block_index, loss_of


class AttentionCalls:
    """Runs a model, records what enters its attention, and can disturb the output of one head.

    A call is `{"query": q, "key": k, "value": v}`, each (B, H, T, dh), as the model itself hands
    them to attention.
    """

    def __init__(self, name, model, monkeypatch):
        self.name, self.model = name, model
        self.calls, self.disturbed = [], None
        if name == "bloom":  # the one family here that does not call scaled_dot_product_attention
            monkeypatch.setattr(torch.Tensor, "baddbmm", self._scores_of(torch.Tensor.baddbmm))
            monkeypatch.setattr(torch, "bmm", self._mix_of(torch.bmm))
        else:
            attention = self._attention_of(F.scaled_dot_product_attention)
            monkeypatch.setattr(F, "scaled_dot_product_attention", attention)

    def run(self, disturbed=None):
        self.calls, self.disturbed = [], disturbed
        with torch.no_grad():
            return loss_of(self.name, self.model).item()

    def _disturb(self, output):
        call = len(self.calls) - 1
        if self.disturbed is not None and self.disturbed[0] == call:
            output, generator = output.clone(), torch.Generator().manual_seed(1)
            output[:, self.disturbed[1]] += torch.randn(output[:, 0].shape, generator=generator)
        return output

    def _attention_of(self, original):
        def attention(query, key, value, *args, **kwargs):
            self.calls.append({"query": query, "key": key, "value": value})
            return self._disturb(original(query, key, value, *args, **kwargs))

        return attention

    def _scores_of(self, original):
        def baddbmm(alibi, batch1, batch2, **kwargs):
            query, key = self._heads(batch1), self._heads(batch2.transpose(1, 2))
            self.calls.append({"query": query, "key": key})
            return original(alibi, batch1=batch1, batch2=batch2, **kwargs)

        return baddbmm

    def _mix_of(self, original):
        def bmm(probabilities, value):
            self.calls[-1]["value"] = self._heads(value)
            return self._disturb(self._heads(original(probabilities, value))).flatten(0, 1)

        return bmm

    def _heads(self, x):
        return x.unflatten(0, (-1, self.model.config.n_head))


def changed_heads(before, after):
    """Return the first call that differs, and the (role, head) pairs that differ in it."""
    for call, (old, new) in enumerate(zip(before, after, strict=True)):
        changed = {
            (role, head)
            for role in ("query", "key", "value")
            for head in range(old[role].shape[1])
            if (old[role][:, head] - new[role][:, head]).abs().max() > 1e-4
        }
        if changed:
            return call, changed
    return None, set()


@pytest.fixture(params=ATTENTION)
def attention(request, monkeypatch):
    """A model whose attention is watched, its blocks and its parameters, all of them trainable."""
    model = FAMILIES[request.param]().requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # far from the near-zero initialisation, so that a change shows
        for p in model.parameters():
            if p.ndim == 2:
                p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return (
        AttentionCalls(request.param, model, monkeypatch),
        find_blocks(model),
        dict(model.named_parameters()),
    )


def test_each_query_key_and_value_block_feeds_one_head_alone(attention):
    watched, blocks, parameters = attention
    watched.run()
    before = watched.calls
    reached = set()
    for name, parameter in parameters.items():
        roles = section_roles(name, blocks)
        if roles is None:
            continue
        index = block_index(tuple(parameter.shape), blocks[name].split)
        number = Counter()
        block_roles = blocks[name]._replace(roles=roles).block_roles
        heads_of_role = Counter(block_roles)
        for block, role in enumerate(block_roles):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(block))
            original = parameter.detach().clone()
            parameter.data += noise * (index == block)
            watched.run()
            parameter.data.copy_(original)
            call, changed = changed_heads(before, watched.calls)
            assert call is not None, f"{name}: block {block} changes no attention"
            # Key-value heads may come repeated.
            copies = before[call][role].shape[1] // heads_of_role[role]
            heads = range(number[role] * copies, (number[role] + 1) * copies)
            assert changed == {(role, head) for head in heads}, f"{name}: block {block}"
            number[role] += 1
            if parameter.ndim == 2:
                reached |= {(call, *pair) for pair in changed}
    everything = {
        (i, role, head)
        for i, call in enumerate(before)
        for role in call
        for head in range(call[role].shape[1])
    }
    assert reached == everything


def test_each_output_block_is_all_that_meets_its_head(attention):
    watched, blocks, parameters = attention
    watched.run()
    outputs = [name for name in parameters if blocks[name].roles == ("output",)]
    assert len(outputs) == len(watched.calls)
    for call, name in enumerate(outputs):
        parameter, heads = parameters[name], watched.calls[0]["query"].shape[1]
        assert blocks[name].num_blocks == heads
        index = block_index(tuple(parameter.shape), blocks[name].split)
        for head in range(heads):
            original = parameter.detach().clone()
            parameter.data[index == head] = 0.0
            undisturbed = watched.run()
            losses = [watched.run(disturbed=(call, h)) for h in range(heads)]
            parameter.data.copy_(original)
            seen = [h for h, loss in enumerate(losses) if abs(loss - undisturbed) > 1e-5]
            others = [h for h in range(heads) if h != head]
            assert seen == others, f"{name}: without block {head} the loss sees heads {seen}"


UNIT_ROLES = {"mlp_in", "mlp_gate", "mlp_out", "head"}


def with_units(name):
    return any(
        UNIT_ROLES & set(blocks.roles) and parameter.endswith("weight")
        for parameter, blocks in EXPECTED[name].items()
    )


@pytest.mark.parametrize("name", [name for name in FAMILIES if with_units(name)])
def test_each_row_of_an_mlp_or_head_is_one_output_unit(name):
    model = FAMILIES[name]()
    blocks = find_blocks(model)
    checked = 0
    for module_name, module in model.named_modules():
        entry = blocks.get(f"{module_name}.weight")
        if entry is None or not UNIT_ROLES & set(entry.roles):
            continue
        checked += 1
        stored_input_first = isinstance(module, transformers.pytorch_utils.Conv1D)
        inputs = torch.rand(3, module.weight.shape[0 if stored_input_first else 1]) + 1.0
        weight, bias = module.weight, module.bias
        before = module(inputs).detach()
        assert entry.num_blocks == before.shape[1]
        for tensor, split in ((weight, entry.split), (bias, entry.split._replace(dim=0))):
            if tensor is None:
                continue
            index = block_index(tuple(tensor.shape), split)
            for unit in range(0, entry.num_blocks, 5):
                original = tensor.detach().clone()
                tensor.data += 1.0 * (index == unit)
                difference = (module(inputs).detach() - before).abs().amax(dim=0)
                tensor.data.copy_(original)
                assert difference.nonzero().flatten().tolist() == [unit]
        if bias is not None and f"{module_name}.bias" in blocks:
            assert blocks[f"{module_name}.bias"].split == entry.split._replace(dim=0)
    assert checked


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "phi3", "t5-gated"])
def test_the_gate_is_what_enters_the_activation(name):
    model = FAMILIES[name]()
    blocks = find_blocks(model)
    inputs = []
    activation_types = ("SiLU", "SiLUActivation", "NewGELUActivation", "GELUActivation")
    for module in model.modules():
        if type(module).__name__ in activation_types:
            module.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))

    def activations():
        inputs.clear()
        with torch.no_grad():
            loss_of(name, model)
        return list(inputs)

    before = activations()
    holders = {
        role: [n for n, entry in blocks.items() if role in entry.roles]
        for role in ("mlp_gate", "mlp_in")
    }
    assert len(before) == len(holders["mlp_gate"]) == len(holders["mlp_in"]) > 0
    for parameter_name, parameter in model.named_parameters():
        entry = blocks[parameter_name]
        index = block_index(tuple(parameter.shape), entry.split)
        number = Counter()
        for block, role in enumerate(entry.block_roles):
            unit = number[role]
            number[role] += 1
            if role not in holders or unit % 7:
                continue
            original = parameter.detach().clone()
            parameter.data += 1.0 * (index == block)
            own = holders[role].index(parameter_name)
            difference = (activations()[own] - before[own]).flatten(0, -2).abs().amax(dim=0)
            parameter.data.copy_(original)
            assert difference.nonzero().flatten().tolist() == ([unit] if role == "mlp_gate" else [])
