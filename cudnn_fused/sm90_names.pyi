# Written by tools/make_stubs.py.
from collections.abc import Mapping

import torch

from cudnn_fused import results
from cudnn_fused.plan import Plan

class Conv3dRawSm90(Plan):
    def __init__(
        self,
        sample_input: torch.Tensor,
        sample_packed_weight: torch.Tensor,
        sample_output: torch.Tensor,
        *,
        leading_zero_frames: int = 0,
        absent_zero_frames: int = 0,
    ) -> None: ...
    def execute(
        self, input: torch.Tensor, packed_weight: torch.Tensor, output: torch.Tensor, current_stream: object = None
    ) -> torch.Tensor: ...
    def __call__(
        self, input: torch.Tensor, packed_weight: torch.Tensor, output: torch.Tensor, current_stream: object = None
    ) -> torch.Tensor: ...

def conv3d_raw_wrapper_sm90(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    current_stream: object = None,
    *,
    leading_zero_frames: int = 0,
    absent_zero_frames: int = 0,
) -> torch.Tensor: ...

class Conv3dRmsNormSiluSm90(Plan):
    def __init__(
        self,
        sample_input: torch.Tensor,
        sample_packed_weight: torch.Tensor,
        sample_bias: torch.Tensor,
        sample_gamma: torch.Tensor,
        sample_output: torch.Tensor,
        sample_residual: torch.Tensor | None = None,
        sample_residual_bias: torch.Tensor | None = None,
        sample_residual_output: torch.Tensor | None = None,
        *,
        leading_zero_frames: int = 0,
        absent_zero_frames: int = 0,
    ) -> None: ...
    def execute(
        self,
        input: torch.Tensor,
        packed_weight: torch.Tensor,
        bias: torch.Tensor,
        gamma: torch.Tensor,
        output: torch.Tensor,
        residual: torch.Tensor | None = None,
        residual_bias: torch.Tensor | None = None,
        residual_output: torch.Tensor | None = None,
        current_stream: object = None,
    ) -> results.NormResult: ...
    def __call__(
        self,
        input: torch.Tensor,
        packed_weight: torch.Tensor,
        bias: torch.Tensor,
        gamma: torch.Tensor,
        output: torch.Tensor,
        residual: torch.Tensor | None = None,
        residual_bias: torch.Tensor | None = None,
        residual_output: torch.Tensor | None = None,
        current_stream: object = None,
    ) -> results.NormResult: ...

def conv3d_rmsnorm_silu_wrapper_sm90(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    bias: torch.Tensor,
    gamma: torch.Tensor,
    residual: torch.Tensor | None = None,
    residual_bias: torch.Tensor | None = None,
    current_stream: object = None,
    *,
    leading_zero_frames: int = 0,
    absent_zero_frames: int = 0,
) -> results.NormResult: ...

class Conv3dRmsNormSiluPadSm90(Plan):
    def __init__(
        self,
        sample_input: torch.Tensor,
        sample_packed_weight: torch.Tensor,
        sample_bias: torch.Tensor,
        sample_gamma: torch.Tensor,
        sample_padded_output: torch.Tensor,
        sample_cache_output: torch.Tensor,
        history_frames: int = 0,
        sample_residual: torch.Tensor | None = None,
        sample_residual_bias: torch.Tensor | None = None,
        sample_residual_output: torch.Tensor | None = None,
        *,
        sample_previous: torch.Tensor | None = None,
        leading_zero_frames: int = 0,
        absent_zero_frames: int = 0,
        omit_zero_frames: int = 0,
    ) -> None: ...
    def execute(
        self,
        input: torch.Tensor,
        packed_weight: torch.Tensor,
        bias: torch.Tensor,
        gamma: torch.Tensor,
        padded_output: torch.Tensor,
        cache_output: torch.Tensor,
        residual: torch.Tensor | None = None,
        residual_bias: torch.Tensor | None = None,
        residual_output: torch.Tensor | None = None,
        current_stream: object = None,
        *,
        previous: torch.Tensor | None = None,
    ) -> results.PaddedResult: ...
    def __call__(
        self,
        input: torch.Tensor,
        packed_weight: torch.Tensor,
        bias: torch.Tensor,
        gamma: torch.Tensor,
        padded_output: torch.Tensor,
        cache_output: torch.Tensor,
        residual: torch.Tensor | None = None,
        residual_bias: torch.Tensor | None = None,
        residual_output: torch.Tensor | None = None,
        current_stream: object = None,
        *,
        previous: torch.Tensor | None = None,
    ) -> results.PaddedResult: ...

def conv3d_rmsnorm_silu_pad_wrapper_sm90(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    bias: torch.Tensor,
    gamma: torch.Tensor,
    history_frames: int = 0,
    residual: torch.Tensor | None = None,
    residual_bias: torch.Tensor | None = None,
    current_stream: object = None,
    *,
    previous: torch.Tensor | None = None,
    leading_zero_frames: int = 0,
    absent_zero_frames: int = 0,
    omit_zero_frames: int = 0,
) -> results.PaddedResult: ...

class Conv3dBiasResidualPadSm90(Plan):
    def __init__(
        self,
        sample_input: torch.Tensor,
        sample_packed_weight: torch.Tensor,
        sample_bias: torch.Tensor,
        sample_residual: torch.Tensor,
        sample_padded_output: torch.Tensor,
        sample_residual_bias: torch.Tensor | None = None,
        *,
        leading_zero_frames: int = 0,
        absent_zero_frames: int = 0,
    ) -> None: ...
    def execute(
        self,
        input: torch.Tensor,
        packed_weight: torch.Tensor,
        bias: torch.Tensor,
        residual: torch.Tensor,
        padded_output: torch.Tensor,
        residual_bias: torch.Tensor | None = None,
        current_stream: object = None,
    ) -> torch.Tensor: ...
    def __call__(
        self,
        input: torch.Tensor,
        packed_weight: torch.Tensor,
        bias: torch.Tensor,
        residual: torch.Tensor,
        padded_output: torch.Tensor,
        residual_bias: torch.Tensor | None = None,
        current_stream: object = None,
    ) -> torch.Tensor: ...

def conv3d_bias_residual_pad_wrapper_sm90(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    residual_bias: torch.Tensor | None = None,
    current_stream: object = None,
    *,
    leading_zero_frames: int = 0,
    absent_zero_frames: int = 0,
) -> results.BottomRightResult: ...

class CausalConv3dWithCacheSm90(Plan):
    def __init__(
        self,
        sample_input: torch.Tensor,
        sample_packed_weight: torch.Tensor,
        sample_padded_input: torch.Tensor,
        sample_cache_output: torch.Tensor,
        sample_output: torch.Tensor,
        sample_previous: torch.Tensor | None = None,
    ) -> None: ...
    def execute(
        self,
        input: torch.Tensor,
        packed_weight: torch.Tensor,
        padded_input: torch.Tensor,
        cache_output: torch.Tensor,
        output: torch.Tensor,
        previous: torch.Tensor | None = None,
        current_stream: object = None,
    ) -> results.CausalResult: ...
    def __call__(
        self,
        input: torch.Tensor,
        packed_weight: torch.Tensor,
        padded_input: torch.Tensor,
        cache_output: torch.Tensor,
        output: torch.Tensor,
        previous: torch.Tensor | None = None,
        current_stream: object = None,
    ) -> results.CausalResult: ...

def causal_conv3d_with_cache_wrapper_sm90(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    previous: torch.Tensor | None = None,
    current_stream: object = None,
) -> results.CausalResult: ...

class RmsNormSiluPadSm90(Plan):
    def __init__(
        self,
        sample_input: torch.Tensor,
        sample_gamma: torch.Tensor,
        sample_padded_output: torch.Tensor,
        sample_cache_output: torch.Tensor,
        sample_input_bias: torch.Tensor | None = None,
        sample_previous: torch.Tensor | None = None,
        sample_residual: torch.Tensor | None = None,
        sample_residual_bias: torch.Tensor | None = None,
        sample_residual_output: torch.Tensor | None = None,
        *,
        omit_zero_frames: int = 0,
    ) -> None: ...
    def execute(
        self,
        input: torch.Tensor,
        gamma: torch.Tensor,
        padded_output: torch.Tensor,
        cache_output: torch.Tensor,
        input_bias: torch.Tensor | None = None,
        previous: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        residual_bias: torch.Tensor | None = None,
        residual_output: torch.Tensor | None = None,
        current_stream: object = None,
    ) -> results.PaddedResult: ...
    def __call__(
        self,
        input: torch.Tensor,
        gamma: torch.Tensor,
        padded_output: torch.Tensor,
        cache_output: torch.Tensor,
        input_bias: torch.Tensor | None = None,
        previous: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        residual_bias: torch.Tensor | None = None,
        residual_output: torch.Tensor | None = None,
        current_stream: object = None,
    ) -> results.PaddedResult: ...

def rmsnorm_silu_pad_wrapper_sm90(
    input: torch.Tensor,
    gamma: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    previous: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    residual_bias: torch.Tensor | None = None,
    current_stream: object = None,
    *,
    omit_zero_frames: int = 0,
    save_input: bool = False,
) -> results.PaddedResult: ...
def pack_conv3d_weight_sm90(weight: torch.Tensor) -> torch.Tensor: ...
def pack_causal_conv3d_weight_sm90(weight: torch.Tensor) -> torch.Tensor: ...

CLASSES: Mapping[str, type[Plan]]
