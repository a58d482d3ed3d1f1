"""References, measures and limits for whole models."""
