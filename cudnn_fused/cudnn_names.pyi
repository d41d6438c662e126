# Written by tools/make_stubs.py.
from collections.abc import Mapping

import torch

from cudnn_fused import results
from cudnn_fused.plan import Plan
from cudnn_fused.variants import Channels

NORM_PAIRS: tuple[Channels, ...]
CONV_PAIRS: tuple[Channels, ...]
CHANNELS: Mapping[str, tuple[Channels, ...]]

class Conv3dRawSm100(Plan):
    def __init__(
        self, sample_input: torch.Tensor, sample_packed_weight: torch.Tensor, sample_output: torch.Tensor
    ) -> None: ...
    def execute(
        self, input: torch.Tensor, packed_weight: torch.Tensor, output: torch.Tensor, current_stream: object = None
    ) -> torch.Tensor: ...
    def __call__(
        self, input: torch.Tensor, packed_weight: torch.Tensor, output: torch.Tensor, current_stream: object = None
    ) -> torch.Tensor: ...

def conv3d_raw_wrapper_sm100(
    input: torch.Tensor, packed_weight: torch.Tensor, current_stream: object = None
) -> torch.Tensor: ...

class Conv3dRmsNormSiluSm100(Plan):
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

def conv3d_rmsnorm_silu_wrapper_sm100(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    bias: torch.Tensor,
    gamma: torch.Tensor,
    residual: torch.Tensor | None = None,
    residual_bias: torch.Tensor | None = None,
    current_stream: object = None,
) -> results.NormResult: ...

class Conv3dRmsNormSiluPadSm100(Plan):
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
    ) -> results.PaddedResult: ...

def conv3d_rmsnorm_silu_pad_wrapper_sm100(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    bias: torch.Tensor,
    gamma: torch.Tensor,
    history_frames: int = 0,
    residual: torch.Tensor | None = None,
    residual_bias: torch.Tensor | None = None,
    current_stream: object = None,
) -> results.PaddedResult: ...

class Conv3dBiasResidualPadSm100(Plan):
    def __init__(
        self,
        sample_input: torch.Tensor,
        sample_packed_weight: torch.Tensor,
        sample_bias: torch.Tensor,
        sample_residual: torch.Tensor,
        sample_padded_output: torch.Tensor,
        sample_residual_bias: torch.Tensor | None = None,
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

def conv3d_bias_residual_pad_wrapper_sm100(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    residual_bias: torch.Tensor | None = None,
    current_stream: object = None,
) -> results.BottomRightResult: ...

class CausalConv3dWithCacheSm100(Plan):
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

def causal_conv3d_with_cache_wrapper_sm100(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    previous: torch.Tensor | None = None,
    current_stream: object = None,
) -> results.CausalResult: ...

class RmsNormSiluPadSm100(Plan):
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

def rmsnorm_silu_pad_wrapper_sm100(
    input: torch.Tensor,
    gamma: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    previous: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    residual_bias: torch.Tensor | None = None,
    current_stream: object = None,
    *,
    save_input: bool = False,
) -> results.PaddedResult: ...

CLASSES: Mapping[str, type[Plan]]

def pack_conv3d_weight_sm100(weight: torch.Tensor) -> torch.Tensor: ...
def pack_causal_conv3d_weight_sm100(weight: torch.Tensor) -> torch.Tensor: ...
