"""Random weights of several ranks: the same where all ranks hold a tensor whole, others where it is split."""

from cuq1.config import load_config
from cuq1.cuda.weights import weights_plan
from cuq1.cuda.weights_random import fills
from tests.paths import NANO


def seeds_of(rank):
    """{tensor: seed} of what is filled whole, and all seeds."""
    layout = weights_plan(*load_config(NANO), 2, rank)
    names = {tensor.offset: name for name, tensor in layout.tensors.items()}
    found = [(fill.offset, fill.seed(5, number, rank)) for number, fill in enumerate(fills(layout))]
    return {names[offset]: seed for offset, seed in found if offset in names}, [seed for _, seed in found]


def test_ranks_draw_the_same_of_what_is_not_split():
    (first, every), (second, others) = seeds_of(0), seeds_of(1)
    assert first.keys() == second.keys()
    shared = {name.rpartition(".")[2] for name in first if first[name] == second[name]}
    norms = {"norm", "attention_norm", "attn_out_norm", "ffn_norm", "ffn_out_norm", "q_norm", "k_norm"}
    assert shared == norms | {"router", "embed", "enorm", "hnorm", "final_norm"}
    assert not shared & {name.rpartition(".")[2] for name in first if first[name] != second[name]}
    same = sum(a == b for a, b in zip(every, others, strict=True))
    assert len({*every, *others}) == len(every) + len(others) - same
