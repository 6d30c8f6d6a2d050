"""A small decoder that tensor and sequence parallelism can cut, and its layouts on ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

VOCAB, LENGTH, WIDTH, HEADS, HIDDEN, BATCH = 20, 8, 16, 4, 24, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(heads.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Tokens and labels to the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def decoder(seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder().double()


def batch_of(step: int, index: int = 0, number: int = 1) -> tuple[Tensor, Tensor]:
    """Part `index` of `number` equal ones of the batch of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator).chunk(number)[index]
    return tokens[:, :-1], tokens[:, 1:]


class Parallel(NamedTuple):
    """A model on many ranks, and which part of the batch this rank takes."""

    model: nn.Module
    index: int
    number: int

    def loss(self, step: int) -> Tensor:
        return self.model(*batch_of(step, self.index, self.number))


def whole() -> Parallel:
    """The whole batch on this rank alone."""
    return Parallel(decoder(), 0, 1)


def replicated() -> Parallel:
    """DDP."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return Parallel(DistributedDataParallel(decoder()), rank, world)


def fsdp(mesh: DeviceMesh, **options: Any) -> Parallel:
    """FSDP2, or HSDP on a mesh of two dimensions."""
    model = _fully_sharded(decoder(), mesh, **options)
    return Parallel(model, torch.distributed.get_rank(), mesh.size())


def tensor_parallel(mesh: DeviceMesh) -> Parallel:
    """Heads, hidden units, embedding and head are cut over ranks; norms are plain."""
    return Parallel(_cut_heads(decoder(), mesh), 0, 1)


def sequence_parallel(mesh: DeviceMesh) -> Parallel:
    """The norms work on parts of the sequences: their gradients are still to be summed."""
    return Parallel(_cut_sequences(decoder(), mesh), 0, 1)


def tensor_parallel_and_fsdp(mesh: DeviceMesh, sequence: bool = False) -> Parallel:
    """On a mesh of data ranks times tensor ranks."""
    data, tensor = mesh["data"], mesh["tensor"]
    cut = (_cut_sequences if sequence else _cut_heads)(decoder(), tensor)
    return Parallel(_fully_sharded(cut, data), data.get_local_rank(), data.size())


def two_meshes() -> Parallel:
    """The MLPs are on a mesh of their own, as experts are."""
    world = torch.distributed.get_world_size()
    one = init_device_mesh("cpu", (world,), mesh_dim_names=("experts",))
    other = init_device_mesh("cpu", (world,), mesh_dim_names=("data",))
    model = decoder()
    for layer in model.layers:
        fully_shard(layer.mlp, mesh=one)
        fully_shard(layer, mesh=other)
    return Parallel(fully_shard(model, mesh=other), torch.distributed.get_rank(), world)


def _fully_sharded(model: Decoder, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _cut_heads(model: Decoder, mesh: DeviceMesh) -> Decoder:
    plan = {
        "attention.q_proj": ColwiseParallel(),
        "attention.k_proj": ColwiseParallel(),
        "attention.v_proj": ColwiseParallel(),
        "attention.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, ends)  # type: ignore[return-value]


def _cut_sequences(model: Decoder, mesh: DeviceMesh) -> Decoder:
    plan = {
        "norm1": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "attention.q_proj": ColwiseParallel(),
        "attention.k_proj": ColwiseParallel(),
        "attention.v_proj": ColwiseParallel(),
        "attention.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "norm2": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, ends)  # type: ignore[return-value]


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The whole tensor in the layout of a parameter."""
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
