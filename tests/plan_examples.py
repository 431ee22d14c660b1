"""What the tests of the limit calculator work by hand: a toy layer, one draw of it, and a slow GPU."""

import torch

from epmoe.core.plan.gpus import custom_gpu
from epmoe.core.shape import named_shape

TOY = named_shape("toy")  # H 4, I 2, E 4, K 2
# two ranks with two tokens each; experts 0 and 1 live on rank 0
TOY_DRAW = [torch.tensor([[0, 1], [1, 2]]), torch.tensor([[2, 3], [0, 3]])]
SLOW = custom_gpu(memory_bandwidth=100.0, bf16_flops=1000.0, nvlink_bandwidth=10.0)
