"""Peak memory, recompute and step time of a schedule, for the real model, without a GPU.

``workload`` says what is trained, ``building`` makes the model without memory, ``profiling`` runs
its blocks, ``composing`` adds up a schedule from them, ``modes`` lists schedules and ``tracing``
runs a whole step as the check. CONTRIBUTING.md lists the other modules.
"""
