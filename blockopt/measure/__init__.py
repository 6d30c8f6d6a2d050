"""Passes of a model that leave no trace: losses and their curvature, attention, updates."""
