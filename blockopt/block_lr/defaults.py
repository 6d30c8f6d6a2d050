"""The constants of the rule from curvature to scales, in one place for all that default to them."""

CURVATURE = "newton"
EVERY = 150  # optimizer steps from one refresh to the next, which takes as long as two or so
POWER = -0.5  # of the curvature
BOUNDS = (0.1, 10.0)  # of a scale
BETA = 0.9  # the weight of the past in the smoothed scales, of which 1 is the first
FADE = None  # optimizer steps after which all scales are 1 again; None for never
