"""Checkpoints: what they hold and how they are checked, saving beside the training, finding and loading them."""
