"""One answer from two readings: what the names of modules say, and what a forward pass shows."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from blockopt.blocks.blocks import Blocks
from blockopt.blocks.layouts import Ambiguity, Layout, Layouts

# Roles that a pass proves. In others, such as norms and positions, names may tell more.
_PROVEN = {
    *("query", "key", "value", "output", "gate", "mlp_in", "mlp_gate", "mlp_out", "head"),
}


def reconcile(
    by_names: Layouts,
    in_pass: Layouts,
    shared_roles: Mapping[Any, Collection[str]],
    names: Mapping[Any, str],
    settled: Collection[str],
) -> tuple[Layouts, list[str]]:
    """Take what the pass shows, and names where it shows nothing certain.

    Where the two disagree about what a pass proves, the pass is right.

    Args:
        by_names: The layouts that the names of modules give.
        in_pass: The layouts that the pass shows.
        shared_roles: The roles of parameters that have several, between which names decide.
        names: The name of every parameter that counts.
        settled: The names of those that have an override.

    Returns:
        The layouts, and both readings of each parameter about which the two disagree.
    """
    result: Layouts = dict(by_names)
    disagreements = []
    biases: Layouts = {}
    for parameter, seen in in_pass.items():
        said, name = by_names.get(parameter), names.get(parameter)
        if name is None or name in settled or seen == said:
            continue
        if said is None or isinstance(said, Ambiguity):
            result[parameter] = seen
        elif (
            isinstance(seen, Ambiguity)
            or _is_one_block(said, seen)
            or (said.split == seen.split and {*said.roles} <= {*shared_roles.get(parameter, ())})
        ):
            continue
        elif (said.roles, seen.roles) == (("router",), ("gate",)):
            continue  # what weighs several adapters of an output also gates it
        elif _PROVEN & {*seen.roles} and "bias" not in said.roles:
            result[parameter] = seen
            disagreements.append(
                f"  {name!r} of shape {tuple(parameter.shape)}\n"
                f"    by its name: {_shown(said)}\n"
                f"    in the pass: {_shown(seen)}"
            )
        elif (*said.roles, *seen.roles) == ("embedding", "position"):
            result[parameter] = seen  # any nn.Embedding is an embedding by its name
        elif {*said.roles, *seen.roles} == {"bias"} and seen.split is not None:
            biases[parameter] = seen
    held = {name: parameter for parameter, name in names.items()}
    for bias, seen in biases.items():  # cut like its weight, if the pass was taken for that
        weight = held.get(names[bias].removesuffix("bias") + "weight")
        if weight is None or result.get(weight) == in_pass.get(weight):
            result[bias] = seen
    return result, disagreements


def warn_of_disagreements(disagreements: list[str]) -> None:
    """Tell both readings of the parameters for which the pass is taken."""
    if disagreements:
        warnings.warn(
            "The names of modules say another thing than the forward pass on `example` shows. The "
            "pass is taken for\n" + "\n".join(disagreements) + "\nTo settle it, pass the right one "
            "of each as overrides={name: Blocks(...)}.",
            stacklevel=3,
        )


def _is_one_block(said: Layout, seen: Layout) -> bool:
    """Whether both are one block of the same role, with or without a `Split` that says so."""
    splits = [layout.split for layout in (said, seen)]
    return said.roles == seen.roles and all(s is None or s.num_blocks == 1 for s in splits)


def _shown(layout: Layout) -> str:
    return repr(Blocks(layout.roles, None, layout.split))
