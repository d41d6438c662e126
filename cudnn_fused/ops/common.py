"""Operands, options and channel tables that several operations share."""

from __future__ import annotations

from cudnn_fused.kernels.epilogue import steps
from cudnn_fused.operands import HISTORY_FRAMES, ChannelRule, Operand, Option, Role, Shape

NORM_STEPS = (steps.Bias(), steps.Residual(), steps.Save(), steps.RmsNorm(), steps.Silu())

VALID_CONV_MINIMUM = 3  # a 3x3x3 window without padding

CHANNELS = ChannelRule(multiple=8)  # a pixel is a whole number of 16-byte units

CONV_INPUT = Operand("input", Shape("N, T, H, W, Ci"), meaning="activations with their padding, NTHWC")
PACKED_WEIGHT = Operand(
    "packed_weight",
    Shape("Co, 3, 3, 3, ceil64(Ci)"),
    hint="pack checkpoint weights with pack_conv3d_weight",
    meaning="weight from `pack_conv3d_weight`",
)
BIAS = Operand("bias", Shape("Co"), meaning="convolution bias")
GAMMA = Operand("gamma", Shape("Co"), meaning="scale of the normalization")

_CONV_OUTPUT = Shape("N, T+Z-2, H-2, W-2, Co")
CONV_OUTPUT = Operand("output", _CONV_OUTPUT, Role.OUTPUT, meaning="result, contiguous")
CONV_RESIDUAL = Operand("residual", _CONV_OUTPUT, meaning="skip that is added before the normalization")
RESIDUAL_BIAS = Operand(
    "residual_bias", Shape("Co"), optional=True, requires="residual", meaning="bias that the skip still lacks"
)
CONV_RESIDUAL_OUTPUT = Operand(
    "residual_output",
    _CONV_OUTPUT,
    Role.OUTPUT,
    optional=True,
    requires="residual",
    required_by="residual",
    meaning="the sum before the normalization",
)

HISTORY = Option(
    "history_frames",
    HISTORY_FRAMES,
    symbol="P",
    meaning="P: how many of the two leading planes of `padded_output` hold history that must survive",
)
ABSENT_ZEROS = Option(
    "absent_zero_frames",
    HISTORY_FRAMES,
    extension=True,
    symbol="Z",
    meaning="Z: how many frames of zeros in front of `input` are not in memory; their taps are not computed",
)
OMITTED_ZEROS = Option(
    "omit_zero_frames",
    (0, 1),
    extension=True,
    symbol="O",
    meaning="O: 1 leaves the zero planes of missing history out of `padded_output`; the next convolution takes them "
    "as `absent_zero_frames`",
)
LEADING_ZEROS = Option(
    "leading_zero_frames",
    HISTORY_FRAMES,
    extension=True,
    meaning="how many frames at the front of `input` are known to be zero; they are not read, and their taps are not "
    "computed",
)
