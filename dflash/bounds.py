"""Bounds of configuration values, by key: each check raises ValueError that names the key and what is allowed."""

import math


def require_at_least(least: int, values: dict[str, float | None]) -> None:
    """Each value is None or at least `least`."""
    for key, value in values.items():
        if value is not None and not value >= least:
            raise ValueError(f"{key}: {value} must be at least {least}")


def require_positive(values: dict[str, float | None]) -> None:
    """Each value is None or a finite number above 0."""
    for key, value in values.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{key}: {value} must be a number above 0")


def require_share(values: dict[str, float]) -> None:
    """Each value is at least 0 and below 1."""
    for key, value in values.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{key}: {value} must be at least 0 and below 1")
