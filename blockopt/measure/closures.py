"""Loss closures, run batch by batch without leaving a trace, and sums over blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from blockopt.blocks import Blocks, block_numel, block_sum, block_sum_along, checked_blocks
from blockopt.distributed import (
    Reduced,
    are_together,
    average_gradients,
    compute_device,
    forward_together,
    is_sharded,
    local,
    mean_over_ranks,
    meet,
    num_ranks,
    placed_like,
    sums_over_ranks,
    together,
)
from blockopt.errors import NoLossError, NonFiniteError
from blockopt.measure.batch_shares import BatchShare
from blockopt.no_trace import preserved_state

LossClosure = Callable[[], Any]
Losses = LossClosure | Iterable[LossClosure]
Curvature = dict[str, Tensor]
Key = TypeVar("Key")


class Evaluation:
    """One batch: runs the closure, checks the loss, and remembers its number of tokens.

    Args:
        closure: The user's loss closure.
        autocast: The context to run it in.
    """

    def __init__(self, closure: LossClosure, autocast: torch.autocast) -> None:
        self._closure, self._autocast = closure, autocast
        self.tokens: float | None = None

    def __call__(self) -> Tensor:
        """Return the loss.

        Raises:
            NoLossError: If the closure returns None.
            TypeError: If it returns neither a scalar tensor with a graph, nor such a tensor and a
                number of tokens.
            NonFiniteError: If the loss is not finite.
        """
        torch.clear_autocast_cache()  # it holds casts of weights that a secant has moved since
        with torch.enable_grad(), self._autocast:
            result = self._closure()
        loss, self.tokens = checked_loss(result)
        with torch.enable_grad():
            return loss.reshape(())


def checked_loss(result: Any) -> tuple[Tensor, float | None]:
    """Return the loss and the number of tokens, if there is one, or raise as `Evaluation` does."""
    is_pair = isinstance(result, tuple) and len(result) == 2
    loss, tokens = result if is_pair else (result, None)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        # A whole output of a model would print all of its tensors.
        plain = loss is None or isinstance(loss, (int, float, str))
        what = repr(loss) if plain else f"an object of type {type(loss).__name__}"
        if isinstance(loss, Tensor):
            what = f"a tensor of shape {tuple(loss.shape)}"
            what += "" if loss.requires_grad else ", which requires no gradient"
        if is_pair:
            what = f"a pair that begins with {what}"
        # None may mean "not this time"; anything else is a mistake, which the next batch repeats.
        raise (NoLossError if result is None else TypeError)(
            f"The loss closure returned {what}. Must be the mean loss of a batch as a scalar "
            "tensor with its graph, alone or with the number of tokens: "
            "`lambda: model(**batch).loss` or `lambda: (model(**batch).loss, num_tokens)`. If the "
            "model returns logits and loss, take the second: `lambda: model(x, y)[1]`."
        )
    if not bool(torch.isfinite(loss.detach())):
        raise NonFiniteError(
            f"The loss closure returned {loss.item()}. Curvature needs a finite loss."
        )
    return loss, None if tokens is None else float(tokens)


def check_reached(gradients: Iterable[Tensor | None]) -> None:
    """Raise `ValueError` if a loss has no gradient for any parameter: then it is not the model's.

    Its curvature would be zero everywhere, which looks like one that is nowhere positive.
    """
    found = [gradient is not None for gradient in gradients]
    if found and not any(found):
        raise ValueError(
            "The loss depends on no trainable parameter of the model. Is it that of another model, "
            "such as a copy?"
        )


def agreed(closure: LossClosure, model: nn.Module) -> LossClosure:
    """Make a loss closure fail on all ranks that work together if it fails on one."""

    def run() -> Any:
        with forward_together(model):
            result = closure()
        checked_loss(result)
        meet("a loss")
        return result

    return run


def mean_curvature(
    model: nn.Module,
    losses: Losses,
    blocks: Mapping[str, Blocks] | None,
    measure_traces: Callable[[Evaluation, Mapping[str, Blocks]], Curvature],
) -> Curvature:
    """Return the trace of each block, averaged over the batches, per entry of the block."""
    blocks = checked_blocks(model, blocks)
    traces = average_over_batches(model, losses, lambda batch: measure_traces(batch, blocks))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return {
        name: traces[name] / block_numel(shapes[name], entry.split).to(traces[name])
        for name, entry in blocks.items()
    }


def average_over_batches(
    model: nn.Module, losses: Losses, measure: Callable[[Evaluation], dict[Key, Tensor]]
) -> dict[Key, Tensor]:
    """Return what `measure` finds, averaged over the batches.

    Batches are weighted by their number of tokens, or equally if no closure returns that number.
    Ranks that work `together`, as those of a sharded model must, get the average over the batches
    of all of them.
    """
    if not are_together() and any(is_sharded(p) for p in model.parameters()):
        with together():
            return average_over_batches(model, losses, measure)
    total: dict[Key, Tensor] = {}
    weights: list[float | None] = []
    device = compute_device(next(model.parameters())).type
    # The caller's autocast is for the forward pass only.
    autocast = torch.autocast(
        device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    )
    for closure in [losses] if callable(losses) else losses:
        evaluation = Evaluation(agreed(closure, model) if are_together() else closure, autocast)
        with preserved_state(model), torch.autocast(device, enabled=False):
            measured = measure(evaluation)
        torch.clear_autocast_cache()
        tokens = evaluation.tokens
        weights.append(tokens)
        for key, value in measured.items():
            weighted = value.detach() if tokens is None else value.detach() * tokens
            total[key] = total[key] + weighted if key in total else weighted
    if not weights:
        raise ValueError("Invalid losses: there is no closure. Must be one closure or several.")
    weight = sum(1.0 if w is None else w for w in weights)
    with_tokens = sum(w is not None for w in weights) / len(weights)
    if are_together():
        weight, with_tokens = _average_over_ranks(total, weight, with_tokens, model)
    if with_tokens not in (0.0, 1.0):
        raise ValueError(
            "Some loss closures returned a number of tokens and some did not. Return it from all "
            "of them, or from none."
        )
    if not weight > 0:
        raise ValueError(f"Invalid numbers of tokens {weights[:5]}. Their sum must be positive.")
    return {key: value / weight for key, value in total.items()}


def _average_over_ranks(
    total: dict[Key, Tensor], weight: float, with_tokens: float, model: nn.Module
) -> tuple[float, float]:
    """Replace the sums over batches by their means over ranks; return that of the weights too."""
    meet("a sum over batches")
    numbers = torch.tensor([weight, with_tokens], dtype=torch.float64)
    flat = [value.flatten().to("cpu", torch.float64) for value in total.values()]
    device = compute_device(next(model.parameters()))
    *means, numbers = mean_over_ranks(torch.cat([*flat, numbers]), device).split(
        [*map(len, flat), 2]
    )
    for (key, value), mean in zip(list(total.items()), means):
        total[key] = mean.view(value.shape).to(value)
    return float(numbers[0]), float(numbers[1])


def trainable_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that require a gradient, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def refuse_sharded(model: nn.Module, estimator: str) -> None:
    """Raise `ValueError` if a parameter is sharded, for estimators that need whole parameters."""
    sharded = next((name for name, p in model.named_parameters() if is_sharded(p)), None)
    if sharded is not None:
        raise ValueError(
            f"{estimator} needs whole parameters, but {sharded!r} is sharded. Use a curvature that "
            "works with shards, such as 'newton'."
        )


def block_dots(x: Tensor, y: Tensor, blocks: Blocks) -> Tensor:
    """Return the inner product of two tensors over each block of a parameter of their shape.

    If they are sharded, which they must be alike, every rank gets the whole result.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    product = local(x).to(dtype) * local(y).to(dtype)
    split = blocks.split
    if not is_sharded(x):
        return block_sum(product, split)
    if split is None:
        return sums_over_ranks([Reduced(product.sum().reshape(1), x, ())])[0]
    others = [d for d in range(x.ndim) if d not in split.dims]
    row = product.sum(dim=others) if others else product
    return block_sum_along(sums_over_ranks([Reduced(row, x, split.dims)])[0], split)


def gradients_of_all_ranks(
    parameters: Mapping[str, Tensor], share: BatchShare
) -> dict[str, Tensor]:
    """Take the gradients away from the parameters, averaged over the ranks that work together.

    Those of sharded parameters are averaged already. The others are not, since `preserved_state`
    keeps DDP from it.

    Raises:
        ValueError: If a parameter is sharded over ranks that hold a part of the batches only.
    """
    sharded: dict[str, Tensor] = {}
    plain: dict[str, Tensor | None] = {}
    for name, p in parameters.items():
        gradient, p.grad = p.grad, None
        if not is_sharded(p):
            plain[name] = gradient
            continue
        ranks = p.device_mesh.mesh.flatten().tolist()  # type: ignore[attr-defined]
        if are_together() and not share.covered_by(ranks):
            raise ValueError(
                f"{name!r} is sharded over {len(ranks)} of {num_ranks()} ranks, and others hold "
                "other batches, whose gradients this curvature needs. Use 'newton', or FSDP2 "
                "instead of DDP beside tensor parallelism."
            )
        if gradient is not None:
            sharded[name] = placed_like(gradient.detach(), p)
    return sharded | averaged_over_ranks(plain, parameters)


def averaged_over_ranks(
    gradients: Mapping[str, Tensor | None], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the gradients of whole parameters, averaged over the ranks that work together."""
    if not are_together():
        return {name: g for name, g in gradients.items() if g is not None}
    # A parameter that has no gradient here may have one on another rank.
    found = {
        name: torch.zeros_like(parameters[name]) if g is None else g.detach().clone()
        for name, g in gradients.items()
    }
    meet(f"gradients of {len(found)} parameters")
    average_gradients(list(found.values()))
    return found


def block_zeros(parameters: Mapping[str, Tensor], blocks: Mapping[str, Blocks]) -> Curvature:
    """Return one zero per block, in the dtype of `block_dots`."""
    return {
        name: torch.zeros(
            blocks[name].num_blocks,
            device=p.device,
            dtype=torch.promote_types(p.dtype, torch.float32),
        )
        for name, p in parameters.items()
    }


def default_generator(generator: torch.Generator | None) -> torch.Generator:
    """Return the generator given, or a new one with seed 0, so that estimates are reproducible."""
    return torch.Generator().manual_seed(0) if generator is None else generator
