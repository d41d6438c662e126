# Written by tools/make_stubs.py.
from collections.abc import Mapping

import torch

from cudnn_fused import results
from cudnn_fused.plan import Plan

class Conv3dRaw(Plan):
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

class Conv3dRmsNormSilu(Plan):
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

class Conv3dRmsNormSiluPad(Plan):
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

class Conv3dBiasResidualPad(Plan):
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

class CausalConv3dWithCache(Plan):
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

class RmsNormSiluPad(Plan):
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

CLASSES: Mapping[str, type[Plan]]
