"""vLLM's captured graphs end before the group whose exchanges they hold.

NCCL does not end a communicator while a graph still holds one of its collectives: it waits, for ever where the graph
is dropped later by the thread that waits. vLLM drops graphs of whole models when its runner ends, those of pieces only
with the compiled model, after its groups. Its own communicator meets that with a thread and a time limit; torch's, on
which stages exchange, has none.
"""

# pyright: reportMissingImports=false
import gc
from typing import Any

from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.cuda_graph import CUDAGraphWrapper


# --8<-- [start:order]
def end_graphs_before(coordinator: Any) -> None:
    """From now on `coordinator.destroy()`, which ends its groups, first drops every graph that vLLM has captured."""
    destroy = coordinator.destroy

    def destroy_after_graphs() -> None:
        CUDAGraphWrapper.clear_all_graphs()
        BreakableCUDAGraphWrapper.clear_all_graphs()
        gc.collect()  # graphs lie in cycles with what they have captured
        destroy()

    coordinator.destroy = destroy_after_graphs


# --8<-- [end:order]
