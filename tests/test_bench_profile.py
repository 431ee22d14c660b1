"""Where the time goes: kernels of all ranks become exchange, waiting and the rest."""

import pytest

from epmoe.core.bench.profile import OTHERS, Kernel, _short, summarise
from epmoe.core.errors import InputError


def test_waiting_is_what_an_exchange_takes_above_the_last_rank():
    """Two ranks, one layer: rank 1 comes 30 us late, so rank 0's exchange lasts 40 us and its own 10 us."""
    early = [Kernel("pack", 0, 5), Kernel("ncclDevKernel_SendRecv", 5, 40), Kernel("merge", 45, 5)]
    late = [Kernel("pack", 0, 35), Kernel("ncclDevKernel_SendRecv", 35, 10), Kernel("merge", 45, 5)]
    found = summarise([early, late], layers=1)
    assert found.exchange_us == 10
    assert found.wait_us == 15  # 30 us on rank 0, none on rank 1
    assert found.kernels_us == {"pack": 20, "merge": 5}
    assert found.span_us == 50
    assert found.launches == 3


def test_several_layers_are_averaged_and_small_kernels_added_up():
    kernels = [Kernel("gemm", 10 * i, 8) for i in range(50)]
    kernels += [Kernel("fill", 500, 1), Kernel("copy", 501, 1)]
    found = summarise([kernels], layers=2)
    assert found.kernels_us == {"gemm": 200, OTHERS: 1}
    assert found.span_us == 251
    assert found.exchange_us == found.wait_us == 0


def test_lost_kernels_are_not_guessed():
    """What one rank did not record belongs to some exchange, and nobody knows to which."""
    whole = [Kernel("ncclSend", 0, 5), Kernel("ncclSend", 9, 5)]
    with pytest.raises(InputError, match=r"recorded \[2, 1\] exchanges"):
        summarise([whole, whole[1:]], layers=1)


@pytest.mark.parametrize(
    ("full", "short"),
    [
        ("_gate_up_kernel", "_gate_up_kernel"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_SendRecv"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, 2>(int, float)",
            "vectorized_elementwise_kernel",
        ),
        ("void at::(anonymous namespace)::sort_kernel<long>(long*)", "sort_kernel"),
        ("_ZN7cutlass13device_kernelIN2at4cuda6detail25enable_3x", "device_kernel"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
    ],
)
def test_names_without_their_templates(full, short):
    assert _short(full) == short
