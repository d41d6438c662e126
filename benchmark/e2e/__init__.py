"""Whole VAEs, compared with what Diffusers and ``torch.compile`` make of them."""
