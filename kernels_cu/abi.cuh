// What all kernels share with the host. cuq1/cuda/abi.py reads the structures of all abi*.cuh for ctypes, so a field is a
// number of four or eight bytes, a pointer, or an array of such numbers; a test compiles the offsets of each against
// ctypes'. Besides this header:
//   abi_loop.cuh     a request's rounds: candidates, sampling, drafts, the log
//   abi_decode.cuh   a pass of decoding
//   abi_prefill.cuh  prompt processing
//   abi_weights.cuh  weights, packed or random
//   abi_measure.cuh  tools and laboratories
//   abi_qwen2.cuh    what only Qwen2 models have
//
// Fields that all kernels begin with:
//   fault  where to report what can't go on (host memory), or null
//   live   null, or where the number of rows to compute is read (after pdl_wait): `rows` at most, 0 ends the launch
//   layer  the layer's number, for reports; the draft's layer is -1
//   rows   rows to compute, 1 to ROWS; rows beyond them are neither read as tokens nor written
#pragma once
#include "common/types.cuh"

constexpr int MAX_RANKS = 8;
constexpr int INBOXES = 3;          // buffers that an exchange's uses take in turn (common/exchange.cuh)
// For what a peer pushes within microseconds, unless its host is slow to launch.
constexpr int DEFAULT_PEER_TIMEOUT_MS = 4000;

enum FaultKind {
    FAULT_NONE = 0,
    FAULT_NOT_FINITE = 1,
    FAULT_COPY = 2,
    FAULT_TOKEN = 3,
    FAULT_ROUTING = 4,
    FAULT_RESULT = 5,
    FAULT_PEER = 6,  // what another rank's kernel was to push never came; detail: that rank's place
    FAULT_PAGES = 7  // a position that no page of the KV cache is left for; detail: the position
};

enum KernelId {
    KERNEL_EMBED = 1,
    KERNEL_QKV = 2,
    KERNEL_ATTENTION = 3,
    KERNEL_COMBINE = 4,
    KERNEL_O_PROJ = 5,
    KERNEL_ATTN_TAIL = 6,
    KERNEL_GATE_UP = 7,
    KERNEL_DOWN = 8,
    KERNEL_MLP_TAIL = 9,
    KERNEL_LM_HEAD = 10,
    KERNEL_TOP_K = 11,
    KERNEL_ACCEPT = 12,
    KERNEL_DRAFT_SAMPLE = 13,
    KERNEL_EH_PROJ = 14,
    KERNEL_PREFILL = 16,
    KERNEL_CONTROL = 17,
    KERNEL_EXCHANGE = 18,
    KERNEL_ROUTER = 19,
    KERNEL_NORM = 20
};

// In host memory that the device writes. what: FaultKind, or -1 while it is being written.
struct Fault {
    int what;
    int kernel;
    int layer;
    int detail;
};
