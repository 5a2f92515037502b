"""Trainer for DFlash block-diffusion drafters: a frozen target feeds hidden states to a drafter over process groups."""

__version__ = "0.1.0"
