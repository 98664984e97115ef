"""Optimizers that update whole matrices. They are ordinary `torch.optim.Optimizer`s. Only `SharedMuon` knows
about ranks: it can also update a fragment, using collectives that are passed to it. The `*_facts` modules do not
import torch."""
