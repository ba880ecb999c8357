// What tools/check_exchange.py and tools/bench_exchange.py put the exchange to the test with (common/exchange.cuh).
//
// probe_push   pushes every place's partials of an exchange, and makes the inbox of the exchange before NOT_READY.
// probe_take   polls for them, adds them in the order of places, and compares each sum's bits with the host's.
// probe_count  ends a graph of such pairs: the next one's exchanges have other numbers.
// probe_both   push and poll by one launch, with its times: what an exchange costs by itself.
// probe_part   pushes one piece for a tail that is timed, and notes when the last words come.
//   PRECOND  grid (enough threads for ROWS * HIDDEN words, of which one has one in probe_push, four in probe_take and
//            probe_both; places of this process), block THREADS, in probe_both THREADS at most; probe_count: (1).
//            probe_part: enough blocks for rows * columns words, and one more where there are signs. HIDDEN a multiple
//            of 4, arrays 16-byte aligned.
//            An exchange's launches follow one another in one stream: push, take; or both. Places that one process has
//            are pushed before any of them polls.
//   Pushes rows * HIDDEN * 4 bytes to each place; compares rows * HIDDEN * 4.
//
// They are launches of the same kind as those that a pass has, since what they probe is the order of stores between
// launches: a producer behind pdl_wait(), a consumer that polls before its predecessor's end and settles, and a later
// producer that re-arms. Rows, patterns and pauses are drawn from the exchange's number: all places draw the same rows.
#include "abi_measure.cuh"
#include "common/exchange.cuh"

constexpr int THREADS = 256;
constexpr int PART = ROWS * HIDDEN;     // words of one place's partials
constexpr int BUFFER = RANKS * PART;
constexpr int WATCHERS = THREADS / WARP;
static_assert(HIDDEN % 4 == 0, "whole float4");

__device__ __forceinline__ uint32_t mixed(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// An exchange's number, and what is drawn from it.
struct Exchange {
    uint32_t number, draw;
    int rows, pattern;
    __device__ __forceinline__ explicit Exchange(const ExchangeProbeArgs& a) {
        number = __ldcg(&a.found->done) + uint32_t(a.layer);  // counted by an older graph
        draw = mixed(number ^ mixed(a.seed));
        rows = a.rows > 0 ? a.rows : 1 + int(draw % ROWS);
        pattern = int((draw >> 8) % uint32_t(a.patterns));
    }
    __device__ __forceinline__ int buffer(int behind = 0) const { return int((number + INBOXES - behind) % INBOXES); }
    // Mostly a short while, and now and then one that lets the other places run far ahead. where: a number of its own.
    __device__ __forceinline__ void pause(const ExchangeProbeArgs& a, int where) const {
        if (a.pause == 0) return;
        const uint32_t random = mixed(draw + uint32_t(where + 1) * 0x9e3779b9u);
        const long long span = (long long)(a.pause) * (random >> 22 == 0 ? 16 : 1);
        const long long begun = clock64();
        while (clock64() - begun < (span * (random & 0xffff)) >> 16) {}
    }
};

__device__ __forceinline__ float* inbox_of(const ExchangeProbeArgs& a, int local, int buffer) {
    return a.inbox + (int64_t(local) * INBOXES + buffer) * BUFFER;
}
__device__ __forceinline__ float4 added(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// The blocks of a place make its inbox of an earlier exchange NOT_READY. Its consumer has ended.
__device__ __forceinline__ void rearm_earlier(const ExchangeProbeArgs& a, const Exchange& e) {
    if (a.behind == 0) return;
    float* const past = inbox_of(a, int(blockIdx.y), e.buffer(a.behind));
    for (int i = int(blockIdx.x * blockDim.x + threadIdx.x); i < BUFFER / 4; i += int(gridDim.x * blockDim.x))
        make_unready_4(past + i * 4);
}

// Four words of every place, summed in their order.
__device__ __forceinline__ float4 polled_sum(const float* own, bool mine, Fault* fault, int number) {
    float4 part[RANKS];
    PeerPolls polls;
    int missing;
    do {
        missing = -1;
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            part[r] = mine ? load_pushed_4(own + r * PART) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (!has_come(part[r])) missing = r;
        }
    } while (polls.again(missing, fault, KERNEL_EXCHANGE, number));
    float4 total = part[0];
#pragma unroll
    for (int r = 1; r < RANKS; ++r) total = added(total, part[r]);
    return total;
}

__device__ __forceinline__ void compare(const ExchangeProbeArgs& a, const Exchange& e, int word, float got,
                                        float wanted) {
    if (__float_as_uint(got) == __float_as_uint(wanted) || (got != got && wanted != wanted)) return;
    if (atomicAdd(&a.found->wrong, 1) != 0) return;
    a.found->exchange = e.number;
    a.found->place = a.place + int(blockIdx.y);
    a.found->row = word / HIDDEN;
    a.found->column = word % HIDDEN;
    a.found->got = __float_as_uint(got);
    a.found->expected = __float_as_uint(wanted);
}

__device__ __forceinline__ void compare_4(const ExchangeProbeArgs& a, const Exchange& e, int word, float4 got,
                                          float4 wanted) {
    compare(a, e, word, got.x, wanted.x);
    compare(a, e, word + 1, got.y, wanted.y);
    compare(a, e, word + 2, got.z, wanted.z);
    compare(a, e, word + 3, got.w, wanted.w);
}

extern "C" __global__ void __launch_bounds__(THREADS) probe_push(const __grid_constant__ ExchangeProbeArgs a) {
    const int local = int(blockIdx.y), place = a.place + local;
    const int word = int(blockIdx.x) * THREADS + int(threadIdx.x);
    const Peers peers(a.peers + local * RANKS);
    pdl_wait();  // the exchange before has been taken here, and the launch that re-armed this one's inbox has ended
    pdl_trigger();
    const Exchange e(a);
    e.pause(a, place);  // the place's
    e.pause(a, (place * 3 + 1) * 1024 + int(blockIdx.x));
    const bool skips = int(e.number) == a.skipped && place == a.skipping && blockIdx.x == 0;
    if (word < e.rows * HIDDEN && !skips) {
        const float x = __ldg(a.partials + (int64_t(e.pattern) * RANKS + place) * PART + word);
        peers.push(inbox_of(a, local, e.buffer()) + place * PART + word, x);
    }
    e.pause(a, (place * 3 + 2) * 1024 + int(blockIdx.x));
    rearm_earlier(a, e);
}

extern "C" __global__ void __launch_bounds__(THREADS) probe_take(const __grid_constant__ ExchangeProbeArgs a) {
    const int local = int(blockIdx.y);
    const int word = (int(blockIdx.x) * THREADS + int(threadIdx.x)) * 4;
    const Exchange e(a);
    const bool mine = word < e.rows * HIDDEN;
    float4 wanted = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (mine) wanted = __ldg(reinterpret_cast<const float4*>(a.sums + int64_t(e.pattern) * PART + word));
    e.pause(a, ((a.place + local) * 3 + 3) * 1024 + int(blockIdx.x));
    const float4 sum = polled_sum(inbox_of(a, local, e.buffer()) + word, mine, a.fault, int(e.number));
    pdl_trigger();
    if (mine) {
        compare_4(a, e, word, sum, wanted);
        if (!(is_finite(sum.x) && is_finite(sum.y) && is_finite(sum.z) && is_finite(sum.w)))
            report_fault(a.fault, FAULT_NOT_FINITE, KERNEL_EXCHANGE, int(e.number), a.place + local);
    }
    const unsigned long long words = 4 * __popc(__ballot_sync(0xffffffffu, mine));
    if (threadIdx.x % WARP == 0 && words > 0)
        atomicAdd(reinterpret_cast<unsigned long long*>(&a.found->compared), words);
    pdl_settle();  // the push has ended when this has: so has whatever it re-armed
}

extern "C" __global__ void __launch_bounds__(32) probe_count(const __grid_constant__ ExchangeProbeArgs a) {
    pdl_wait();  // nobody of this graph reads the number any more
    if (threadIdx.x == 0) a.found->done += uint32_t(a.count);
}

// Four words to the same place of every rank's inbox.
__device__ __forceinline__ void push_4(const Peers& peers, float* own, float4 x) {
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
        asm volatile("st.relaxed.sys.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(reinterpret_cast<uint8_t*>(own) +
                                                                               peers.distance[r]),
                     "f"(ready_float(x.x)), "f"(ready_float(x.y)), "f"(ready_float(x.z)), "f"(ready_float(x.w))
                     : "memory");
}

// Push and poll without a launch between them, four words a thread.
extern "C" __global__ void __launch_bounds__(THREADS) probe_both(const __grid_constant__ ExchangeProbeArgs a) {
    const int word = int(blockIdx.x * blockDim.x + threadIdx.x) * 4;
    const Peers peers(a.peers);
    const Exchange e(a);
    const bool mine = word < e.rows * HIDDEN;
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f), wanted = x;
    if (mine) {
        const float* const from = a.partials + (int64_t(e.pattern) * RANKS + a.place) * PART + word;
        x = __ldg(reinterpret_cast<const float4*>(from));
        wanted = __ldg(reinterpret_cast<const float4*>(a.sums + int64_t(e.pattern) * PART + word));
    }
    float* const own = inbox_of(a, 0, e.buffer()) + word;
    pdl_wait();  // as in probe_push
    pdl_trigger();
    const uint64_t begun = clock_ns();
    if (mine) push_4(peers, own + a.place * PART, x);
    const float4 sum = polled_sum(own, mine, a.fault, int(e.number));
    const int summed = __syncthreads_count(mine);  // the block's sums are there
    const uint64_t ended = clock_ns();
    if (threadIdx.x == 0 && summed > 0) {
        uint64_t* const times = a.times + (int64_t(a.layer) * gridDim.x + blockIdx.x) * 2;
        times[0] = begun;
        times[1] = ended;
    }
    if (mine) compare_4(a, e, word, sum, wanted);
    rearm_earlier(a, e);
}

extern "C" __global__ void __launch_bounds__(THREADS) probe_part(const __grid_constant__ ExchangePushArgs a) {
    const Peers peers(a.peers);
    const int buffer = a.layer % INBOXES, past = (a.layer + INBOXES - 1) % INBOXES;
    const bool watches = a.signs != nullptr && blockIdx.x == gridDim.x - 1;
    pdl_wait();
    pdl_trigger();
    if (watches) {
        // Warps that are out of step with each other, a lane a sign.
        const int lane = int(threadIdx.x) % WARP, warp = int(threadIdx.x) / WARP;
        float* const signs = a.signs + buffer * RANKS * ROWS;
        uint64_t missed = 0, back;
        bool here;
        PeerPolls polls;
        int missing;
        do {
            const uint64_t issued = clock_ns();
            missing = -1;
            for (int i = lane; i < RANKS * ROWS; i += WARP)
                if (i % ROWS < a.rows && !has_come(load_pushed(signs + i))) missing = i / ROWS;
            here = __all_sync(0xffffffffu, missing < 0);
            back = clock_ns();
            if (!here) missed = issued;
        } while (polls.again(missing, a.fault, KERNEL_EXCHANGE, a.layer));
        if (lane == 0) {
            uint64_t* const times = a.times + (int64_t(a.layer) * WATCHERS + warp) * 2;
            times[0] = missed;
            times[1] = back;
        }
        return;
    }
    const int word = int(blockIdx.x) * THREADS + int(threadIdx.x);
    const bool last = a.signs != nullptr && word % a.columns == a.columns - 1;
    if (word < a.rows * a.columns && !last) peers.push(a.own + word, __ldg(a.partials + word));
    if (a.signs == nullptr || blockIdx.x != 0) return;
    if (int(threadIdx.x) < RANKS * ROWS) make_unready(a.signs + past * RANKS * ROWS + threadIdx.x);
    const long long begun = clock64();
    while (clock64() - begun < a.pause) {}
    if (int(threadIdx.x) < a.rows) {
        const int at = (int(threadIdx.x) + 1) * a.columns - 1;
        peers.push(a.signs + (buffer * RANKS + a.place) * ROWS + threadIdx.x, 1.0f);
        peers.push(a.own + at, __ldg(a.partials + at));
    }
}
