"""WAN video VAEs of Diffusers on the fused operations. Needs the ``wan`` extra: ``pip install cudnn-fused[wan]``."""

from cudnn_fused.wan.encoder import FusedWanEncoder
from cudnn_fused.wan.fuse import fuse_encoder, unfuse_encoder

__all__ = ["FusedWanEncoder", "fuse_encoder", "unfuse_encoder"]
