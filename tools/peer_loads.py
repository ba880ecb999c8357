"""Loads from each rank's memory in the switch's place, for what is to run without multicast objects.

The kernels of kernels_cu/exchange_multicast.cu are compiled with loops over the ranks, in their order, instead of the
few lines that name multimem instructions; all else of them is as it is.
"""

import re
from collections.abc import Sequence
from typing import Self

from cuq1.cuda import compile as jit
from cuq1.parallel import Rendezvous
from cuq1.parallel.exchange import SharedInbox
from cuq1.plan.kernel import Kernel

_READS = re.compile(r"^// \[reads\n.*?^// reads\]\n", re.MULTILINE | re.DOTALL)
_LOOPS = """
__constant__ int64_t DISTANCES[RANKS] = {%s};  // bytes
template <class T>
__device__ const T* of_rank(const T* address, int r) {
    return reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(address) + DISTANCES[r]);
}
__device__ float4 sum_of_ranks(const float* address) {
    float4 x = load_pushed_4(of_rank(address, 0));
    for (int r = 1; r < RANKS; ++r) x = sum(x, load_pushed_4(of_rank(address, r)));
    const float nan = __uint_as_float(0x7fffffffu);  // whose NaN it was is not told
    return make_float4(x.x == x.x ? x.x : nan, x.y == x.y ? x.y : nan, x.z == x.z ? x.z : nan, x.w == x.w ? x.w : nan);
}
__device__ uint32_t largest_of_ranks(const float* address) {
    uint32_t x = 0;
    for (int r = 0; r < RANKS; ++r) {
        const uint32_t next = __float_as_uint(load_pushed(of_rank(address, r)));
        x = x > next ? x : next;
    }
    return x;
}
__device__ int largest_of_ranks(const int* address) {
    int x = load_pushed(of_rank(address, 0));
    for (int r = 1; r < RANKS; ++r) x = max_int(x, load_pushed(of_rank(address, r)));
    return x;
}
"""


def patch(kernel: Kernel, distances: Sequence[int], *changes: tuple[str, str]) -> tuple[str, str]:
    """For build and compile_kernel: the kernel's source, and what stands for it.

    distances: in bytes, from an address in this rank's memory to the same place of each rank's. changes: (old, new) in
    the source besides. Raises ValueError where the source is another than expected.
    """
    text = jit.source_text(kernel)
    found = _READS.findall(text)
    places = [*found, *(old for old, _ in changes)]
    if len(found) != 1 or any(text.count(one) != 1 for one in places):
        raise ValueError(f"{kernel.source} is not as it was when this was written")
    new = text.replace(found[0], _LOOPS % ", ".join(map(str, distances)))
    for old, other in changes:
        new = new.replace(old, other)
    if "multimem." in new:
        raise ValueError(f"{kernel.source} names multimem instructions elsewhere, too")
    return text, new


class PeerLoads:
    """As cuq1.parallel.multicast.Multicast, of memory that ranks map from each other: own, address, reset and close.

    distances: of the ranks' memory, for patch.
    """

    def __init__(self, meeting: Rendezvous, nbytes: int) -> None:
        self._inbox = SharedInbox(meeting, nbytes)
        self.nbytes = nbytes
        self.own = self.address = self._inbox.address
        self.distances = [int(one) for one in self._inbox.distances[: meeting.world]]

    def reset(self) -> None:
        self._inbox.reset()

    def close(self) -> None:
        self._inbox.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
