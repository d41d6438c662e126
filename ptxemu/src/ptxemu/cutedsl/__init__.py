"""Compiled CuTe-DSL launchers, run with CPU tensors. Needs the extra `cutedsl`."""
