"""Blocks from one forward pass: what each weight does, seen where it is used."""

from blockopt.blocks.watch.layouts_of_pass import layouts_of_pass
from blockopt.blocks.watch.reconcile import reconcile

__all__ = ["layouts_of_pass", "reconcile"]
