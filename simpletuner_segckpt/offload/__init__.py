"""Tensors that autograd saves, in CPU memory between forward and backward."""
