"""What `figures.py` is made of."""
