"""Which blocks are recomputed and why, what really ran, and how both are said. No torch."""
