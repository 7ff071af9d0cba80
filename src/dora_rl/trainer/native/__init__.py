"""Kernels for what lies between the products of a decoder layer, forward and backward.

`layers.c` and `attention.h` are compiled where they are first used, as `models.native` is;
`operations` has them as functions that autograd knows, `layers` puts them into a model.
"""
