"""What `train.py` and `train_hf.py` are made of."""
