"""Optimizers by name, over the same groups: weight decay on matrices only, for all of them.

| name | what |
|---|---|
| `block-adamw`, `block-sgd`, `block-muon` | blockopt's |
| `block-adamw-block` | BlockAdamW with one second moment per Hessian block |
| `block-adamw-whitened` | BlockAdamW with whitened columns of the embedding and the head |
| `adamw`, `sgd` | `torch.optim` |
| `muon` | `torch.optim.Muon` for the matrices in layers, `torch.optim.AdamW` for the rest |
| `torch_optimizer:NAME` | any of torch-optimizer, such as `torch_optimizer:Yogi` |
| `adam-mini`, `schedulefree` | from the packages of these names |
| `soap`, `sophia` | `SOAP` and `SophiaH` of the package pytorch-optimizer |

Weight decay is decoupled from the gradient, except in `sgd` and in some of torch-optimizer, which
add it to the gradient.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

import blockopt
from blockopt.block_lr.wrappers import unwrapped
from blockopt.blocks import Blocks, UnknownBlocksError, find_blocks, from_plain
from blockopt.optim.matrix_sections import is_hidden_matrix
from recipes.common.errors import MissingPackageError, UsageError, import_package

SECOND_MOMENTS = {
    "block-adamw": "coordinate",
    "block-adamw-block": "block",
    "block-adamw-whitened": "whitened",
}
OURS = (*SECOND_MOMENTS, "block-sgd", "block-muon")
THEIRS = ("adamw", "sgd", "muon", "adam-mini", "soap", "sophia", "schedulefree")
NAMES = (*OURS, *THEIRS, "torch_optimizer:NAME")
# The module that an optimizer comes from, and the package to install for it.
PACKAGES = {
    "adam-mini": ("adam_mini", "adam-mini"),
    "soap": ("pytorch_optimizer", "pytorch-optimizer"),
    "sophia": ("pytorch_optimizer", "pytorch-optimizer"),
    "schedulefree": ("schedulefree", "schedulefree"),
    "torch_optimizer": ("torch_optimizer", "torch-optimizer"),
}
# Where tuning starts on our small GPT-2; 3e-3 for others.
LEARNING_RATES = {"sgd": 0.3, "block-sgd": 0.15, "muon": 1e-2, "block-muon": 1e-2}
BETAS = {"soap": (0.95, 0.95), "sophia": (0.96, 0.99)}  # of their papers; (0.9, 0.95) for others
EXAMPLE = 16  # tokens of a pass that finds the blocks of a model that names do not explain
NOT_BY_NAME = {
    "Lookahead": "wraps another optimizer",
    "Adahessian": "needs a graph of the gradient in each step",
    "Apollo": "cannot continue from a checkpoint",
}


def check_optimizer(name: str) -> None:
    """Check, before any data or model is made, that the optimizer exists and can be imported.

    Raises:
        UsageError: If the name is unknown.
        MissingPackageError: If a package is missing; the message says which to install.
    """
    package, _, chosen = name.partition(":")
    if name not in NAMES[:-1] and not (package == "torch_optimizer" and chosen):
        raise UsageError(f"Invalid optimizer {name!r}. Must be one of {', '.join(NAMES)}.")
    if package in PACKAGES:
        module = _module(package, name)
        if chosen in NOT_BY_NAME:
            raise UsageError(f"Invalid optimizer {name!r}: it {NOT_BY_NAME[chosen]}. Take another.")
        if chosen and not _is_optimizer(getattr(module, chosen, None)):
            known = {n for n, c in vars(module).items() if _is_optimizer(c)} - NOT_BY_NAME.keys()
            listed = ", ".join(sorted(known))
            raise UsageError(f"Invalid optimizer {name!r}. torch-optimizer has {listed}.")
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        raise MissingPackageError(
            f"Optimizer 'muon' needs torch 2.9 or later, this is {torch.__version__}."
        )


def _module(package: str, name: str) -> Any:
    module, to_install = PACKAGES[package]
    return import_package(module, f"Optimizer {name!r}", to_install)


def _is_optimizer(candidate: Any) -> bool:
    is_class = inspect.isclass(candidate) and issubclass(candidate, Optimizer)
    return is_class and candidate is not Optimizer


def usual_lr(name: str) -> float:
    """Return the learning rate to take where none is given."""
    return LEARNING_RATES.get(name, 3e-3)


def build_optimizer(
    name: str,
    model: nn.Module,
    lr: float,
    *,
    weight_decay: float = 0.1,
    betas: tuple[float, float] | None = None,
    momentum: float | None = None,
    curvature: str | None = None,
    overrides: Mapping[str, Blocks] | None = None,
    example: Any = None,
) -> Optimizer:
    """Build the optimizer of this name for all trainable parameters of the model.

    Args:
        name: One of `NAMES`.
        model: Any transformer, whose blocks `blockopt.find_blocks` finds by names or in a pass.
        lr: Learning rate.
        weight_decay: For matrices other than norms; everything else has none.
        betas: For optimizers with two moments; by default what is usual for each.
        momentum: For SGD and BlockMuon (by default 0.9) and torch's Muon (by default 0.95).
        curvature: What a `BlockLR` will measure, if one will be attached. Optimizers that are not
            blockopt's then get one group per parameter, so that each can have its own learning
            rate.
        overrides: Blocks of parameters or patterns, instead of those that would be found.
        example: What the model is called with, for a forward pass if names do not tell its blocks.

    Raises:
        UsageError: If the name is unknown, the optimizer cannot train the model, or its blocks
            cannot be told.
        MissingPackageError: If its package is not installed.

    Example:
        >>> model = nn.TransformerEncoderLayer(16, 2, 32)
        >>> optimizer = build_optimizer("block-adamw", model, lr=1e-3)
        >>> decay = {group["role"]: group["weight_decay"] for group in optimizer.param_groups}
        >>> type(optimizer).__name__, decay["bias"]
        ('BlockAdamW', 0.0)
    """
    check_optimizer(name)
    betas = BETAS.get(name, (0.9, 0.95)) if betas is None else betas
    by = "parameter" if curvature is not None and name not in OURS else "role"
    blocks = _find_blocks(model, overrides or {}, example)
    groups = blockopt.param_groups(model, blocks, weight_decay=weight_decay, by=by)
    sgd_momentum = 0.9 if momentum is None else momentum
    if name in SECOND_MOMENTS:
        second_moment = SECOND_MOMENTS[name]
        return blockopt.BlockAdamW(groups, lr=lr, betas=betas, second_moment=second_moment)
    if name == "block-sgd":
        return blockopt.BlockSGD(groups, lr=lr, momentum=sgd_momentum)
    if name == "block-muon":
        given = {} if momentum is None else {"momentum": momentum}
        return blockopt.BlockMuon(groups, lr=lr, betas=betas, **given)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=betas)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=sgd_momentum)
    if name == "muon":
        usual = 0.95 if momentum is None else momentum
        return MuonWithAdamW(groups, lr=lr, betas=betas, momentum=usual)
    if name == "adam-mini":
        return _adam_mini(model, lr, weight_decay, betas)
    if name == "schedulefree":
        optimizer = _module(name, name).AdamWScheduleFree(groups, lr=lr, betas=betas)
        optimizer.train()
        return optimizer
    if name in ("soap", "sophia"):
        module = _module(name, name)
        return (module.SOAP if name == "soap" else module.SophiaH)(groups, lr=lr, betas=betas)
    wanted = {"lr": lr, "betas": betas, "momentum": sgd_momentum}
    return _of_torch_optimizer(name.partition(":")[2], groups, wanted)


def _find_blocks(
    model: nn.Module, overrides: Mapping[str, Blocks], example: Any
) -> Mapping[str, Blocks]:
    """Find the blocks by names or, where these do not tell, in a forward pass on the example."""
    try:
        try:
            return find_blocks(model, overrides=overrides)
        except UnknownBlocksError:
            if example is None:
                raise
            return find_blocks(model, overrides=overrides, example=example)
    except UnknownBlocksError as error:
        raise UsageError(error.for_a_command()) from None
    except ValueError as error:
        if not overrides:
            raise
        raise UsageError(str(error)) from error


def _of_torch_optimizer(
    name: str, groups: list[dict[str, Any]], wanted: dict[str, Any]
) -> Optimizer:
    """Build the class of this name with those options that it has; AggMo keeps its three betas."""
    cls = getattr(_module("torch_optimizer", name), name)
    known = inspect.signature(cls).parameters
    if known.get("betas") is not None and len(known["betas"].default) != 2:
        wanted = {key: value for key, value in wanted.items() if key != "betas"}
    options = {key: value for key, value in wanted.items() if key in known}
    if name.startswith("A2Grad"):
        warnings.warn(
            f"{name} sets its own step sizes: learning rate, schedule and weight decay do nothing.",
            stacklevel=3,
        )
    if name == "Adafactor":  # it would ignore our learning rate
        options |= {"relative_step": False, "scale_parameter": False}
    # Written for older versions of torch: parameters without names.
    plain = [
        {"params": [p for _, p in group["params"]], "weight_decay": group["weight_decay"]}
        for group in groups
    ]
    return cls(plain, **options)


def _adam_mini(
    model: nn.Module, lr: float, weight_decay: float, betas: tuple[float, float]
) -> Optimizer:
    """Build Adam-mini, which finds its blocks by name in matrices stored like `nn.Linear`'s."""
    if any(type(module).__name__ == "Conv1D" for module in model.modules()):
        raise UsageError(
            "Optimizer 'adam-mini' reads heads and neurons from rows, and Conv1D stores columns."
        )
    config: Any = model.config
    heads = getattr(config, "heads", None) or config.num_attention_heads
    optimizer = _module("adam-mini", "adam-mini").Adam_mini(
        model.named_parameters(),
        lr=lr,
        betas=betas,
        weight_decay=weight_decay,
        dim=getattr(config, "width", None) or config.hidden_size,
        n_heads=heads,
        n_kv_heads=getattr(config, "num_key_value_heads", heads),
        verbose=False,
    )
    # A fused matrix holds the heads of query, key and value one after another: blocks of the size
    # that it expects.
    optimizer.wqk_names.add("c_attn")
    optimizer.attn_proj_names.add("attn.c_proj")
    optimizer.embd_names.add("wpe")
    return optimizer


class MuonWithAdamW(Optimizer):
    """`torch.optim.Muon` for the matrices in layers and `torch.optim.AdamW` for the rest, as one.

    Muon's step has the root mean square of AdamW's (`match_rms_adamw`), so that one learning rate
    serves both.

    Args:
        groups: What `blockopt.param_groups` returns, with weight decay.
        lr: Learning rate.
        betas: For AdamW.
        momentum: For Muon.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], momentum: float
    ) -> None:
        parts: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for group in groups:
            for hidden, found in parts.items():
                chosen = [
                    (p, blocks)
                    for p, blocks in zip(group["params"], group["blocks"])
                    if (p[1].ndim == 2 and is_hidden_matrix(p[1], from_plain(blocks))) == hidden
                ]
                if chosen:
                    params, blocks = map(list, zip(*chosen))
                    found.append({**group, "params": params, "blocks": blocks})
        if not parts[True]:
            raise UsageError("Optimizer 'muon' needs matrices in layers, and the model has none.")
        options = {"lr": lr, "momentum": momentum, "adjust_lr_fn": "match_rms_adamw"}
        self._parts: dict[str, Optimizer] = {"muon": torch.optim.Muon(parts[True], **options)}
        if parts[False]:
            self._parts["adamw"] = torch.optim.AdamW(parts[False], lr=lr, betas=betas)
        made = [
            {**group, "algorithm": name}
            for name, part in self._parts.items()
            for group in part.param_groups
        ]
        super().__init__(made, {"lr": lr})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, part in self._parts.items():
            # Handed over in each step, as loading a checkpoint and sharding a model replace groups
            # and parameters.
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group["algorithm"] == name]
            part.step()
        return loss


def take_step(optimizer: Optimizer, loss: Callable[[], Tensor]) -> None:
    """Take one step. Sophia needs the diagonal of the Hessian now and then: measure it first.

    Args:
        optimizer: Wrapped by accelerate or not.
        loss: The loss of a batch, by a model that DDP does not wrap.
    """
    inner: Any = unwrapped(optimizer)
    groups = inner.param_groups
    if type(inner).__name__ == "SophiaH" and groups[0].get("step", 0) % inner.update_period == 0:
        parameters = [p for group in groups for p in group["params"]]
        inner.step(hessian=hessian_diagonal(parameters, loss))
    else:
        optimizer.step()


def hessian_diagonal(parameters: list[Tensor], loss: Callable[[], Tensor]) -> list[Tensor]:
    """Return Hutchinson's estimate `z * Hz` with one vector of signs, averaged over ranks.

    Raises:
        UsageError: If a parameter is sharded, for which there are no second derivatives.
    """
    if any(hasattr(p, "placements") for p in parameters):
        raise UsageError(
            "Optimizer 'sophia' needs whole parameters. Train with DDP, or choose another."
        )
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # others have no second derivative
        gradients = torch.autograd.grad(loss(), parameters, create_graph=True)
        signs = [torch.randint_like(p, 2) * 2 - 1 for p in parameters]
        products = torch.autograd.grad(gradients, parameters, signs)
    diagonal = [sign * product for sign, product in zip(signs, products)]
    if dist.is_available() and dist.is_initialized():
        for values in diagonal:
            dist.all_reduce(values)
            values /= dist.get_world_size()
    return diagonal
