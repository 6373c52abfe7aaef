"""Proof by running: one training step bit by bit, a family, an unknown model, bytes in memory."""
