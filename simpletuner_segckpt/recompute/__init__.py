"""Inside one checkpoint call: what is called again in backward, with what, and what is kept.

``backend`` turns the keys into the two ways in which a block is called, ``state`` has a module
recomputed as it was in forward, ``gathered`` has FSDP2 gather for that in the order of every other
rank, ``submodules`` treats parts of a block by themselves, ``kept_operators`` says which outputs
are not recomputed and ``kept_outputs`` keeps them, ``contexts`` is what is entered around the
forward and its recompute.
"""
