"""The loss function as the model calls it: its predictions, and the curvature of the loss in them.

Gauss-Newton needs Λ, the Hessian of the loss in the predictions. Cross-entropy and squared error
have it in closed form, block-diagonal in the rows, and a random vector `s` with `E[s sᵀ] = Λ` costs
nothing: it comes from labels sampled from the model (Schraudolph 2002; Liu et al., Sophia, 2023),
or from random signs.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from blockopt.distributed import is_sharded
from blockopt.measure.batch_shares import BatchShare, batch_share

SEEN = (F.cross_entropy, F.mse_loss, F.binary_cross_entropy_with_logits)


class LossCall(NamedTuple):
    """One call of a loss function.

    Attributes:
        prediction: What the model predicts, in the graph.
        value: What the function returned, in the graph.
        class_dim: The dimension of the classes for cross-entropy, None for elementwise losses.
        probabilities: Those of the classes, along the last dimension, for cross-entropy; that of 1
            for binary cross-entropy; None for squared error.
        weights: The curvature of `value`: of an element this weight, of a row this weight times
            `diag(p) - p pᵀ`.
        reduced: Whether the value is a scalar.
        target: What the prediction is compared with.
    """

    prediction: Tensor
    value: Tensor
    class_dim: int | None
    probabilities: Tensor | None
    weights: Tensor
    reduced: bool
    target: Tensor


class CaptureLosses(TorchFunctionMode):
    """A context that records calls of the loss functions in `calls`, however they were imported.

    What cannot be read raises when `calls` are asked for and not within the forward pass, where
    other ranks may be waiting.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[LossCall] = []
        self._error: ValueError | None = None

    @property
    def calls(self) -> list[LossCall]:
        """The calls, in their order.

        Raises:
            ValueError: If one of them has no closed form here.
        """
        if self._error is not None:
            raise self._error
        return self._calls

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Record the call."""
        value = func(*args, **(kwargs or {}))
        if func in SEEN and isinstance(value, Tensor) and value.requires_grad:
            bound = inspect.signature(func).bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            try:
                self._calls.append(_read(func, bound.arguments, value))
            except ValueError as error:
                self._error = error
        return value


def _read(func: Callable[..., Any], arguments: dict[str, Any], value: Tensor) -> LossCall:
    prediction, target = arguments["input"], arguments["target"]
    if is_sharded(prediction):
        raise ValueError(
            "The predictions are sharded over ranks (loss_parallel), and Gauss-Newton needs them "
            "whole. Let the head return them whole, with output_layouts=Replicate(), or use a "
            "curvature that takes any loss, such as 'newton'."
        )
    if target.requires_grad:
        raise ValueError(
            "The target of the loss depends on parameters. Gauss-Newton needs it fixed: detach it."
        )
    reduction = arguments["reduction"]
    if arguments.get("size_average") is not None or arguments.get("reduce") is not None:
        raise ValueError(
            "The loss uses size_average or reduce, which torch has replaced. Use "
            "reduction='mean', 'sum' or 'none'."
        )
    if func is F.cross_entropy:
        return _read_cross_entropy(arguments, value)
    if arguments["weight"] is not None or arguments.get("pos_weight") is not None:
        raise ValueError(
            f"{func.__name__} is weighted, which has no closed form here. Multiply what it returns "
            "by a weight instead."
        )
    if prediction.shape != target.shape:
        raise ValueError(
            f"Prediction {tuple(prediction.shape)} and target {tuple(target.shape)} differ in "
            "shape. Give them the same shape."
        )
    number = prediction.numel() if reduction == "mean" else 1
    dtype = torch.promote_types(prediction.dtype, torch.float32)
    detached = prediction.detach().contiguous().to(dtype)
    if func is F.mse_loss:
        probabilities, weights = None, torch.full_like(detached, 2 / number)
    else:
        probabilities = detached.sigmoid()
        weights = probabilities * (1 - probabilities) / number
    return LossCall(prediction, value, None, probabilities, weights, reduction != "none", target)


def _read_cross_entropy(arguments: dict[str, Any], value: Tensor) -> LossCall:
    """Read a call, in which a row's loss is `-Σ_c t_c log p_c`, with class weights in t.

    Its curvature is `Σ_c t_c` times `diag(p) - p pᵀ`.
    """
    prediction, target, reduction = (arguments[n] for n in ("input", "target", "reduction"))
    class_dim = 0 if prediction.ndim == 1 else 1
    logits = prediction.detach().movedim(class_dim, -1)
    probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    by_class = probabilities.new_ones(probabilities.shape[-1])
    if arguments["weight"] is not None:
        by_class = arguments["weight"].to(probabilities)
    number: Any
    if target.is_floating_point():
        weights = target.movedim(class_dim, -1).to(probabilities) @ by_class
        number = weights.numel()
        seen = torch.ones_like(weights)
    else:
        seen = (target != arguments["ignore_index"]).contiguous().to(probabilities)
        weights = by_class[target.where(seen > 0, 0)] * seen
        number = weights.sum()
    smoothing = arguments["label_smoothing"]
    weights = (1 - smoothing) * weights + smoothing * by_class.mean() * seen
    weights = weights / number if reduction == "mean" else weights
    reduced = reduction != "none"
    return LossCall(prediction, value, class_dim, probabilities, weights, reduced, target)


class LossCurvature:
    """Λ of the whole loss in all predictions, and vectors `s` whose `s sᵀ` stand for it.

    Args:
        loss: The scalar loss, with its graph.
        calls: What `CaptureLosses` recorded while it was computed.

    Attributes:
        predictions: The predictions, in the graph.

    Raises:
        ValueError: If no call is part of the loss, or if one enters it with a negative sign.
    """

    def __init__(self, loss: Tensor, calls: list[LossCall]) -> None:
        values = [call.value for call in calls]
        derivatives: tuple[Tensor | None, ...] = ()
        if calls:
            derivatives = torch.autograd.grad(loss, values, retain_graph=True, allow_unused=True)
        used = [(call, d) for call, d in zip(calls, derivatives) if d is not None]
        if not used:
            raise ValueError(
                "No call of F.cross_entropy, F.mse_loss or F.binary_cross_entropy_with_logits is "
                "part of the loss, and Gauss-Newton needs one. Write the loss with it "
                "(nn.CrossEntropyLoss and nn.MSELoss do), or use what takes any loss: the "
                "curvatures 'newton', 'secant', 'directional' and 'hutchinson', or a "
                "HessianOperator."
            )
        total = float(loss.detach())
        other = total - sum(float((call.value.detach() * d).sum()) for call, d in used)
        if abs(other) > 1e-2 * abs(total):
            warnings.warn(
                f"{other:.3g} of the loss {total:.3g} is neither cross-entropy nor squared error. "
                "Gauss-Newton leaves out its curvature.",
                stacklevel=2,
            )
        self.predictions = [call.prediction for call, _ in used]
        self._calls = [call for call, _ in used]
        self._derivatives = [derivative.detach() for _, derivative in used]
        self._weights = [call.weights * self._spread(call, derivative) for call, derivative in used]
        if any(bool((weights < 0).any()) for weights in self._weights):
            raise ValueError(
                "A cross-entropy or squared error enters the loss with a negative sign. "
                "Gauss-Newton needs positive ones: use a curvature that takes any loss, such as "
                "'newton'."
            )

    @staticmethod
    def _spread(call: LossCall, derivative: Tensor) -> Tensor:
        if call.reduced:
            return derivative.to(call.weights)
        return derivative.detach().reshape(call.weights.shape).to(call.weights)

    @cached_property
    def share(self) -> BatchShare:
        """The place of this batch among those of all ranks, if they measure together."""
        return batch_share(
            [weights.numel() for weights in self._weights],
            self.predictions,
            [call.target for call in self._calls],
        )

    def sample(self, generator: torch.Generator) -> list[Tensor]:
        """Draw one `s` per prediction, independent from row to row, with `E[s sᵀ] = Λ`.

        Where ranks measure together, each draws for all rows of all ranks and takes its own: the
        samples do not depend on how the rows are shared out.
        """
        vectors = []
        places = zip(self.share.starts, self.share.totals)
        for call, weights, (start, total) in zip(self._calls, self._weights, places):
            local = _generator_on(generator, weights.device)
            own = slice(start, start + weights.numel())
            if call.class_dim is None:
                signs = torch.randint(0, 2, (total,), generator=local, device=weights.device)
                vector = weights.sqrt() * (2 * signs[own].view_as(weights) - 1)
            else:
                draws = torch.rand(
                    total, 1, generator=local, device=weights.device, dtype=weights.dtype
                )
                vector = self._class_vector(call, weights, _labels(call.probabilities, draws[own]))
            vectors.append(vector.to(call.prediction.dtype))
        return vectors

    def product(self, vectors: list[Tensor]) -> list[Tensor]:
        """Return Λ times one vector per prediction, in its shape.

        That is `w (p∘u - p (p·u))` for each row, or `w u` for each element.
        """
        products = []
        for call, weights, vector in zip(self._calls, self._weights, vectors):
            product = vector.to(weights)
            if call.class_dim is None or call.probabilities is None:
                product = weights * product
            else:
                product = call.probabilities * product.movedim(call.class_dim, -1)
                product = product - call.probabilities * product.sum(-1, keepdim=True)
                product = (weights.unsqueeze(-1) * product).movedim(-1, call.class_dim)
            products.append(product.to(call.prediction.dtype))
        return products

    def residual(self) -> Tensor:
        """Return what to add to the loss so that its Hessian lacks `Jᵀ Λ J`.

        This makes the losses linear in their predictions: it is `Σ r·prediction - value·derivative`
        over the calls, with `r`, the derivative by the prediction, held constant.
        """
        total = torch.zeros((), device=self.predictions[0].device)
        with torch.enable_grad():
            for call, derivative in zip(self._calls, self._derivatives):
                seen = (call.value * derivative).sum()
                (r,) = torch.autograd.grad(seen, call.prediction, retain_graph=True)
                total = total + (r * call.prediction).sum() - seen
        return total

    def factors(self) -> Iterator[list[Tensor]]:
        """Yield vectors `s` whose `Σ s sᵀ` is Λ: one per class of each row, or per element."""
        for position, (call, weights) in enumerate(zip(self._calls, self._weights)):
            for row in weights.flatten().nonzero().flatten():
                one = torch.zeros_like(weights)
                one.view(-1)[row] = weights.flatten()[row]
                if call.class_dim is None or call.probabilities is None:
                    yield self._only(position, one.sqrt())
                    continue
                for index in range(call.probabilities.shape[-1]):
                    labels = torch.full((weights.numel(), 1), index, device=weights.device)
                    of_class = one * call.probabilities[..., index]
                    yield self._only(position, self._class_vector(call, of_class, labels))

    def last_rows(self) -> Iterator[list[Tensor]]:
        """Yield for each prediction a vector that is zero outside the last row with a weight."""
        for position, (call, weights) in enumerate(zip(self._calls, self._weights)):
            one = torch.zeros_like(weights)
            one.view(-1)[weights.flatten().nonzero()[-1:]] = 1.0
            if call.class_dim is not None and call.probabilities is not None:
                one = one.unsqueeze(-1) * torch.rand_like(call.probabilities)
                one = one.movedim(-1, call.class_dim)
            yield self._only(position, one)

    def _only(self, position: int, vector: Tensor) -> list[Tensor]:
        """Return the vector for the prediction at a position, and zeros for the others."""
        vectors = [torch.zeros_like(prediction) for prediction in self.predictions]
        vectors[position] = vector.to(vectors[position])
        return vectors

    @staticmethod
    def _class_vector(call: LossCall, weights: Tensor, labels: Tensor) -> Tensor:
        """Return `sqrt(weight) (p - onehot(label))` for each row, in the prediction's shape."""
        probabilities: Any = call.probabilities
        rows = probabilities.reshape(-1, probabilities.shape[-1]).clone()
        rows.scatter_add_(1, labels, torch.full_like(labels, -1, dtype=rows.dtype))
        rows *= weights.reshape(-1, 1).sqrt()
        return rows.view(probabilities.shape).movedim(-1, call.class_dim)  # type: ignore[arg-type, no-any-return]


def _labels(probabilities: Any, draws: Tensor) -> Tensor:
    """The label that a number in [0, 1) draws from each row of probabilities, (rows, 1).

    Inverting the distribution is far faster than `torch.multinomial`.
    """
    ends = probabilities.reshape(-1, probabilities.shape[-1]).cumsum(-1)
    draws = draws.to(ends) * ends[:, -1:]
    return torch.searchsorted(ends, draws, right=True).clamp_(max=ends.shape[-1] - 1)


def _generator_on(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """Return the generator, or one on `device` that it seeds."""
    if generator.device.type == device.type:
        return generator
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    return torch.Generator(device).manual_seed(seed)
