"""What ranks do with engines in test_ranks: each function runs on all of them, and rank 0 leads."""

import os
import random
import time
from pathlib import Path

import numpy as np

from cuq1.cuda import abi
from cuq1.cuda.engine import CudaEngine
from cuq1.parallel.follow import Leader, follow
from cuq1.sampling import DecodeParams
from tests.masks import Walk
from tests.paths import NANO
from tools.bench import nano


def on_ranks(meeting, act, prepare=lambda engine: None, **options):
    """What `act(leader)` returns on rank 0, None elsewhere; and what each rank's engine then counts."""
    engine = CudaEngine(NANO, meeting.world, meeting=meeting, **options)
    prepare(engine)
    if meeting.rank:
        follow(engine, meeting)
        return None, engine.counts
    with Leader(engine, meeting) as leader:
        return act(leader), engine.counts


def flat(stream):
    return [token for step in stream for token in step]


def conversations(meeting):
    """Both loops through the same requests, and what each rank counts in the end."""
    found = {loop: on_ranks(meeting, talk, loop=loop, capacity=1024) for loop in ("device", "host")}
    found["rewound"] = on_ranks(meeting, rewound, capacity=1024)
    found["fp8"] = on_ranks(meeting, short, activations="fp8")
    found["fp8, host"] = on_ranks(meeting, short, activations="fp8", loop="host")
    return found


def talk(leader):
    """Requests of every kind: read whole or in part, ended by themselves, by the reader, or by what comes next."""
    rng, prompts, trace = random.Random(11), nano()[2](8, 5), []
    seen = [17, 18]
    for number in range(48):
        if number % 3 == 0 or len(leader.tokens) > 800:
            leader.prefill(prompts[number % len(prompts)])
        elif number % 3 == 1:
            leader.prefill([*leader.tokens, *prompts[number % len(prompts)][:20]])
        if number == 30:
            leader.prefill((prompts[0] * 40)[:1019])  # the context ends within the request
        params = DecodeParams(
            temperature=(0.0, 1.0, 0.7)[number % 3],
            top_k=0 if number in (8, 9) else rng.randrange(1, 33),  # 0 is sampled by the host
            top_p=0.95,
            seed=number,
            draft=("auto", 7, 3, "off", 1)[number % 5],
            max_tokens=rng.randrange(1, 60),
            stop_tokens=tuple({*rng.sample(seen, 2)}) if number % 4 == 3 else tuple(range(4000, 4040)) * (number == 5),
        )
        stream = leader.decode(params)
        rounds = []
        for step in stream:
            rounds.append([step.tokens, step.drafted, step.accepted])
            if number % 5 == 2 and len(rounds) == 1 + number % 4:
                if number % 2:
                    stream.close()
                break
        seen += [token for tokens, *_ in rounds for token in tokens]
        trace.append([rounds, stream.finish_reason, leader.tokens[-30:]])
    return trace


def rewound(leader):
    """Rewinds after requests that were cut, a slow reader, prompts in pieces."""
    rng, prompts = random.Random(12), nano()[2](8, 6)
    first = []
    for number in range(30):
        leader.prefill(prompts[number % 8])
        stream = leader.decode(DecodeParams(temperature=1.0, top_k=20, seed=number, max_tokens=100))
        for _, step in zip(range(rng.randrange(12)), stream, strict=False):
            assert len(step)
        leader.rewind(max(1, len(leader.tokens) - rng.randrange(20)))
        flat(leader.decode(DecodeParams(temperature=0, max_tokens=10)))
    params = DecodeParams(temperature=1.0, top_k=20, seed=3, max_tokens=600)
    for pause in (0.0, 0.05):
        leader.rewind(0)
        leader.prefill(prompts[2])
        found = []
        for number, step in enumerate(leader.decode(params)):
            found += step.tokens
            if number % 25 == 0:
                time.sleep(pause)  # the device pauses meanwhile, on all ranks
        first.append(found)
    resumed = leader._engine._loop.resumed
    pieces = []
    for chunk in (None, 33):
        leader.rewind(0)
        leader.prefill(prompts[3], chunk=chunk)
        pieces.append(flat(leader.decode(DecodeParams(temperature=0, max_tokens=20))))
    return {"slow": first[0] == first[1], "resumed": resumed, "pieces": pieces[0] == pieces[1]}


def masked_and_remembered(meeting):
    """Rank 0's mask, and conversations that take turns, with memory for snapshots that is short, or is not."""

    def act(leader):
        prompts = nano()[2](3, 9)
        free = True
        for salt, ids in enumerate(prompts):
            mask = Walk(leader.vocab_size, salt)
            leader.prefill(ids)
            params = DecodeParams(temperature=float(salt > 0), top_k=20, seed=salt, max_tokens=60, logprobs=2)
            for step in leader.decode(params, mask=mask):
                free &= tuple(mask.tokens) == leader.tokens[len(ids) :]  # and Walk takes only what it allows
                free &= len(step.logprobs) == len(step)
        kept, same = [], True
        for size in (1 << 30, 4 << 20):
            leader.keep_snapshots(size, 1 << 28)
            said: dict[int, list[int]] = {}
            for number in range(12):
                ids = [20 + number % 3] * 400 + prompts[number % 3][:20]
                kept.append(leader.prefill(ids))
                leader.remember()
                answer = flat(leader.decode(DecodeParams(temperature=1.0, top_k=20, seed=number % 3, max_tokens=90)))
                same &= said.setdefault(number % 3, answer) == answer
        return free, same, kept

    return on_ranks(meeting, act, capacity=2048)


def short(leader):
    """Two requests."""
    leader.prefill(nano()[2](2, 7)[1])
    greedy = flat(leader.decode(DecodeParams(temperature=0, max_tokens=40)))
    return greedy, flat(leader.decode(DecodeParams(temperature=1.0, top_k=20, seed=1, max_tokens=40)))


def note(folder, name, text):
    """A file that is there as a whole."""
    draft = Path(folder) / f"{name}.new"
    draft.write_text(text)
    draft.rename(Path(folder) / name)


def endless(meeting, folder, loop):
    """A request that goes on until something happens."""
    note(folder, f"{meeting.rank}.pid", str(os.getpid()))

    def act(leader):
        leader.prefill([1, 2, 3])
        for number, _ in enumerate(leader.decode(DecodeParams(temperature=1.0, top_k=20, seed=1, max_tokens=60_000))):
            if number == 20:
                note(folder, "begun", "")
        return len(leader.tokens)

    return on_ranks(meeting, act, loop=loop)


def damaged(meeting, what):
    """Rank 1 stops pushing to rank 0, or has weights that are not finite, from some request on."""

    def prepare(engine):
        if meeting.rank != 1:
            return
        prefill = engine.prefill

        def later(ids, *, chunk=None):
            if len(ids) == 5:
                if what == "push":  # rank 0's inbox is taken to be its own
                    engine._runtime.write("peers", np.zeros(abi.MAX_RANKS, np.int64))
                else:  # of the draft, which no prompt needs
                    engine._runtime.write("draft.ffn_norm", np.full(256, np.nan, np.float32))
            return prefill(ids, chunk=chunk)

        engine.prefill = later

    def act(leader):
        for length in (4, 5):
            leader.prefill(list(range(length)))
            flat(leader.decode(DecodeParams(temperature=0, max_tokens=30)))
        return "not noticed"

    return on_ranks(meeting, act, prepare)


def unequal(meeting):
    """Ranks with different options."""
    return on_ranks(meeting, lambda leader: None, capacity=1024 + meeting.rank)


def brief(meeting):
    """The shortest request."""
    return on_ranks(meeting, lambda leader: (leader.prefill([1]), flat(leader.decode(DecodeParams(max_tokens=2)))))
