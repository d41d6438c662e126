"""The convolution kernels: what they compute, how they walk and cut it, and one kernel class per architecture."""
