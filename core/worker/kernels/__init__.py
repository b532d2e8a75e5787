"""Triton kernels. They import nothing of ours; each has a torch twin that tests compare it with."""
