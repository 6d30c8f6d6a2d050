"""Blocks from one forward pass: what each weight does, seen where it is used."""

from blockopt.blocks.watch.layouts_of_pass import SeenInPass, layouts_of_pass
from blockopt.blocks.watch.reconcile import reconcile, warn_of_disagreements

__all__ = ["SeenInPass", "layouts_of_pass", "reconcile", "warn_of_disagreements"]
