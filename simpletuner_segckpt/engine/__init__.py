"""The engine: consecutive blocks of a model's loop under one checkpoint call.

Read in this order: ``entry`` (how a model's loop gets here), ``planner`` (how the blocks of one
forward run, decided before the loop begins), ``forward`` (which stack a call belongs to), ``runs``
(block by block), ``recording`` (the first forward, which is watched), ``links`` and ``proof``
(what it showed), ``segmented`` (from then on).

Around the entry: ``patches`` (what is changed on a model so that calls come to it), ``running``
(which forwards run, in which threads), ``observed`` (what they did), ``outside`` (blocks that are
called past the model's forward), ``traced_forward`` and ``traced`` (models compiled as a whole).
"""
