"""Language models with few parameters, and their Hessian entry by entry."""

import torch
from torch.nn import functional as F

from blockopt.cli.local_model import load_model

GPT2 = {"n_layer": 1, "n_embd": 4, "n_head": 2, "n_inner": 6, "n_positions": 16, "vocab_size": 11}


LLAMA = {
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 13,
}


def exact_matrix(model, ids, names):
    """The Hessian of the mean cross-entropy of the next token in some parameters."""
    parameters = dict(model.named_parameters())
    sizes = [parameters[name].numel() for name in names]

    def loss(vector):
        pieces = {
            name: piece.view_as(parameters[name]) for name, piece in zip(names, vector.split(sizes))
        }
        logits = torch.func.functional_call(model, pieces, kwargs={"input_ids": ids}).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    model.eval()
    start = torch.cat([parameters[name].detach().flatten() for name in names])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.autograd.functional.hessian(loss, start)


def small_model(kind="gpt2", sequences=3, length=8, **entries):
    model = load_model(
        kind, {**(GPT2 if kind == "gpt2" else LLAMA), **entries}, seed=1
    ).model.double()
    generator = torch.Generator().manual_seed(0)
    # Farther from zero than at the start: queries and keys have curvature then
    for p in model.parameters():
        p.data += 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    ids = torch.randint(0, model.config.vocab_size, (sequences, length), generator=generator)
    return model, ids
