"""Kronecker approximations of Gauss-Newton blocks, KFAC and EKFAC, against the exact ones."""
