"""Every optimizer by name trains, covers each parameter once, and decays matrices only."""

import copy
import doctest
import re
import sys
import warnings
from fnmatch import fnmatchcase

import pytest
import torch
import torch_optimizer
import transformers

import blockopt
from blockopt.blocks import from_plain, parse_override
from blockopt.blocks.tried_modules import Tried
from recipes.common import optimizers
from recipes.common.errors import UsageError
from recipes.common.gpt2 import GPT2, to_huggingface
from recipes.common.optimizers import (
    NAMES,
    OURS,
    build_optimizer,
    check_optimizer,
    hessian_diagonal,
    take_step,
)
from tests.helpers.optimizers import TINY, tiny_gpt, token_loss
from tests.helpers.research_models import RESEARCH, research_model, tokens

DECOUPLED = (*OURS, "adamw", "muon", "adam-mini", "soap", "sophia", "schedulefree")
BY_NAME = [
    n
    for n, c in vars(torch_optimizer).items()
    if optimizers._is_optimizer(c) and n not in optimizers.NOT_BY_NAME
]


def build(name, model, **options):
    return build_optimizer(name, model, 1e-2, **options)


def train(model, optimizer, steps=6, block_lr=None):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = token_loss(model)
        loss.backward()
        take_step(optimizer, lambda: token_loss(model))
        losses.append(loss.item())
        if block_lr is not None:
            block_lr.step(lambda: token_loss(model))
    return losses


def assert_covered_once(model, optimizer, weight_decay, positions=False):
    held = [(p, group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(list(model.parameters()))
    decays = dict(held)
    for name, parameter in model.named_parameters():
        decayed = parameter.ndim == 2 and (positions or name != "wpe.weight")
        assert decays[parameter] == (weight_decay if decayed else 0), name


def test_doctests():
    assert doctest.testmod(optimizers).failed == 0


@pytest.mark.parametrize("name", NAMES[:-1])
def test_each_trains_and_resumes(name):
    model = tiny_gpt()
    optimizer = build(name, model, weight_decay=0.3)
    assert_covered_once(model, optimizer, 0.3, positions=name == "adam-mini")  # groups of its own
    losses = train(model, optimizer)
    assert losses[-1] < losses[0] - 0.01
    saved, weights = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    torch.manual_seed(1)  # Sophia draws
    expected = train(model, optimizer)
    other = GPT2(TINY)
    resumed = build(name, other, weight_decay=0.3)
    other.load_state_dict(weights)
    resumed.load_state_dict(saved)
    torch.manual_seed(1)
    if name in ("adam-mini", "soap", "sophia", "schedulefree"):
        assert train(other, resumed) == pytest.approx(expected, rel=1e-5)
    else:
        assert train(other, resumed) == expected


@pytest.mark.parametrize("name", BY_NAME)
def test_each_of_torch_optimizer_trains_and_resumes(name):
    model, other = tiny_gpt(), GPT2(TINY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls torch in ways that torch deprecates
        optimizer = build_optimizer(f"torch_optimizer:{name}", model, 1e-2, weight_decay=0.3)
        assert type(optimizer).__name__ == name
        assert_covered_once(model, optimizer, 0.3)
        losses = train(model, optimizer)
        other.load_state_dict(model.state_dict())
        resumed = build_optimizer(f"torch_optimizer:{name}", other, 1e-2, weight_decay=0.3)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert train(other, resumed, steps=2) == pytest.approx(
            train(model, optimizer, steps=2), rel=1e-5
        )
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", DECOUPLED)
def test_decay_alone_shrinks_matrices_by_the_same_factor(name):
    """Without gradient the step is the decay: matrices times 1 - lr * weight_decay."""
    model = tiny_gpt()
    optimizer = build(name, model, weight_decay=0.5)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for _ in range(2 if name == "soap" else 1):  # its first step only looks
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        take_step(optimizer, lambda: 0 * sum(p.square().sum() for p in model.parameters()))
    if name == "schedulefree":
        optimizer.eval()
    for n, p in model.named_parameters():
        decayed = p.ndim == 2 and (name == "adam-mini" or n != "wpe.weight")
        factor = 1 - 1e-2 * 0.5 if decayed else 1.0
        torch.testing.assert_close(
            p.detach(), before[n] * factor, rtol=1e-5, atol=1e-7, msg=lambda t, n=n: f"{n}: {t}"
        )


def test_ours_equals_torch():
    a, b = tiny_gpt(), tiny_gpt()
    assert train(a, build("adamw", a)) == pytest.approx(train(b, build("block-adamw", b)), rel=1e-5)


def test_muon_is_the_two_of_torch():
    """The same steps as two separate optimizers, also after a round trip of the state."""
    one, two = tiny_gpt(), tiny_gpt()
    together = build_optimizer("muon", one, 1e-2, weight_decay=0.2)
    inside = {n: p for n, p in two.named_parameters() if p.ndim == 2 and n.startswith("h.")}
    rest = {n: p for n, p in two.named_parameters() if n not in inside}
    muon = torch.optim.Muon(
        inside.values(), lr=1e-2, weight_decay=0.2, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    groups = [
        {
            "params": [p for n, p in rest.items() if (p.ndim == 2 and n != "wpe.weight") == decay],
            "weight_decay": 0.2 * decay,
        }
        for decay in (1, 0)
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    for step in range(6):
        if step == 3:
            together.load_state_dict(together.state_dict())
            for optimizer in (together, muon, adamw):  # as a schedule does
                for group in optimizer.param_groups:
                    group["lr"] = 3e-3
        for model, both in ((one, [together]), (two, [muon, adamw])):
            model.zero_grad()
            token_loss(model, seed=step).backward()
            for optimizer in both:
                optimizer.step()
    for (name, p), q in zip(one.named_parameters(), two.parameters()):
        torch.testing.assert_close(
            p, q, rtol=1e-5, atol=1e-6, msg=lambda t, name=name: f"{name}: {t}"
        )


@pytest.mark.parametrize(
    "name", ["adamw", "sgd", "muon", "adam-mini", "torch_optimizer:Yogi", "block-muon"]
)
def test_block_lr_can_be_attached(name):
    model = tiny_gpt()
    optimizer = build_optimizer(name, model, 1e-2, curvature="gradient")
    block_lr = blockopt.BlockLR(optimizer, model, curvature="gradient", every=2)
    train(model, optimizer, block_lr=block_lr)
    assert len(block_lr.history) == 3
    scales = torch.cat(list(block_lr.last_scales.as_dict().values()))
    assert scales.max() > 1.2 > 0.9 > scales.min()


def test_adam_mini_has_one_second_moment_a_head():
    model = tiny_gpt()
    optimizer = build_optimizer("adam-mini", model, 1e-2)
    train(model, optimizer, steps=1)
    sizes = {
        name: optimizer.state[p]["vmean"].numel()
        for name, p in model.named_parameters()
        if "vmean" in optimizer.state[p]
    }
    assert sizes["h.0.attn.c_attn.weight"] == 3 * TINY.heads
    assert sizes["h.0.attn.c_proj.weight"] == TINY.width
    assert sizes["h.1.mlp.c_fc.weight"] == 4 * TINY.width
    assert sizes["wte.weight"] == TINY.vocab_size


def test_adam_mini_takes_the_sizes_of_huggingface():
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=19, num_key_value_heads=2, **sizes)
    )
    optimizer = build_optimizer("adam-mini", llama, 1e-2)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    llama(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert optimizer.state[llama.model.layers[0].self_attn.q_proj.weight]["vmean"].numel() == 4
    assert optimizer.state[llama.model.layers[0].self_attn.k_proj.weight]["vmean"].numel() == 2
    with pytest.raises(ValueError, match="Conv1D"):
        build_optimizer("adam-mini", to_huggingface(tiny_gpt()), 1e-2)


def test_hessian_diagonal_is_exact_for_a_diagonal_hessian():
    w = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
    (found,) = hessian_diagonal([w], lambda: (torch.tensor([1.0, 2.0, 3.0]) * w**3).sum())
    torch.testing.assert_close(found, 6 * torch.tensor([1.0, 2.0, 3.0]) * w.detach())


def test_hessian_diagonal_on_average_of_a_model():
    model = tiny_gpt(dtype=torch.float64)
    name, weight = "h.0.attn.c_proj.bias", model.h[0].attn.c_proj.bias
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = torch.autograd.functional.hessian(
            lambda b: torch.func.functional_call(model, {name: b}, (TOKENS[:, :-1], TOKENS[:, 1:])),
            weight.detach(),
        ).diagonal()
    torch.manual_seed(0)
    loss = lambda: model(TOKENS[:, :-1], TOKENS[:, 1:])  # noqa: E731
    mean = torch.stack([hessian_diagonal([weight], loss)[0] for _ in range(200)]).mean(0)
    assert torch.corrcoef(torch.stack([mean, exact]))[0, 1] > 0.8
    assert mean.sum() == pytest.approx(exact.sum().item(), rel=0.2)


TOKENS = torch.randint(19, (4, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("name", "package"),
    [
        *(
            ("adam-mini", "adam-mini"),
            ("soap", "pytorch-optimizer"),
            ("sophia", "pytorch-optimizer"),
        ),
        *(("schedulefree", "schedulefree"), ("torch_optimizer:Yogi", "torch-optimizer")),
    ],
)
def test_a_missing_package_is_named(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, optimizers.PACKAGES[name.partition(":")[0]][0], None)
    with pytest.raises(ModuleNotFoundError, match=f"{name}.*pip install {package}"):
        check_optimizer(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adam", "Must be one of block-adamw"),
        ("torch_optimizer", "Must be one of"),
        ("torch_optimizer:NAME", "torch-optimizer has .*Yogi"),
        ("torch_optimizer:Yogurt", "torch-optimizer has .*Yogi"),
        ("torch_optimizer:Lookahead", "wraps another"),
        ("torch_optimizer:Adahessian", "graph"),
        ("torch_optimizer:Apollo", "checkpoint"),
    ],
)
def test_unknown_names_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        check_optimizer(name)


def test_an_optimizer_without_learning_rate_says_so():
    with pytest.warns(UserWarning, match="its own step sizes"):
        build_optimizer("torch_optimizer:A2GradUni", tiny_gpt(), 1e-2)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="weight_decay=-1"):
        build_optimizer("adamw", tiny_gpt(), 1e-2, weight_decay=-1)
    with pytest.raises(ValueError, match="matrices in layers"):
        build_optimizer("muon", torch.nn.Embedding(3, 4), 1e-2)


def letters_of_unknown_heads(monkeypatch):
    """A model whose blocks names do not tell, nor its layers by themselves."""
    monkeypatch.setattr("blockopt.blocks.find.try_modules", lambda *_: Tried({}, {}, {}))
    model = research_model("letters")
    for block in model.blocks:
        del block.h
    return model


def test_overrides_settle_blocks_and_are_asked_for(monkeypatch):
    """The overrides that a refusal proposes are taken, and stand in the optimizer's groups."""
    model = letters_of_unknown_heads(monkeypatch)
    with pytest.raises(UsageError, match="To this command, pass\n    --override") as caught:
        build_optimizer("block-adamw", model, 1e-2)
    proposed = re.findall(r"--override '(.+)'", str(caught.value))
    overrides = dict(map(parse_override, proposed))
    optimizer = build_optimizer("block-adamw", model, 1e-2, overrides=overrides)
    groups = optimizer.param_groups
    held = {p: from_plain(b) for g in groups for p, b in zip(g["params"], g["blocks"])}
    matched = 0
    for parameter_name, parameter in model.named_parameters():
        for pattern, blocks in overrides.items():
            if fnmatchcase(parameter_name, pattern):
                assert held[parameter]._replace(layer=None) == blocks
                matched += 1
    assert matched >= len(overrides) > 0


@pytest.mark.parametrize("name", ["block-adamw", "adamw"])
def test_a_batch_finds_the_blocks_that_names_do_not_tell(name, monkeypatch):
    model = letters_of_unknown_heads(monkeypatch)
    with pytest.raises(ValueError, match="example="):
        build_optimizer(name, model, 1e-2, curvature="newton")
    optimizer = build_optimizer(name, model, 1e-2, curvature="newton", example=tokens()[:1])
    held = {
        parameter: from_plain(entry)
        for group in optimizer.param_groups
        for parameter, entry in zip(group["params"], group["blocks"])
    }
    expected = RESEARCH["letters"][2]
    assert {n: held[p] for n, p in model.named_parameters()} == expected
    block_lr = blockopt.BlockLR(optimizer, model, curvature="gradient", every=1)

    def loss():
        return torch.nn.functional.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten())

    loss().backward()
    optimizer.step()
    block_lr.step(loss)
    roles = {group.role for group in block_lr.history[-1].scale}
    assert {"query", "key", "value", "output", "position", "head"} <= roles
