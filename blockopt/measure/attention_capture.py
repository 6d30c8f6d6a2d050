"""What attention is given and returns while a model runs.

The curvature of queries and keys depends on the attention probabilities, hence on the queries and
keys that the softmax sees. Hooks on the projections do not see those: RoPE and QK-norm come after
them, and `nn.MultiheadAttention` has no modules there at all. But nearly all attention goes through
`F.scaled_dot_product_attention`, and a `TorchFunctionMode` sees every call of it however it was
imported. `capture_attention` records these calls, and raises where attention ran in another way.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from blockopt.blocks import is_attention, read_linear

_SDPA = F.scaled_dot_product_attention
# The argument that the keys of cross-attention come from, in transformers, diffusers and torch.
_CONTEXT_NAMES = (
    "key_value_states",
    "encoder_hidden_states",
    "cross_attention_states",
    "context",
    "key",
)


class AttentionCall(NamedTuple):
    """One call of `F.scaled_dot_product_attention`.

    The tensors are those of the model's graph, so that `torch.autograd.grad(loss, call.query)` is
    the gradient there.

    Attributes:
        module: The name in `model.named_modules()` of the module that made the call: the innermost
            one that holds a query projection, or else the innermost.
        x: (B, T, D), the first argument of that module, None if it is no tensor. It is the input of
            the query projection, unless the module does more than attention. Where
            `nn.MultiheadAttention` is given (T, B, D) or (T, D), it is a view.
        context: (B, S, D), the argument of that module from which cross-attention makes its keys,
            None for self-attention.
        query: (B, H, T, dh), after RoPE and QK-norm.
        key: (B, Hkv, S, dh), where Hkv is H, or divides it if the call leaves the grouping of heads
            to torch.
        value: (B, Hkv, S, dv).
        mask: Broadcastable to (B, H, T, S): True where attention is allowed, or a number to add to
            the scores.
        is_causal: Whether query t attends only to keys up to t.
        scale: What the scores are multiplied by.
        dropout: The probability with which attention probabilities were set to zero on the way to
            `output`.
        output: (B, H, T, dv), before the output projection.
    """

    module: str
    x: Tensor | None
    context: Tensor | None
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    dropout: float
    output: Tensor

    def weights(self) -> Tensor:
        """Return the attention probabilities without dropout, (B, H, T, S), in the graph.

        They are recomputed in float32 or better as `softmax(scale * query @ key.T + mask)`. A query
        that may attend to nothing has zeros, as in torch.

        Example:
            >>> q = torch.zeros(1, 1, 2, 4)
            >>> AttentionCall("attn", None, None, q, q, q, None, True, 0.5, 0.0, q).weights()
            tensor([[[[1.0000, 0.0000],
                      [0.5000, 0.5000]]]])
        """
        dtype = torch.promote_types(self.query.dtype, torch.float32)
        query, key = self.query.to(dtype), self.key.to(dtype)
        if query.shape[:-2] != key.shape[:-2]:  # grouped-query: neighbouring heads share a key
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
        with torch.autocast(query.device.type, enabled=False):
            scores = self.scale * query @ key.transpose(-2, -1)
        mask = self.mask
        if self.is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            hard = mask.dtype == torch.bool
            scores = scores.masked_fill(~mask, -torch.inf) if hard else scores + mask
        empty = scores.isneginf().all(dim=-1, keepdim=True)
        return scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)


class _Running(NamedTuple):
    """A module whose forward is running, and what it was given."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls_before: int  # how many attention calls had been recorded when it began


class _Recorder(TorchFunctionMode):
    """Records the attention calls that the modules of one model make."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.modules = dict(model.named_modules())
        self.attention = [name for name, module in self.modules.items() if _must_be_seen(module)]
        self.running: list[_Running] = []
        self.calls: list[AttentionCall] = []
        self.unseen: dict[str, None] = {}  # attention that ran without a call inside it, in order

    def add_hooks(self, stack: ExitStack) -> None:
        """Follow which modules run until `stack` is left.

        Being registered last, the hooks see what forward is given.
        """
        for name, module in self.modules.items():
            before = module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            stack.callback(before.remove)
            after = module.register_forward_hook(partial(self._leave, name), always_call=True)
            stack.callback(after.remove)

    def _enter(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not _in_backward():
            self.running.append(_Running(name, module, args, kwargs, len(self.calls)))

    def _leave(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self.running or self.running[-1].name != name:
            return  # in a backward pass, or another hook raised before ours could enter
        left = self.running.pop()
        raised = output is None  # what torch gives to hooks then
        if name in self.attention and len(self.calls) == left.calls_before and not raised:
            self.unseen[name] = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _SDPA:
            return self._record(func, *args, **kwargs)
        if func is not F.multi_head_attention_forward:
            return func(*args, **kwargs)
        # The mode is off inside this function, which looks attention up by its global name.
        inner = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = partial(self._record, inner)
        try:
            return func(*args, **kwargs)
        finally:
            F.scaled_dot_product_attention = inner

    def _record(self, sdpa: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        output = sdpa(*args, **kwargs)
        if self.running:  # otherwise the call is not of this model
            self.calls.append(_read_call(self.running, output, *args, **kwargs))
        return output

    def check(self) -> None:
        """Raise `ValueError` if attention ran unseen."""
        callers = {call.module for call in self.calls}
        # A module that only makes queries, keys and values leaves the call to one that contains it.
        unseen = [name for name in self.unseen if callers.isdisjoint(_ancestors(name))]
        if unseen:
            switches = dict.fromkeys(_switch(self.modules[name]) for name in unseen)
            raise ValueError(
                f"Cannot see the attention of {self._describe(unseen)}: it did not call "
                "F.scaled_dot_product_attention, where attention is captured. To change that, "
                f"{'; '.join(switches)}."
            )
        if self.attention and not self.calls:
            raise ValueError(
                f"Saw no attention: {self._describe(self.attention)} did not run inside "
                "capture_attention(model). Run a forward pass of this very model inside the "
                "context, not of a copy, a CUDA graph or nn.DataParallel."
            )

    def _describe(self, names: list[str]) -> str:
        shown = ", ".join(f"{name!r} ({type(self.modules[name]).__name__})" for name in names[:3])
        return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


@contextmanager
def capture_attention(
    model: nn.Module, *, allow_unseen: bool = False
) -> Iterator[list[AttentionCall]]:
    """Record every attention call that `model` makes inside the context, in order.

    Outputs and gradients are bit by bit those without capture. Only the inference fast path of the
    `nn.Transformer` layers and `torch.compile` are off inside the context, and with them their
    rounding. Hooks and patches are gone when it is left.

    The list keeps the tensors and their graph alive: capture a small batch, and drop the list when
    done. What activation checkpointing runs again in the backward pass is not recorded again; with
    `use_reentrant=True` the tensors have no graph.

    It sees calls of `F.scaled_dot_product_attention`: your own, transformers with
    `attn_implementation="sdpa"`, timm with `fused_attn`, and `nn.MultiheadAttention` with
    `need_weights=False`, as the `nn.Transformer` layers use it. It does not see eager attention,
    flex attention and flash-attention packages. A model without attention gives an empty list.

    Args:
        model: Any module, also under DDP, FSDP2, PEFT and `torch.compile` wrappers.
        allow_unseen: Whether to ignore attention that was not seen instead of raising.

    Yields:
        A list that fills with one `AttentionCall` per call.

    Raises:
        ValueError: When the context is left without an exception and `allow_unseen` is False, if
            attention of the model ran and was not seen, or if it has attention and none ran.

    Example:
        >>> model = nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=32, batch_first=True)
        >>> with capture_attention(model) as calls:
        ...     loss = model(torch.randn(3, 5, 16)).square().mean()
        >>> calls[0].module, tuple(calls[0].query.shape), tuple(calls[0].weights().shape)
        ('self_attn', (3, 2, 5, 8), (3, 2, 5, 5))
        >>> (gradient,) = torch.autograd.grad(loss, calls[0].query)
    """
    recorder = _Recorder(model)
    with ExitStack() as stack:
        recorder.add_hooks(stack)
        mha = torch.backends.mha
        stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(recorder)
        yield recorder.calls
    if not allow_unseen:
        recorder.check()


def _in_backward() -> bool:
    """Whether autograd is running, so that a forward pass inside it is a repetition.

    `torch.utils.module_tracker` finds this out in the same way.
    """
    return torch._C._current_graph_task_id() != -1


def _must_be_seen(module: nn.Module) -> bool:
    """Whether a module must be seen to attend: known attention, or what `find_blocks` refuses."""
    if is_attention(module):
        return True
    linear = (read_linear(child) for child in module.children())
    return "Attention" in type(module).__name__ and any(linear)


def _read_call(
    running: list[_Running],
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    caller = next((r for r in reversed(running) if is_attention(r.module)), running[-1])
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    x, context = _sources(caller)
    return AttentionCall(
        caller.name, x, context, query, key, value, attn_mask, is_causal, scale, dropout_p, output
    )


def _sources(caller: _Running) -> tuple[Tensor | None, Tensor | None]:
    """Return the tensor that a module makes its queries from, and that of its keys if another."""
    module = caller.module
    given = inspect.signature(module.forward).bind(*caller.args, **caller.kwargs).arguments
    x = next(iter(given.values()), None)
    contexts = (given.get(name) for name in _CONTEXT_NAMES)
    context = next((c for c in contexts if isinstance(c, Tensor) and c is not x), None)
    if not isinstance(x, Tensor):
        return None, context
    if isinstance(module, nn.MultiheadAttention) and x.ndim == 2:
        return x.unsqueeze(0), None if context is None else context.unsqueeze(0)
    if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
        return x.transpose(0, 1), None if context is None else context.transpose(0, 1)
    return x, context


def _ancestors(name: str) -> list[str]:
    """Return the names of the modules that contain the named one."""
    parts = name.split(".") if name else []
    return [".".join(parts[:i]) for i in range(len(parts))]


def _switch(module: nn.Module) -> str:
    """Return what to change for the attention of a module to be seen."""
    if isinstance(module, nn.MultiheadAttention):
        return "call nn.MultiheadAttention with need_weights=False"
    if hasattr(module, "fused_attn"):
        return "set fused_attn=True on these modules of timm"
    if any(base.__module__.startswith("transformers.") for base in type(module).__mro__):
        return (
            'build the transformers model with attn_implementation="sdpa" (an architecture with '
            "only eager attention, such as Bloom, cannot be captured)"
        )
    return "compute attention with F.scaled_dot_product_attention in the code of these modules"
