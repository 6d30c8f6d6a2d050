"""Readable training scripts on the parts of blockopt: the files here are the entry points."""
