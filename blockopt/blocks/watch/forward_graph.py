"""One forward pass as a graph: which operation made each tensor, from which others.

A dispatch mode sees every operation below autograd, whatever was written above: `nn.Linear`, `@`
and `einsum` all arrive as products of matrices, and attention, which runs by its plain formula
here, as two products with a softmax between them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# torch's notes on extending it name this module as the home of the class.
from torch.utils._python_dispatch import TorchDispatchMode

from blockopt.no_trace import preserved_state

Kind = Literal["constant", "weight", "activation"]

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "linear", "convolution", "_grouped_mm")
LOOKUPS = ("embedding", "index", "index_select", "gather", "embedding_bag", "_embedding_bag")


class Value:
    """A tensor between the operations that write it.

    Attributes:
        tensor: The tensor, in the graph of autograd.
        kind: "weight" if it is made of parameters alone, "constant" if of neither parameters nor
            inputs, else "activation". What is looked up in a weight is an activation.
        op: The operation that made it, None for parameters, buffers and inputs.
        consumers: The operations that read it.
    """

    __slots__ = ("consumers", "kind", "op", "tensor")

    def __init__(self, tensor: Tensor, kind: Kind, op: Op | None) -> None:
        self.tensor, self.kind, self.op = tensor, kind, op
        self.consumers: list[Op] = []


class Op:
    """One operation of the pass.

    Attributes:
        name: Its name without overload, and without the underscore of operations in place.
        func: What was called.
        args: What it was given, with a `Value` in the place of each tensor.
        kwargs: The same by name.
        inputs: All values that it was given.
        outputs: All values that it made.
    """

    __slots__ = ("args", "func", "inputs", "kwargs", "name", "outputs")

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        name = func.overloadpacket.__name__
        self.name = name.removesuffix("_") if not name.endswith("__") else name
        self.func, self.args, self.kwargs = func, args, kwargs
        self.inputs = list(_values((args, tuple(kwargs.values()))))
        self.outputs: list[Value] = []

    @property
    def activations(self) -> list[Value]:
        """Those of its inputs that are activations."""
        return [value for value in self.inputs if value.kind == "activation"]

    @property
    def is_empty(self) -> bool:
        """Whether it made nothing, as for an expert without tokens."""
        return not any(value.tensor.numel() for value in self.outputs)

    @property
    def multiplies_activations(self) -> bool:
        """Whether it is a product of two activations, as attention has two."""
        if self.name not in ("mm", "bmm", "addmm", "baddbmm"):
            return False
        return all(value.kind == "activation" for value in self.args[-2:])


class ForwardGraph(TorchDispatchMode):
    """Records the operations of a forward pass, in order.

    Args:
        model: The model that will run inside of the mode.

    Attributes:
        ops: The operations.
        parameters: `{parameter: its name}`, frozen ones included.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.parameters = {parameter: name for name, parameter in model.named_parameters()}
        self._buffers = {id(buffer) for buffer in model.buffers()}
        self._knows_inputs = False
        self._current: dict[int, Value] = {}
        self._by_storage: dict[int, list[Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        op = Op(func, _replaced(args, self._value_of), _replaced(kwargs, self._value_of))
        kind = _kind_of_result(op)
        for tensor in _tensors(result):
            written = func._schema.is_mutable and id(tensor) in self._current
            aliases = self._by_storage.setdefault(_storage(tensor), [])
            if id(tensor) not in self._current:
                aliases.append(tensor)  # kept alive, so that its id stays its own
            for alias in aliases if written else [tensor]:
                value = Value(alias, kind, op)
                op.outputs.append(value)
                self._current[id(alias)] = value
        for value in op.inputs:
            value.consumers.append(op)
        self.ops.append(op)
        return result

    def enter(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Hook that runs when the model is called: what it is given are its inputs."""
        for tensor in _tensors((args, kwargs)):
            self._value_of(tensor)  # keeps it alive
            self._current[id(tensor)] = Value(tensor, "activation", None)
            self._knows_inputs = True

    def _value_of(self, tensor: Tensor) -> Value:
        value = self._current.get(id(tensor))
        if value is None:
            kind: Kind = "activation"
            if tensor in self.parameters:
                kind = "weight"
            elif id(tensor) in self._buffers or self._knows_inputs:
                kind = "constant"
            value = self._current[id(tensor)] = Value(tensor, kind, None)
            self._by_storage.setdefault(_storage(tensor), []).append(tensor)
        return value


def _kind_of_result(op: Op) -> Kind:
    if op.name == "index" and op.inputs[0].kind == "weight" and op.inputs[0].tensor.ndim == 3:
        return "weight"  # the matrix of an expert, chosen by an index
    kinds = {value.kind for value in op.inputs}
    if "activation" in kinds:
        for factor in (merged := _merged(op)):
            factor.kind = "weight"
        return "weight" if merged else "activation"
    if "weight" not in kinds:
        return "constant"
    if op.name.endswith("_like") or op.name.startswith("new_"):
        return "constant"  # a tensor of the weight's shape, without its entries
    if op.name == "addmm" and _is_of_narrow(op, op.args[0].tensor.shape):
        return "weight"  # with an adapter merged into it
    made_of_two = op.name in PRODUCTS or op.name in LOOKUPS
    return "activation" if made_of_two else "weight"


def _merged(op: Op) -> list[Value]:
    """The product of two narrow weights that is added to a third, as adapters are merged, if any.

    What makes it the addend, such as its scale, belongs to it.
    """
    wide = [value for value in op.inputs if value.kind == "weight"]
    if op.name not in ("add", "sub") or len(wide) != 1 or len(op.activations) != 1:
        return []
    (product,) = found = op.activations
    while product.op and product.op.name not in PRODUCTS and len(product.op.activations) == 1:
        (product,) = product.op.activations
        found = [product, *found]
    if product.op is None or product.op.name not in PRODUCTS or product.op.activations:
        return []
    shape = wide[0].tensor.shape
    return found if found[-1].tensor.shape == shape and _is_of_narrow(product.op, shape) else []


def _is_of_narrow(product: Op, shape: torch.Size) -> bool:
    """Whether a product of two matrices of `shape` has a lower rank than others of that shape."""
    left, right = product.args[-2:]
    summed = left.tensor.shape[-1:] == right.tensor.shape[-2:-1]
    outside = (*left.tensor.shape[:-1], *right.tensor.shape[-1:])
    return summed and shape == outside and left.tensor.shape[-1] < min(shape)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for leaf in tree:
            yield from _tensors(leaf)
    elif isinstance(tree, Mapping):
        yield from _tensors(tuple(tree.values()))


def _values(tree: Any) -> Iterator[Value]:
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for leaf in tree:
            yield from _values(leaf)


def _replaced(tree: Any, value_of: Callable[[Tensor], Any]) -> Any:
    """`tree` with another leaf for each of its tensors."""
    if isinstance(tree, Tensor):
        return value_of(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(_replaced(leaf, value_of) for leaf in tree)
    if isinstance(tree, dict):
        return {key: _replaced(leaf, value_of) for key, leaf in tree.items()}
    return tree


def replay(op: Op, tensor_of: Callable[[Value], Any]) -> Any:
    """Call an operation again, with other tensors in the place of its inputs."""

    def replaced(tree: Any) -> Any:
        if isinstance(tree, Value):
            return tensor_of(tree)
        if isinstance(tree, (tuple, list)):
            return type(tree)(replaced(leaf) for leaf in tree)
        return tree

    kwargs = {key: replaced(leaf) for key, leaf in op.kwargs.items()}
    return op.func(*replaced(op.args), **kwargs)


@contextmanager
def recorded_pass(model: nn.Module, example: Any) -> Iterator[ForwardGraph]:
    """Run `model` once on `example`, and yield what happened while its graph is alive.

    The pass leaves no trace in gradients, random numbers, buffers, modes and flags. Tensors stay
    alive inside the context.

    Raises:
        ValueError: If the model has no weights to run with, or the example is of no known form.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta or hasattr(parameter, "device_mesh"):
            what = "on the meta device" if parameter.is_meta else "sharded"
            raise ValueError(
                f"Cannot run the model on `example`: {name!r} is {what}. Find the blocks with "
                "whole weights, before sharding, and pass them on as `blocks`."
            )
    if torch.is_inference_mode_enabled():
        raise ValueError("Cannot run the model on `example` inside torch.inference_mode. Leave it.")
    graph = ForwardGraph(model)
    mha = torch.backends.mha
    with ExitStack() as stack:
        stack.enter_context(preserved_state(model))
        stack.enter_context(_everything_requires_grad(model))
        stack.enter_context(_nothing_is_zero(model))
        stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)
        if "torch._dynamo" in sys.modules:  # to import it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        with (
            torch.enable_grad(),
            sdpa_kernel(SDPBackend.MATH),
            graph,
        ):
            hook = model.register_forward_pre_hook(graph.enter, with_kwargs=True)
            stack.callback(hook.remove)
            try:
                _call(model, example)
            except Exception as error:
                _refuse_flex_attention(error)
                raise
        with torch.enable_grad():
            yield graph


def _refuse_flex_attention(error: Exception) -> None:
    """Raise `ValueError` if it was `flex_attention` that failed, which runs as a single kernel."""
    frames = error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_code.co_filename.endswith("nn/attention/flex_attention.py"):
            raise ValueError(
                "Cannot see inside of torch.nn.attention.flex_attention, which the model calls. "
                "Let it call F.scaled_dot_product_attention for the pass on `example`, which uses "
                "the same weights, or find the blocks without `example`, by names and overrides."
            ) from error
        frames = frames.tb_next


def _call(model: nn.Module, example: Any) -> None:
    if isinstance(example, Tensor):
        model(example)
    elif isinstance(example, Mapping):
        model(**example)
    elif isinstance(example, (tuple, list)):
        model(*example)
    elif callable(example):
        example()
    else:
        raise ValueError(
            f"Invalid example of type {type(example).__name__}. Must be what the model is called "
            "with: a tensor, a tuple of arguments, a dict of named arguments, or a function "
            "without arguments that runs the model."
        )


@contextmanager
def _everything_requires_grad(model: nn.Module) -> Iterator[None]:
    """Let frozen parameters take part, so that the graph is whole."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextmanager
def _nothing_is_zero(model: nn.Module) -> Iterator[None]:
    """Let parameters that start at zero have small values, since nothing flows through zeros.

    So start adapters, gates of branches and some scales of keys.
    """
    zeros = [p for p in model.parameters() if p.is_floating_point() and not p.detach().any()]
    generator = torch.Generator().manual_seed(0)
    for parameter in zeros:  # through `data`, so that its version stays
        parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    try:
        yield
    finally:
        for parameter in zeros:
            parameter.data.zero_()
