"""Exact Hessians of transformers: closed forms, operators, spectra."""
