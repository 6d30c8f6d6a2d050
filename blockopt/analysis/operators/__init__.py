"""Hessians of a whole model as operators `A @ v`, and as dense matrices."""
