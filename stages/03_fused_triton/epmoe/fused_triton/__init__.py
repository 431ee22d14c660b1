"""The fused stage: the fixed-capacity layer with its local work in a few Triton kernels."""
