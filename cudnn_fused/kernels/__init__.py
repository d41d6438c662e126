"""The GPU kernels, in CuTe DSL. Importing this package imports nothing; the modules need ``nvidia-cutlass-dsl``."""
