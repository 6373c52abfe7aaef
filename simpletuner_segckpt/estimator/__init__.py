"""Peak memory, recompute and step time of a schedule, for the real model, without a GPU.

``workload`` reads what is trained and builds it, ``profile`` runs one step of it without memory and
each kind of block alone, ``predict`` adds up a schedule from that, searches schedules and says how
long a step takes.
"""
