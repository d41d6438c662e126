"""The fused operations, one by one."""
