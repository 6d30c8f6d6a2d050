"""What the estimators share: closures and their batches, a refresh that leaves no trace, sums over blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from blockopt.blocks import Blocks, find_blocks
from blockopt.blocks.split import block_numel, block_sum, block_sum_along
from blockopt.distributed import is_sharded, local, sum_over_ranks

Loss = Callable[[], Any]
Losses = Loss | Iterable[Loss]
Curvature = dict[str, Tensor]
Key = TypeVar("Key")


class Evaluation:
    """One batch: runs the closure, checks the loss, and remembers the number of tokens that the closure gave with it.

    Args:
        closure: The user's.
        autocast: In which to run it.
    """

    def __init__(self, closure: Loss, autocast: torch.autocast) -> None:
        self._closure, self._autocast = closure, autocast
        self.tokens: float | None = None

    def __call__(self) -> Tensor:
        """The loss.

        Raises:
            TypeError: If the closure gives no scalar tensor with a graph, or that and a number of
                tokens.
            FloatingPointError: If the loss is not finite.
        """
        torch.clear_autocast_cache()  # of casts of the weights, which a secant has moved since
        with torch.enable_grad(), self._autocast:
            result = self._closure()
        loss, tokens = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = (
                f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            )
            what += (
                ", which requires no gradient"
                if isinstance(loss, Tensor) and not loss.requires_grad
                else ""
            )
            raise TypeError(
                f"The loss closure returned {what}. Must be the mean loss of a batch as a scalar tensor with its graph, alone "
                "or with the number of tokens: `lambda: model(**batch).loss` or `lambda: (model(**batch).loss, num_tokens)`."
            )
        if not bool(torch.isfinite(loss.detach())):
            raise FloatingPointError(
                f"The loss closure returned {loss.item()}. Curvature needs a finite loss."
            )
        self.tokens = None if tokens is None else float(tokens)
        with torch.enable_grad():
            return loss.reshape(())


def mean_over_batches(
    model: nn.Module,
    losses: Losses,
    blocks: Mapping[str, Blocks] | None,
    traces_of: Callable[[Evaluation, Mapping[str, Blocks]], Curvature],
) -> Curvature:
    """Mean curvature a block: the traces of each batch, averaged by tokens, over the number of entries of the block."""
    blocks = checked_blocks(model, blocks)
    traces = batch_means(model, losses, lambda evaluation: traces_of(evaluation, blocks))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return {
        name: traces[name] / block_numel(shapes[name], b.split).to(traces[name])
        for name, b in blocks.items()
    }


def batch_means(
    model: nn.Module, losses: Losses, measure: Callable[[Evaluation], dict[Key, Tensor]]
) -> dict[Key, Tensor]:
    """What `measure` finds for each batch, averaged by tokens; batches count alike if no closure gives their number."""
    total: dict[Key, Tensor] = {}
    weights: list[float | None] = []
    device = next(model.parameters()).device.type
    callers = torch.autocast(
        device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    )
    for closure in [losses] if callable(losses) else losses:
        evaluation = Evaluation(closure, callers)
        with (
            undisturbed(model),
            torch.autocast(device, enabled=False),
        ):  # a caller's autocast is for the forward pass only
            measured = measure(evaluation)
        torch.clear_autocast_cache()
        weights.append(evaluation.tokens)
        for key, value in measured.items():
            weighted = (
                value.detach() if evaluation.tokens is None else value.detach() * evaluation.tokens
            )
            total[key] = total[key] + weighted if key in total else weighted
    if not weights:
        raise ValueError("Invalid losses: no closure. Must be one or more.")
    if len({weight is None for weight in weights}) > 1:
        raise ValueError(
            "Some loss closures returned a number of tokens and some did not. All must, or none."
        )
    weight = sum(1.0 if w is None else w for w in weights)
    if not weight > 0:
        raise ValueError(f"Invalid numbers of tokens {weights[:5]}. Their sum must be positive.")
    return {key: value / weight for key, value in total.items()}


def checked_blocks(model: nn.Module, blocks: Mapping[str, Blocks] | None) -> Mapping[str, Blocks]:
    """The blocks given, if they fit the trainable parameters, or those that `find_blocks` finds."""
    if blocks is None:
        return find_blocks(model)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    if blocks.keys() != shapes.keys():
        wrong = sorted(shapes.keys() ^ blocks.keys())[:3]
        raise ValueError(
            f"Invalid blocks: {wrong} are in the blocks or in the model's trainable parameters, not in both."
        )
    for name, shape in shapes.items():
        blocks[name].check(shape)
    return blocks


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that require a gradient, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def refuse_sharded(model: nn.Module, estimator: str) -> None:
    """Raise `ValueError` for FSDP2 and tensor-parallel models, for estimators that need whole parameters."""
    sharded = next((name for name, p in model.named_parameters() if is_sharded(p)), None)
    if sharded is not None:
        raise ValueError(
            f"{estimator} needs whole parameters, and {sharded!r} is sharded. Use the gradient-only estimators: 'newton', "
            "'secant', 'gauss_newton' or 'gradient'."
        )


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run in evaluation mode, and put back gradients, random state, buffers and training modes at the end.

    Evaluation mode gives the curvature of the model itself, without the noise of a dropout mask.
    DDP wrappers that run inside do not wait for a backward pass: curvature is averaged over ranks
    by who asks for it.
    """
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(p, p.grad) for p in model.parameters()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    wrappers: dict[DistributedDataParallel, tuple[bool, bool]] = {}

    def quiet(module: nn.Module, _: Any) -> None:
        if isinstance(module, DistributedDataParallel) and module not in wrappers:
            wrappers[module] = (
                module.require_backward_grad_sync,
                module.require_forward_param_sync,
            )
            module.require_backward_grad_sync = False

    # Only where there can be wrappers: torch.compile warns of hooks on all modules.
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    hook = register_module_forward_pre_hook(quiet) if distributed else None
    try:
        with torch.random.fork_rng(devices=devices):
            model.eval()
            for parameter, _ in gradients:
                parameter.grad = None
            yield
    finally:
        if hook is not None:
            hook.remove()
        for wrapper, flags in wrappers.items():
            wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync = flags
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, saved in buffers:
                # Written only if changed, since that would break a backward pass that is still to
                # come. Versions do not tell: batch norm writes its buffers without counting.
                if not torch.equal(buffer, saved):
                    buffer.copy_(saved)
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def eager_math() -> Iterator[None]:
    """Uncompiled, with the one attention kernel that has second derivatives (pytorch issue 116350)."""
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


def block_dots(x: Tensor, y: Tensor, blocks: Blocks) -> Tensor:
    """The inner product of two tensors of a parameter's shape over each of its blocks, whole on every rank."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    product = local(x).to(dtype) * local(y).to(dtype)
    if not is_sharded(x):
        return block_sum(product, blocks.split)
    split = blocks.split
    if split is None:
        return sum_over_ranks(product.sum().reshape(1), x, None, 1)
    row = product.sum(dim=[d for d in range(x.ndim) if d != split.dim]) if x.ndim > 1 else product
    return block_sum_along(sum_over_ranks(row, x, split.dim, split.length), split)


def default_generator(generator: torch.Generator | None) -> torch.Generator:
    """The generator given, or a fresh one with seed 0, so that an estimate is reproducible unless asked otherwise."""
    return torch.Generator().manual_seed(0) if generator is None else generator


def check_probes(num_probes: int) -> None:
    """Raise `ValueError` unless there is at least one."""
    if not isinstance(num_probes, int) or num_probes < 1:
        raise ValueError(f"Invalid num_probes={num_probes}. Must be an integer >= 1.")
