"""What blocks cost in the ways in which they can run: bytes, work, seconds; and the fastest choice.

Used where a model trains (``engine.budgeted``) and where it is only predicted (``estimator``).
"""
