"""What products `A @ v` tell: eigenvalues, densities, traces, norms, and how blocks differ."""
