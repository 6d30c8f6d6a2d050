"""Measured ratios of cost and accuracy. The modules at this level are the scripts."""
