"""For the `Trainer` of transformers: an optimizer that knows the blocks, and `BlockLR`."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.trainer_callback import TrainerCallback

from blockopt.block_lr import BlockLR, CurvatureFunction, defaults
from blockopt.blocks import Blocks, Level, param_groups
from blockopt.distributed import rank
from blockopt.optim import BlockAdamW, BlockMuon

Batch = Mapping[str, Any]


def trainer_optimizer(
    model: nn.Module,
    args: Any,
    optimizer_class: type[BlockAdamW] | type[BlockMuon] = BlockAdamW,
    *,
    blocks: Mapping[str, Blocks] | None = None,
) -> BlockAdamW | BlockMuon:
    """Return the optimizer that `TrainingArguments` describe, with the blocks of the model.

    It takes `learning_rate`, `weight_decay` (for matrices, not for norms and biases), `adam_beta1`,
    `adam_beta2` and `adam_epsilon` from the arguments. Give it to the Trainer in one of two ways.
    In the second the Trainer makes it, from the model as it has wrapped it, which FSDP needs:

        Trainer(model, args, optimizers=(trainer_optimizer(model, args), None), ...)
        Trainer(
            model,
            args,
            optimizer_cls_and_kwargs=(lambda: trainer_optimizer, {"args": args}),
            ...,
        )

    Args:
        model: The model, under PEFT or not. Parameters that do not train are left out.
        args: The `TrainingArguments`.
        optimizer_class: `BlockAdamW` or `BlockMuon`.
        blocks: What `find_blocks(model)` returns, with your own options; found here by default.

    Raises:
        ValueError: If the class is another one, or the blocks cannot be found.

    Example:
        >>> from transformers import TrainingArguments
        >>> args = TrainingArguments(learning_rate=3e-3, weight_decay=0.1, report_to="none")
        >>> optimizer = trainer_optimizer(nn.TransformerEncoderLayer(16, 2, 32), args)
        >>> [(group["role"], group["weight_decay"]) for group in optimizer.param_groups][:2]
        [('query+key+value', 0.1), ('bias', 0.0)]
    """
    if optimizer_class not in (BlockAdamW, BlockMuon):
        raise ValueError(
            f"Invalid optimizer_class={optimizer_class!r}. Must be BlockAdamW or BlockMuon. Build "
            "another one from blockopt.param_groups(model), and pass it as optimizers=(…, None)."
        )
    return optimizer_class(
        param_groups(model, blocks, weight_decay=args.weight_decay),
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
    )


class BlockLRCallback(TrainerCallback):  # type: ignore[misc]
    """Gives every Hessian block its own learning rate in a `Trainer`, see `BlockLR`.

    It draws the batches to measure on at random from the training set, with the Trainer's collator
    and a seed of its own: the order of the training data and all other random numbers stay what
    they are. The Trainer's checkpoints of the optimizer hold its state, and
    `trainer.train(resume_from_checkpoint=…)` resumes from it.

        block_lr = BlockLRCallback(every=100)
        trainer = Trainer(
            model,
            args,
            train_dataset=data,
            optimizers=(trainer_optimizer(model, args), None),
            callbacks=[block_lr],
        )
        trainer.train()
        block_lr.block_lr.history.plot("block_lr.png")

    The Trainer's own optimizer has two groups, one with weight decay and one without. They mix all
    roles, so it is refused.

    Args:
        curvature: See `BlockLR` for this and the next eight arguments.
        every: Optimizer steps from one refresh to the next.
        warmup: Optimizer steps before the first one counts.
        power: The power of the curvature.
        bounds: The smallest and the largest scale.
        by: Which blocks share a scale.
        beta: The weight of the past in the smoothed scales.
        num_probes: Samples per batch.
        seed: The seed of these samples and of the batches.
        batch: A function that returns the batch for each refresh, instead of one that is drawn.
            Needed for a training set without a length.
        compute_loss: A function of model and batch that returns the mean loss, such as
            `trainer.compute_loss`, for a loss that is not the model's own.

    Attributes:
        block_lr: The `BlockLR` of the last training, None before the first.

    Raises:
        ValueError: If `batch` or `compute_loss` is not a function; and when training begins, if an
            option is out of range, `BlockLR` cannot serve the optimizer, as when a group mixes
            roles, or the training set has no length and there is no `batch`.
    """

    def __init__(
        self,
        *,
        curvature: str | CurvatureFunction = defaults.CURVATURE,
        every: int | None = None,
        warmup: int = 0,
        power: float | None = None,
        bounds: tuple[float, float] | None = None,
        by: Level = "role",
        beta: float | None = None,
        num_probes: int = 1,
        seed: int = 0,
        batch: Callable[[], Batch] | None = None,
        compute_loss: Callable[[nn.Module, Any], Tensor] | None = None,
    ) -> None:
        for name, function in (("batch", batch), ("compute_loss", compute_loss)):
            if function is not None and not callable(function):
                raise ValueError(f"Invalid {name}={function!r}. Must be a function.")
        self.block_lr: BlockLR | None = None
        self._options: dict[str, Any] = {
            "curvature": curvature,
            "every": every,
            "warmup": warmup,
            "power": power,
            "bounds": bounds,
            "by": by,
            "beta": beta,
            "num_probes": num_probes,
            "seed": seed,
        }
        self._given_batch, self._compute_loss = batch, compute_loss

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach to the optimizer, and go on from a checkpoint if there is one."""
        dataset = getattr(kwargs["train_dataloader"], "dataset", None)
        if self._given_batch is None and not (
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        ):
            raise ValueError(
                f"The training set, a {type(dataset).__name__}, has no length to draw batches "
                "from. Pass BlockLRCallback(batch=…), a function that returns a batch."
            )
        try:
            self.block_lr = BlockLR(kwargs["optimizer"], kwargs["model"], **self._options)
        except ValueError as error:
            raise ValueError(
                f"{error} For a Trainer: optimizers=(blockopt.huggingface.trainer_optimizer(model, "
                "args), None)."
            ) from error
        if self.block_lr.num_steps < state.global_step:  # the checkpoint of a run without it
            counted = {**self.block_lr.state_dict(), "num_steps": state.global_step}
            self.block_lr.load_state_dict(counted)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refresh if that is due. The gradients are still there."""
        block_lr, drawn = self.block_lr, list[Batch]()
        assert block_lr is not None

        def loss() -> Tensor:
            if not drawn:  # once: the two gradients of a secant are of one batch
                batch = self._draw(
                    kwargs["train_dataloader"], args.train_batch_size, block_lr.num_steps
                )
                drawn.append(
                    {k: v.to(args.device) if isinstance(v, Tensor) else v for k, v in batch.items()}
                )
            if self._compute_loss is not None:
                return self._compute_loss(kwargs["model"], dict(drawn[0]))
            outputs = kwargs["model"](**drawn[0])
            return outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]  # type: ignore[no-any-return]

        block_lr.step(loss)

    def _draw(self, loader: Any, size: int, number: int) -> Batch:
        if self._given_batch is not None:
            return self._given_batch()
        choice = random.Random(f"{self._options['seed']} {number} {rank()}")
        indices = choice.sample(range(len(loader.dataset)), min(size, len(loader.dataset)))
        with _same_random_numbers():
            return loader.collate_fn([loader.dataset[index] for index in indices])  # type: ignore[no-any-return]


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Leave Python's and numpy's random state as it was; `BlockLR` does so for torch's."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
