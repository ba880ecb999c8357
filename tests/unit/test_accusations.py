"""Which rank is to blame when several miss something of each other."""

import selectors
from itertools import permutations
from types import SimpleNamespace

import pytest

from cuq1.cuda import abi
from cuq1.cuda.ranks import missing_part, order
from cuq1.errors import DeviceError, PeerError
from cuq1.parallel.server import Server
from cuq1.parallel.wire import Frame
from tests.unit.test_rendezvous import SECRET, serving, together

LAYERS, DEPTHS = 3, 2
TARGET = [(kernel, layer) for layer in range(LAYERS) for kernel in ("attn_tail", "mlp_tail")]
DRAFT = [("qkv", -1), ("attn_tail", -1), ("mlp_tail", -1), ("draft_sample", -1)]
# The exchanges of two rounds: by the device, without a draft, and sampled on the host.
SUCCESSIONS = {
    "device": [*TARGET, ("accept", LAYERS), *DRAFT * DEPTHS] * 2,
    "settled alone": [*TARGET, ("accept", LAYERS), DRAFT[0]] * 2,
    "no draft": [*TARGET, ("accept", LAYERS)] * 2,
    "host": [*TARGET, *DRAFT[:3] * DEPTHS] * 2,
    "host, settled alone": [*TARGET, DRAFT[0]] * 2,
}


def judged(accusations, world):
    """The fault that a server finds in (rank, place, after), in the order in which they come."""
    with selectors.DefaultSelector() as selector:
        server = Server(selector, world, SECRET)
        try:
            for rank, place, after in accusations:
                server._hear(rank, Frame({"message": f"of {rank}", "place": place, "after": list(after)}, b""))
            server._judge()
            return server.fault
        finally:
            server.close()


@pytest.mark.parametrize("name", SUCCESSIONS)
@pytest.mark.parametrize("world", [2, 3])
def test_whoever_skips_a_push_is_found_whoever_speaks_first(name, world):
    """The victim stops at the exchange; the others have what they need for it, and stop at the next, for its part."""
    exchanges = SUCCESSIONS[name]
    for at in range(len(exchanges) // 2 + 1):
        stopped = [order(*exchanges[at], LAYERS)] + [order(*exchanges[at + 1], LAYERS)] * (world - 1)
        for ranks in permutations(range(world)):
            fault = judged([(rank, *stopped[rank]) for rank in ranks], world)
            assert fault.message == "rank 0 failed: of 0", (at, exchanges[at], ranks)


def test_without_an_order_the_first_to_speak_would_be_believed():
    """The control."""
    (place, after), further = order("accept", LAYERS, LAYERS), order("qkv", -1, LAYERS)
    assert judged([(1, *further), (0, place, ())], 2).ranks == (1,)
    assert judged([(1, *further), (0, place, after)], 2).ranks == (0,)


def test_ranks_hear_the_verdict():
    texts = {}

    def act(meeting):
        kernel, layer = (("accept", LAYERS), ("qkv", -1))[meeting.rank]
        numbers = {name: number for number, name in abi.KERNELS.items()}
        fault = SimpleNamespace(kernel=numbers[kernel], layer=layer, detail=1 - meeting.rank)
        error = missing_part(fault, "the head", LAYERS)
        texts[meeting.rank] = str(error)
        meeting.fail_of(error)
        meeting.barrier("never")

    with serving(2) as served:
        results = together(served, 2, act)
        assert served.fault.ranks == (0,)
    assert [str(result) for result in results] == [f"rank 0 failed: {texts[0]}"] * 2
    assert texts[0].startswith("rank 1's part of the candidates of the head never came")


@pytest.mark.parametrize(
    ("speaks", "said"),
    [(False, "rank 0 failed: rank 1's part never came"), (True, "rank 1 failed: out of memory")],
)
def test_one_rank_alone_is_believed_soon_and_a_plain_failure_at_once(speaks, said):
    def act(meeting):
        if meeting.rank == 0:
            meeting.fail_of(PeerError("rank 1's part never came", 3, (4,)))
        elif speaks:
            meeting.fail_of(DeviceError("out of memory"))
        meeting.barrier("never")

    with serving(2) as served:
        assert [str(result) for result in together(served, 2, act)] == [said] * 2
