"""Model families as data: the files in ``model_families``, and what else there is. No torch."""
