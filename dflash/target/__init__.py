"""The target side: loading and truncating the model, capturing and packing its hidden states."""
