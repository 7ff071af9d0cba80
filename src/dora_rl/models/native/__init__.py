"""A decoder's pass in C: compiled on the machine that runs it, used where it is faster than torch.

library      compiles the kernels by the machine's C compiler, once, and loads them
products     weights in panels, and the fast path: whether products of those are faster than torch's
structures   what Python and C hand to each other
weights      a version's weights, or an adapter's, as the kernels want them
passes       rows of several versions through all layers, in one call

Nothing here knows sequences, scheduling or sampling. docs/decisions/030 says why it exists.
"""
