"""Tokens to train on: where text comes from, how it is tokenized, cached and cut into batches."""
