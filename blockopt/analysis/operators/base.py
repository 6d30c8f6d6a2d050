"""What the operators of a model share: products `A @ v`, averaged over batches, and blocks."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from blockopt.analysis.operators.parameter_vector import ParameterVector, all_finite
from blockopt.analysis.operators.pull_back import pull_back
from blockopt.analysis.progress import progress_bar
from blockopt.blocks import BlockGroup, Blocks, Level
from blockopt.measure.closures import (
    Evaluation,
    LossClosure,
    Losses,
    average_over_batches,
    refuse_sharded,
)
from blockopt.measure.second_derivatives import twice_differentiable

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

# Columns of one matrix go through the graph together while their activations have at most this many
# entries: up to six times faster for tiny models, where each operation costs more than its numbers,
# and no faster, only larger, beyond.
ENTRIES_AT_ONCE = 2**24

Product = Callable[[Tensor], Tensor]
Linear = Callable[[list[Tensor]], list[Tensor]]  # (m, *shape) of each parameter to the same


class ModelOperator(ABC):
    """A symmetric matrix of a model's parameters: products `A @ v`, averaged over batches.

    Args:
        model: Any module with whole parameters (not FSDP2), of any dtype. It runs in evaluation
            mode and is left as it was.
        losses: A closure that returns the mean loss of a batch, or that and its number of tokens,
            or several such closures, which are averaged by tokens. Each product runs all of them.
        names: The parameters to act on; by default all that are trainable. The others are
            constants.
        blocks: What `find_blocks(model)` returns, for `block` and `blocks`; found there by default.
        progress: Whether to show a bar over the batches of each product.
        check_deterministic: Whether to evaluate loss and gradient twice, and raise if they differ.

    Attributes:
        vector: The vector of parameters that it acts on.
        on_batch: Called after each batch of each product with the number of columns.

    Raises:
        ValueError: If a name is wrong, the blocks do not fit, there is no closure, or a parameter
            is sharded.
        TypeError: If one of the losses is not a closure, or returns no loss.
        RuntimeError: If two evaluations differ.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Losses,
        *,
        names: Iterable[str] | None = None,
        blocks: Mapping[str, Blocks] | None = None,
        progress: bool = False,
        check_deterministic: bool = True,
    ) -> None:
        refuse_sharded(model, type(self).__name__)
        self.vector = ParameterVector(model, names, blocks)
        self.on_batch: Callable[[int], None] = lambda columns: None
        self._model, self._closures, self._progress = model, _closures(losses), progress
        self._kept: _Kept | None = None
        self._at_once: int | None = None
        if check_deterministic:
            self._check_deterministic()

    def __repr__(self) -> str:
        size = f"{self.shape[0]:,} x {self.shape[1]:,}"
        return f"{type(self).__name__}({size}, {self.vector}, batches: {self.num_batches})"

    def __matmul__(self, v: Tensor) -> Tensor:
        """Return the product with a vector `(n,)` or the columns of a matrix `(n, k)`.

        Raises:
            TypeError: If `v` is not a tensor, or of another dtype.
            ValueError: If its shape or device is wrong, or an entry is not finite.
            FloatingPointError: If the product is not finite.
        """
        self.vector.check(v)
        shown, graphs = self._progress and self.num_batches > 1, iter(range(self.num_batches))
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            progress_bar(shown, type(self).__name__, self.num_batches) as advance,
        ):
            rows = v.detach().reshape(self.shape[0], -1).T.contiguous()  # (k, n)
            group = 1 if len(rows) < 2 else self.columns_at_once()

            def measure(evaluation: Evaluation) -> dict[str, Tensor]:
                times = self._graph(next(graphs), evaluation)
                products = [times(part) for part in rows.split(group)] if len(rows) else [rows]
                advance(1)
                self.on_batch(len(rows))
                return {"product": products[0] if len(products) == 1 else torch.cat(products)}

            product = average_over_batches(self._model, self._closures, measure)["product"]
        if not all_finite(product):
            raise FloatingPointError(
                f"{self!r} @ v is not finite: the loss has no second derivatives at these weights, "
                "as the norm of a zero vector has none, or they overflow in this dtype. Try "
                "model.double()."
            )
        return product.T.reshape(v.shape)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters, in the order of `model.named_parameters()`."""
        return self.vector.names

    @property
    def shape(self) -> tuple[int, int]:
        """`(n, n)`."""
        return self.vector.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters; the widest one if they differ."""
        return self.vector.dtype

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return self.vector.device

    @property
    def num_batches(self) -> int:
        """The number of loss closures."""
        return len(self._closures)

    def loss(self) -> float:
        """Return the mean loss over the batches."""
        means = average_over_batches(
            self._model, self._closures, lambda evaluation: {"loss": evaluation()}
        )
        return float(means["loss"])

    def block(self, which: str | BlockGroup, index: int | None = None) -> Self:
        """Return the diagonal block of one parameter, or of one of its blocks, such as a head.

        Only that parameter is differentiated. Arguments and errors are those of
        `ParameterVector.block`.
        """
        return self._on(self.vector.block(which, index))

    def blocks(self, by: Level = "head") -> dict[BlockGroup, Self]:
        """Return the diagonal block of each group of blocks: of each block alone by default.

        Rows of embeddings and MLPs are blocks of their own, and many, unless the operator was made
        with `blocks=find_blocks(model, per_row=())`. `by` is that of `block_groups`.
        """
        return {group: self._on(vector) for group, vector in self.vector.blocks(by).items()}

    def restrict(self, names: Iterable[str]) -> Self:
        """Return the operator on some of the parameters; the others are constants."""
        return self._on(self.vector.restrict(names))

    def entries(self, which: str | BlockGroup | ModelOperator, index: int | None = None) -> Tensor:
        """Return where a parameter, a block or a part of this operator lies in its vectors."""
        return self.vector.entries(
            which.vector if isinstance(which, ModelOperator) else which, index
        )

    def to_dict(self, v: Tensor) -> dict[str, Tensor]:
        """Return a vector as `{name: tensor}`, zero outside of its blocks."""
        return self.vector.to_dict(v)

    def to_vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the inverse of `to_dict`; other names and other blocks are left out."""
        return self.vector.to_vector(values)

    def _on(self, vector: ParameterVector) -> Self:
        part = copy.copy(self)
        part.vector, part._kept = vector, None
        return part

    @contextmanager
    def keep_graph(self) -> Iterator[None]:
        """Keep the graph of every batch from one product to the next while inside.

        For many products at the same weights, this saves the forward and the first backward pass of
        each. It takes the memory of all batches at once, so use it with few. The graphs are made
        anew if parameters or buffers have changed; the data of the closures must not change.
        """
        if self._kept is not None:
            yield
            return
        self._kept = _Kept()
        try:
            yield
        finally:
            self._kept = None

    @abstractmethod
    def _linearize(self, evaluation: Evaluation, parameters: list[Tensor]) -> Linear:
        """Run the batch, and return the map from m vectors to m products."""

    def _graph(self, batch: int, evaluation: Evaluation) -> Product:
        """Return the map from rows `(m, n)` to products, made from the batch or kept."""
        if self._kept is not None and batch == 0:
            self._kept.forget_if_changed(self._model)
        if self._kept is not None and batch in self._kept.graphs:
            evaluation.tokens, times = self._kept.graphs[batch]
            return times
        with twice_differentiable():
            apply = self._linearize(evaluation, list(self.vector.parameters().values()))

        def product(rows: Tensor) -> Tensor:
            with twice_differentiable():
                return self.vector.flatten(apply(self.vector.unflatten(rows)))

        if self._kept is not None:
            self._kept.graphs[batch] = (evaluation.tokens, product)
        return product

    def _check_deterministic(self) -> None:
        used, narrow = False, None

        def measure(evaluation: Evaluation) -> dict[str, Tensor]:
            nonlocal used, narrow
            with twice_differentiable():
                loss = evaluation()
                reached = torch.autograd.grad(loss, parameters, allow_unused=True)
            used = used or any(g is not None for g in reached)
            if torch.finfo(loss.dtype).eps > torch.finfo(self.dtype).eps:
                narrow = loss.dtype
            gradients = [
                (torch.zeros_like(p) if g is None else g).unsqueeze(0)
                for p, g in zip(parameters, reached)
            ]
            return {"loss": loss.reshape(1, 1), "gradient": self.vector.flatten(gradients)}

        def measure_shifted(evaluation: Evaluation) -> dict[str, Tensor]:
            # Each evaluation starts from the caller's random state, which differs the next time.
            for device in {p.device for p in parameters}:
                torch.rand((), device=device)
            return measure(evaluation)

        parameters = list(self.vector.parameters().values())
        with torch.inference_mode(False):
            first = average_over_batches(self._model, self._closures, measure)
            second = average_over_batches(self._model, self._closures, measure_shifted)
        if not used:
            raise ValueError(
                f"The loss depends on none of the {len(self.names)} parameters, {self.names[0]!r} "
                "first. Is it the loss of another model, such as a copy?"
            )
        if narrow:
            warnings.warn(
                f"The loss is of {narrow}, the parameters of {self.dtype}: products have the "
                "precision of the loss. transformers computes its loss in float32; "
                "F.cross_entropy(model(...).logits, ...) keeps the dtype of the model.",
                stacklevel=3,
            )
        for what in ("loss", "gradient"):
            error, size = float((first[what] - second[what]).norm()), float(first[what].norm())
            if not error <= torch.finfo(first[what].dtype).eps ** 0.5 * size:
                raise RuntimeError(
                    f"The losses are not deterministic: the {what} of two evaluations differs by "
                    f"{error:.3g}, its size is {size:.3g}. Every product must see the same batches:"
                    " draw them once, outside of the closures, as in `batch = next(batches)` and "
                    "`lambda: model(**batch).loss`. Evaluation mode does not switch off dropout "
                    "outside of modules. check_deterministic=False skips this check."
                )

    def columns_at_once(self) -> int:
        """Return how many columns have `ENTRIES_AT_ONCE` activations, by a pass of a batch."""
        if self._at_once is None:
            counter = _CountEntries()

            def measure(evaluation: Evaluation) -> dict[str, Tensor]:
                with twice_differentiable(), counter:
                    return {"loss": evaluation()}

            average_over_batches(self._model, self._closures[0], measure)
            self._at_once = max(1, ENTRIES_AT_ONCE // max(counter.total, self.shape[0]))
        return self._at_once

    def _pull(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], vectors: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return `Σ vectorᵀ ∂output/∂input` for each input, for m vectors of each output."""
        products, at_once = pull_back(outputs, inputs, vectors)
        if not at_once:
            self._at_once = 1
        return products

    def _second_derivative(self, value: Tensor, parameters: list[Tensor]) -> Linear:
        """Return `v ↦ ∇² value v`, by a second backward pass."""
        gradients = torch.autograd.grad(
            value, parameters, create_graph=True, materialize_grads=True
        )
        return lambda vectors: self._pull(gradients, parameters, vectors)


class _Kept:
    """Graphs by batch, with the parameters and buffers that they were made with."""

    def __init__(self) -> None:
        self.graphs: dict[int, tuple[float | None, Product]] = {}
        self._state: list[Tensor] = []
        self._copies: list[Tensor] = []

    def forget_if_changed(self, model: nn.Module) -> None:
        """Drop the graphs of other weights; versions do not count assignments through `.data`."""
        state = [*model.parameters(), *model.buffers()]
        same = len(state) == len(self._state) and all(
            new is old and new.dtype == saved.dtype and torch.equal(new, saved)
            for new, old, saved in zip(state, self._state, self._copies)
        )
        if not same:
            self.graphs.clear()
            self._state, self._copies = state, [tensor.detach().clone() for tensor in state]


class _CountEntries(TorchDispatchMode):
    """Counts the entries of all that is computed inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            self.total += tensor.numel() if isinstance(tensor, Tensor) else 0
        return result


def _closures(losses: Losses) -> list[LossClosure]:
    wanted = "such as `lambda: model(**batch).loss`"
    if isinstance(losses, Tensor):
        raise TypeError(f"Invalid losses: a tensor. Must be a closure that computes it, {wanted}.")
    closures: list[Any] = [losses] if callable(losses) else list(losses)
    if not closures:
        raise ValueError("Invalid losses: no closure. Must be one or more.")
    wrong = next((closure for closure in closures if not callable(closure)), None)
    if wrong is not None:
        raise TypeError(
            f"Invalid losses: one is of type {type(wrong).__name__}. Must be closures {wanted}, or,"
            " for several batches, `[functools.partial(loss_of, batch) for batch in batches]`."
        )
    return closures
