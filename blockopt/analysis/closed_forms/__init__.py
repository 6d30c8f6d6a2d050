"""The papers' Hessians in closed form: attention, norms, MLPs, whole blocks, bounds."""
