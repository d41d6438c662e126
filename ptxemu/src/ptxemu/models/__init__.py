"""What single pieces of hardware compute: arithmetic, tensor maps, matrix operands, tensor memory, barriers."""
