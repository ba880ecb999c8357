"""What the control kernel decides, in Python."""

from cuq1.cuda import abi

FAULT_PEER = abi.constant("FAULT_PEER")
COUNT = 1 << 31  # of Mirror.read's values, as ranks tell them


def agree(mirrors, faults):
    """What accept makes of the ranks' statuses: (any cancelled + 2 where any has a fault, the least taken, read)."""
    ended = int(any(mirror.cancel for mirror in mirrors)) + 2 * int(any(faults))
    first = mirrors[0].read % COUNT
    ahead = ((mirror.read - first + COUNT // 2) % COUNT - COUNT // 2 for mirror in mirrors)
    return ended, min(mirror.taken for mirror in mirrors), (first + min(ahead)) % COUNT


def decide(loop, state, mirror, made, fault=0, refused=0, agreed=None):
    """The kernel's twin: ("depth", d), ("round", rows, short) or None, whichever it launches, and the record or None.

    loop, state, mirror: structures of cuq1.cuda.abi, of which loop and mirror are changed as the kernel does;
    refused: the status of every launch; agreed: of several ranks, as `agree` has it.
    """
    cancel, taken, read, count, broken = mirror.cancel, mirror.taken, mirror.read, 1 << 32, fault != 0
    if agreed is not None:
        ended, taken, read = agreed
        cancel, count, broken = ended & 1, COUNT, ended > 1 or fault == FAULT_PEER
    loop.ran[made] += 1
    tokens = list(state.log_tokens[: min(state.log_count, loop.budget)])
    stops = [i for i, token in enumerate(tokens) if token in list(loop.stops)]
    reason = abi.END_NONE
    if stops:
        tokens, reason = tokens[: stops[0] + 1], abi.END_STOP
    elif len(tokens) == loop.budget:
        reason = abi.END_LENGTH
    going = made >= abi.MIN_AUTO_DRAFTS and made < abi.MAX_DRAFTS and state.depth_rows[made] > 0
    if going and reason == abi.END_NONE and not refused:
        return ("depth", made), None
    if reason == abi.END_NONE and cancel:
        reason = abi.END_CANCELLED
    elif reason == abi.END_NONE and (
        state.done + 2 * abi.ROWS - taken > loop.room or (loop.written + 1 - read) % count >= abi.LOG_RECORDS
    ):
        reason = abi.END_PAUSED
    if broken:
        reason = abi.END_FAULT
    if refused:
        reason = abi.END_LAUNCH
    record = abi.Record()
    record.index, record.rows = loop.index, 0 if loop.index == 0 else state.log_drafted + 1
    record.drafted, record.accepted = state.log_drafted, state.log_accepted
    record.count, record.reason, record.status = len(tokens), reason, refused
    record.next_rows, record.depths, record.done = state.drafts + 1, (1 << state.drafts) - 1, state.done
    for i in range(abi.ROWS):
        record.tokens[i] = tokens[i] if i < len(tokens) else -1
    loop.budget -= len(tokens)
    loop.index += 1
    append(mirror, loop, record)
    short = state.done + abi.ROWS <= loop.short_context
    return (("round", state.drafts + 1, short) if reason == abi.END_NONE else None), record


def append(mirror, loop, record):
    """Writes a record as the kernel does: each word beside the record's number."""
    loop.written += 1
    words = memoryview(bytes(record)).cast("I")
    slot = mirror.log[(loop.written - 1) % abi.LOG_RECORDS]
    for i, word in enumerate(words):
        slot[i] = loop.written << 32 | word
