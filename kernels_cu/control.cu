// control  the decode loop's hands: after the draft depths that its graph holds, launches the next depth's graph, or ends
//          the round: counts what was committed, logs it, and launches the graph of the next verification or, where
//          the request ends or the reader is too far behind, none.
//   PRECOND  grid 1, block 32, the last kernel of a graph that was instantiated for device launch. state: what accept and
//            draft_sample wrote, read after pdl_wait(); loop: written by the control before, in an older graph, or by the
//            host. Linked with CUDA's device runtime.
//   Reads the State's counts and the Loop, writes the Loop and, where a round ends, 128 bytes of log and 256 of mirror.
//
// Why so: the stop rule is computed where its features are, in draft_sample, so that a loop that the host steps takes the
// same decisions; it leaves them in depth_rows. The table of graphs and what was committed are read while the predecessor
// runs, so that the way from its last write to the launch is one read of L2; what lies in host memory (cancel, what was
// read, faults) is asked for at once, and waited for only where a round ends. A graph starts only when the one that
// launched it has ended, so the launch comes first and the log after. A cancellation or a fault that is seen too late for
// this round ends the next one. Whether the request ends is known before another depth is launched: nobody would verify
// what it drafts.
//
// Of several ranks, all have to end their chains at the same round, or some would wait for what the others never push:
// what counts is what their hosts and faults have told each other with the round's candidates (top_k, accept), which is
// the same on all. Only where a peer's part is missing there is nobody left to agree with.
#include "abi_loop.cuh"
#include "common/clock.cuh"
#include "common/exchange.cuh"
#include "common/pdl.cuh"

constexpr uint32_t EVERYBODY = 0xffffffffu;
constexpr int SHORT = ROWS + 1, DEPTHS = 2 * (ROWS + 1);  // places in Loop.graphs
constexpr int WORDS = sizeof(Record) / 4;
static_assert(WORDS == WARP && GRAPHS == WARP && MAX_STOPS == WARP, "a word, a graph and a stop token a lane");
static_assert(DEPTHS + MAX_DRAFTS <= GRAPHS, "room for all graphs");

// A graph runs when this one has ended; 0 where the driver took it.
__device__ __forceinline__ int launch_after(uint64_t graph) {
    return int(cudaGraphLaunch(reinterpret_cast<cudaGraphExec_t>(graph), cudaStreamGraphTailLaunch));
}

// How much of what was committed counts, and whether the request ends with it.
struct Outcome {
    int token;  // lane i's of what accept committed
    int count;
    int reason;
};

__device__ __forceinline__ Outcome judge(const State& state, int stop, int budget, int lane) {
    Outcome found;
    const int all = __ldcg(&state.log_count), committed = all < budget ? all : budget;
    found.token = lane < ROWS ? __ldcg(&state.log_tokens[lane]) : 0;
    found.count = committed;
    found.reason = END_NONE;
#pragma unroll
    for (int i = ROWS - 1; i >= 0; --i) {  // the first stop token decides last
        const int id = __shfl_sync(EVERYBODY, found.token, i);
        if (i < committed && __ballot_sync(EVERYBODY, stop == id) != 0) {
            found.count = i + 1;
            found.reason = END_STOP;
        }
    }
    if (found.reason == END_NONE && found.count == budget) found.reason = END_LENGTH;
    return found;
}

extern "C" __global__ void __launch_bounds__(WARP) control(const __grid_constant__ ControlArgs a) {
    __shared__ __align__(8) Record record;
    const int lane = threadIdx.x;
    Loop& loop = *a.loop;
    const State& state = *a.state;

#if RANKS == 1
    const volatile Mirror& host = *a.mirror;
    const int cancel = host.cancel, taken = host.taken;
    const uint32_t read = host.read;
#endif
    const int fault = *reinterpret_cast<const volatile int*>(&a.fault->what);
    const uint64_t graph = __ldcg(&loop.graphs[lane]);
    const int stop = __ldcg(&loop.stops[lane]);
    const int budget = __ldcg(&loop.budget), room = __ldcg(&loop.room), index = __ldcg(&loop.index);
    const int short_context = __ldcg(&loop.short_context);
    const uint32_t written = __ldcg(&loop.written);
    const uint64_t launched = __ldcg(&loop.launched), earlier = __ldcg(&loop.drafted_first);
    const int ran = __ldcg(&loop.ran[a.made]);
    Outcome outcome{};
    if (a.made > 0) outcome = judge(state, stop, budget, lane);  // accept lies many launches back

    pdl_wait();  // the last draft, and what it decided
    pdl_trigger();
    const uint64_t begun = clock_ns();
#ifdef STALL_AT
    while (index >= STALL_AT) __nanosleep(1000);  // for tests: the round that does not end
#endif
    const int more = a.made < MAX_DRAFTS ? __ldcg(&state.depth_rows[a.made]) : 0;
    const int drafts = __ldcg(&state.drafts), done = __ldcg(&state.done);
    if (a.made == 0) outcome = judge(state, stop, budget, lane);  // accept may be the launch before
#if RANKS > 1  // accept may be the launch before
    const int ended = __ldcg(&loop.agreed[STATUS_ENDED]), taken = __ldcg(&loop.agreed[STATUS_TAKEN]);
    const int cancel = ended & 1, read = __ldcg(&loop.agreed[STATUS_READ]);
#endif
    const int token = outcome.token;
    int count = outcome.count, reason = outcome.reason;
    const int drafted = __ldcg(&state.log_drafted), accepted = __ldcg(&state.log_accepted);
    const uint64_t verified = __ldcg(&state.log_verified);

#if TEST_FAULT == 1  // for tests: the budget is one token short
    if (reason == END_LENGTH) --count;
#elif TEST_FAULT == 2  // a stop token stays out of what is committed
    if (reason == END_STOP) --count;
#endif

    int status = 0;
    if (a.made >= MIN_AUTO_DRAFTS && more > 0 && reason == END_NONE) {  // nothing from the host is waited for
        const uint64_t next = __shfl_sync(EVERYBODY, graph, DEPTHS + a.made);
        if (lane == 0) {
            status = launch_after(next);
            loop.ran[a.made] = ran + 1;
            if (a.first) loop.drafted_first = begun;
        }
        status = __shfl_sync(EVERYBODY, status, 0);
        if (status == 0) return;
    }

    if (reason == END_NONE && cancel != 0) reason = END_CANCELLED;
    // The next round writes rows up to done + ROWS, and drafts up to ROWS positions beyond those.
#if RANKS > 1
    const bool full = ((written + 1 - read) & 0x7fffffffu) >= LOG_RECORDS, broken = ended > 1 || fault == FAULT_PEER;
#else
    const bool full = written + 1 - read >= LOG_RECORDS, broken = fault != 0;
#endif
    const bool behind = done + 2 * ROWS - taken > room || full;
    if (reason == END_NONE && behind) reason = END_PAUSED;
    if (broken) reason = END_FAULT;
    if (status != 0) reason = END_LAUNCH;

    const bool is_short = done + ROWS <= short_context;
    const uint64_t next = __shfl_sync(EVERYBODY, graph, (is_short ? SHORT : 0) + drafts + 1);
    if (lane == 0) {
        if (reason == END_NONE) {
            status = launch_after(next);
            if (status != 0) reason = END_LAUNCH;
        }
        loop.budget = budget - count;
        loop.written = written + 1;
        loop.index = index + 1;
        loop.ran[a.made] = ran + 1;
        record.index = index;
        record.rows = index == 0 ? 0 : drafted + 1;
        record.drafted = drafted;
        record.accepted = accepted;
        record.count = count;
        record.reason = reason;
        record.next_rows = drafts + 1;
        record.depths = (1 << drafts) - 1;
        record.done = done;
        record.status = status;
        record.launched = launched;
        record.verified = verified;
        record.drafted_first = a.first ? begun : earlier;
        loop.launched = record.ended = clock_ns();
    }
    if (lane < ROWS) record.tokens[lane] = lane < count ? token : -1;
    if (lane < 6) record.reserved[lane] = 0;
    __syncwarp();  // the record is whole
    const uint32_t word = reinterpret_cast<const uint32_t*>(&record)[lane];
    const int slot = int(written % LOG_RECORDS);
    reinterpret_cast<uint32_t*>(&a.log[slot])[lane] = word;
    *const_cast<volatile uint64_t*>(&a.mirror->log[slot][lane]) = uint64_t(written + 1) << 32 | word;
}
