"""One pass of a model that leaves no trace: loss closures, the curvature of losses, attention, updates."""
