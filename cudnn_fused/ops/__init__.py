"""One module per operation: its operand table and its function, from which all other names of it are made."""

from __future__ import annotations

from cudnn_fused.operands import Operation
from cudnn_fused.ops.causal_conv3d_with_cache import CAUSAL_CONV3D_WITH_CACHE
from cudnn_fused.ops.conv3d_bias_residual_pad import CONV3D_BIAS_RESIDUAL_PAD
from cudnn_fused.ops.conv3d_raw import CONV3D_RAW
from cudnn_fused.ops.conv3d_rmsnorm_silu import CONV3D_RMSNORM_SILU
from cudnn_fused.ops.conv3d_rmsnorm_silu_pad import CONV3D_RMSNORM_SILU_PAD
from cudnn_fused.ops.rmsnorm_silu_pad import RMSNORM_SILU_PAD

OPERATIONS: tuple[Operation, ...] = (
    CONV3D_RAW,
    CONV3D_RMSNORM_SILU,
    CONV3D_RMSNORM_SILU_PAD,
    CONV3D_BIAS_RESIDUAL_PAD,
    CAUSAL_CONV3D_WITH_CACHE,
    RMSNORM_SILU_PAD,
)
