"""The structures that kernels share with the host: kernels_cu/abi.cuh in ctypes.

Pointers are device addresses (integers). A test compiles the C offsets against these.
"""

from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64

MAX_DRAFTS = 7
MIN_AUTO_DRAFTS = 3
MAX_TOP_K = 32
FEATURES = 6
ROWS = 8
MAX_STOPS = 32
LOG_RECORDS = 256
GRAPHS = 32
ROUTED_COPIES = 4

END_NONE, END_STOP, END_LENGTH, END_CANCELLED, END_FAULT, END_PAUSED, END_LAUNCH = range(7)

FAULTS = {
    1: "a value that is not finite",
    2: "a copy that did not arrive",
    3: "a token outside the vocabulary",
    4: "routing that did not come",
    5: "a result that did not arrive",
}
KERNELS = {
    1: "embed",
    2: "qkv",
    3: "attention",
    4: "combine",
    5: "o_proj",
    6: "attn_tail",
    7: "gate_up",
    8: "down",
    9: "mlp_tail",
    10: "lm_head",
    11: "top_k",
    12: "accept",
    13: "draft_sample",
    14: "eh_proj",
    16: "prefill",
    17: "control",
}

Pointer = c_uint64


class Fault(Structure):
    _fields_ = (
        ("what", c_int32),
        ("kernel", c_int32),
        ("layer", c_int32),
        ("detail", c_int32),
    )


class EmbedArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("tokens", Pointer),
        ("table", Pointer),
        ("norm", Pointer),
        ("residual", Pointer),
        ("normed", Pointer),
        ("normed_residual", c_int32),
        ("reserved", c_int32),
    )


class QkvArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("normed", Pointer),
        ("weights", Pointer),
        ("scales", Pointer),
        ("q_norm", Pointer),
        ("k_norm", Pointer),
        ("positions", Pointer),
        ("inverse_frequencies", Pointer),
        ("q", Pointer),
        ("k_cache", Pointer),
        ("v_cache", Pointer),
        ("slots", c_int32),
        ("entry_scale", c_float),
        ("base", Pointer),
        ("pieces", Pointer),
        ("norm", Pointer),
        ("residual", Pointer),
        ("inverse", Pointer),
    )


class AttentionArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("q", Pointer),
        ("k_cache", Pointer),
        ("v_cache", Pointer),
        ("positions", Pointer),
        ("partial_out", Pointer),
        ("partial_max", Pointer),
        ("partial_sum", Pointer),
        ("slots", c_int32),
        ("window", c_int32),
        ("splits", c_int32),
        ("scale", c_float),
        ("written", c_int32),
        ("reserved", c_int32),
    )


class ShortAttentionArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("q", Pointer),
        ("k_cache", Pointer),
        ("v_cache", Pointer),
        ("positions", Pointer),
        ("sink_k", Pointer),
        ("attended32", Pointer),
        ("attended", Pointer),
        ("slots", c_int32),
        ("window", c_int32),
        ("written", c_int32),
        ("scale", c_float),
    )


class CombineArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("q", Pointer),
        ("sink_k", Pointer),
        ("positions", Pointer),
        ("partial_out", Pointer),
        ("partial_max", Pointer),
        ("partial_sum", Pointer),
        ("attended32", Pointer),
        ("attended", Pointer),
        ("window", c_int32),
        ("splits", c_int32),
        ("scale", c_float),
        ("reserved", c_int32),
    )


class OProjArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("attended", Pointer),
        ("attended32", Pointer),
        ("residual", Pointer),
        ("weights", Pointer),
        ("scales", Pointer),
        ("fold", Pointer),
        ("out", Pointer),
        ("router_attended", Pointer),
        ("router_residual", Pointer),
        ("slice_start", c_int32),
        ("reserved", c_int32),
        ("inverse", Pointer),
    )


class AttnTailArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("o", Pointer),
        ("router_attended", Pointer),
        ("router_residual", Pointer),
        ("residual", Pointer),
        ("attn_out_norm", Pointer),
        ("ffn_norm", Pointer),
        ("h", Pointer),
        ("normed", Pointer),
        ("codes", Pointer),
        ("code_scale", Pointer),
        ("expert_ids", Pointer),
        ("expert_weights", Pointer),
        ("inner_max", Pointer),
        ("forced_ids", Pointer),
        ("ranks", c_int32),
        ("attn_scale", c_float),
        ("normed32", Pointer),
        ("inverse", Pointer),
        ("routed", Pointer),
        ("inner", Pointer),
        ("polled", c_int32),
    )


class GateUpArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("normed", Pointer),
        ("codes", Pointer),
        ("code_scale", Pointer),
        ("weights", Pointer),
        ("expert_ids", Pointer),
        ("inner", Pointer),
        ("inner_max", Pointer),
        ("dense_groups", c_int32),
        ("reserved", c_int32),
        ("routed", Pointer),
    )


class DownArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("inner", Pointer),
        ("inner_max", Pointer),
        ("weights", Pointer),
        ("scales", Pointer),
        ("expert_ids", Pointer),
        ("expert_weights", Pointer),
        ("out", Pointer),
        ("dense_groups", c_int32),
        ("reserved", c_int32),
        ("routed", Pointer),
        ("unready", Pointer),
        ("unready_pieces", c_int32),
        ("polled", c_int32),
    )


class MlpTailArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("y", Pointer),
        ("h", Pointer),
        ("ffn_out_norm", Pointer),
        ("next_norm", Pointer),
        ("residual", Pointer),
        ("normed", Pointer),
        ("ranks", c_int32),
        ("ffn_scale", c_float),
        ("normed_residual", c_int32),
        ("reserved", c_int32),
    )


class LmHeadArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("normed", Pointer),
        ("weights", Pointer),
        ("logits", Pointer),
        ("scale", c_float),
        ("reserved", c_int32),
        ("scales", Pointer),
    )


class TopKArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("logits", Pointer),
        ("values", Pointer),
        ("ids", Pointer),
        ("first_id", c_int32),
        ("reserved", c_int32),
    )


class State(Structure):
    _fields_ = (
        ("temperature", c_double),
        ("top_p", c_double),
        ("seed_lo", c_uint32),
        ("seed_hi", c_uint32),
        ("top_k", c_int32),
        ("draft_limit", c_int32),
        ("auto_depth", c_int32),
        ("reserved", c_int32),
        ("rule_weights", (c_double * FEATURES) * (MAX_DRAFTS - MIN_AUTO_DRAFTS)),
        ("rule_threshold", c_double),
        ("done", c_int32),
        ("drafts", c_int32),
        ("tokens", c_int32 * ROWS),
        ("positions", c_int32 * ROWS),
        ("depth_rows", c_int32 * ROWS),
        ("draft_tokens", c_int32 * ROWS),
        ("draft_positions", c_int32 * ROWS),
        ("draft_hidden", c_int32 * ROWS),
        ("q_count", c_int32 * ROWS),
        ("q_ids", (c_int32 * MAX_TOP_K) * MAX_DRAFTS),
        ("q_probs", (c_double * MAX_TOP_K) * MAX_DRAFTS),
        ("served", c_double * ROWS),
        ("entropy", c_double * ROWS),
        ("log_tokens", c_int32 * ROWS),
        ("log_count", c_int32),
        ("log_drafted", c_int32),
        ("log_accepted", c_int32),
        ("log_rounds", c_int32),
        ("log_verified", c_uint64),
    )


class Record(Structure):
    _fields_ = (
        ("index", c_int32),
        ("rows", c_int32),
        ("drafted", c_int32),
        ("accepted", c_int32),
        ("count", c_int32),
        ("reason", c_int32),
        ("next_rows", c_int32),
        ("depths", c_int32),
        ("done", c_int32),
        ("status", c_int32),
        ("tokens", c_int32 * ROWS),
        ("reserved", c_int32 * 6),
        ("launched", c_uint64),
        ("verified", c_uint64),
        ("drafted_first", c_uint64),
        ("ended", c_uint64),
    )


class Loop(Structure):
    _fields_ = (
        ("graphs", c_uint64 * GRAPHS),
        ("stops", c_int32 * MAX_STOPS),
        ("short_context", c_int32),
        ("budget", c_int32),
        ("room", c_int32),
        ("written", c_uint32),
        ("index", c_int32),
        ("reserved", c_int32),
        ("launched", c_uint64),
        ("drafted_first", c_uint64),
        ("ran", c_int32 * ROWS),
    )


class Mirror(Structure):
    _fields_ = (
        ("cancel", c_int32),
        ("taken", c_int32),
        ("read", c_uint32),
        ("reserved", c_int32 * 13),
        ("log", (c_uint64 * GRAPHS) * LOG_RECORDS),
    )


class ControlArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("state", Pointer),
        ("loop", Pointer),
        ("log", Pointer),
        ("mirror", Pointer),
        ("made", c_int32),
        ("first", c_int32),
    )


class AcceptArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("state", Pointer),
        ("values", Pointer),
        ("ids", Pointer),
        ("pieces", c_int32),
        ("first", c_int32),
    )


class DraftSampleArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("state", Pointer),
        ("values", Pointer),
        ("ids", Pointer),
        ("pieces", c_int32),
        ("depth", c_int32),
    )


class EhProjArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("tokens", Pointer),
        ("hidden_rows", Pointer),
        ("table", Pointer),
        ("hidden", Pointer),
        ("draft_hidden", Pointer),
        ("enorm", Pointer),
        ("hnorm", Pointer),
        ("weights", Pointer),
        ("out", Pointer),
        ("first_row", c_int32),
        ("reserved", c_int32),
    )


class BandwidthArgs(Structure):
    _fields_ = (
        ("data", Pointer),
        ("out", Pointer),
        ("count", c_uint64),
    )


class PackArgs(Structure):
    _fields_ = (
        ("source", Pointer),
        ("target", Pointer),
        ("report", Pointer),
        ("key", c_uint64),
        ("tiles", c_int32),
        ("k", c_int32),
        ("kind", c_int32),
        ("tail", c_int32),
        ("fp8", c_int32),
        ("reserved", c_int32),
        ("scales", Pointer),
    )


class FoldArgs(Structure):
    _fields_ = (
        ("router", Pointer),
        ("ffn_norm", Pointer),
        ("attn_out_norm", Pointer),
        ("o", Pointer),
        ("o_scales", Pointer),
        ("fold", Pointer),
        ("experts", c_int32),
        ("hidden", c_int32),
        ("q_heads", c_int32),
        ("slice", c_int32),
        ("slice_start", c_int32),
        ("reserved", c_int32),
    )


class FillArgs(Structure):
    _fields_ = (
        ("target", Pointer),
        ("runs", c_uint64),
        ("run", c_uint64),
        ("stride", c_uint64),
        ("seed", c_uint64),
        ("kind", c_int32),
        ("mean", c_float),
        ("deviation", c_float),
        ("reserved", c_int32),
    )


class PrefillRopeArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("inverse_frequencies", Pointer),
        ("table", Pointer),
        ("start", c_int32),
        ("reserved", c_int32),
    )


class PrefillQkvArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("normed", Pointer),
        ("weights", Pointer),
        ("scales", Pointer),
        ("q_norm", Pointer),
        ("k_norm", Pointer),
        ("rope", Pointer),
        ("q", Pointer),
        ("k_cache", Pointer),
        ("v_cache", Pointer),
        ("slots", c_int32),
        ("start", c_int32),
        ("first_position", c_int32),
        ("first_head", c_int32),
    )


class PrefillRingArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("k_ring", Pointer),
        ("v_ring", Pointer),
        ("k_staged", Pointer),
        ("v_staged", Pointer),
        ("ring_slots", c_int32),
        ("staged_slots", c_int32),
        ("start", c_int32),
        ("first_position", c_int32),
        ("to_ring", c_int32),
        ("reserved", c_int32),
    )


class PrefillAttentionArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("q", Pointer),
        ("k", Pointer),
        ("v", Pointer),
        ("sink_k", Pointer),
        ("attended", Pointer),
        ("partial_out", Pointer),
        ("partial_stats", Pointer),
        ("slots", c_int32),
        ("start", c_int32),
        ("first_position", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("splits", c_int32),
    )


class PrefillMergeArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("partial_out", Pointer),
        ("partial_stats", Pointer),
        ("attended", Pointer),
        ("splits", c_int32),
        ("reserved", c_int32),
    )


class PrefillLinearArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("in", Pointer),
        ("weights", Pointer),
        ("scales", Pointer),
        ("out", Pointer),
        ("out_stride", c_int64),
        ("first_column", c_int32),
        ("scale", c_float),
    )


class PrefillRouterArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("normed32", Pointer),
        ("router", Pointer),
        ("logits", Pointer),
    )


class PrefillRouteArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("logits", Pointer),
        ("expert_ids", Pointer),
        ("expert_weights", Pointer),
    )


class PrefillTile(Structure):
    _fields_ = (
        ("expert", c_int32),
        ("first", c_int32),
        ("count", c_int32),
        ("reserved", c_int32),
    )


class PrefillGroupArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("expert_ids", Pointer),
        ("pairs", Pointer),
        ("tiles", Pointer),
        ("tile_count", Pointer),
    )


class PrefillGateUpArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("normed", Pointer),
        ("weights", Pointer),
        ("pairs", Pointer),
        ("tiles", Pointer),
        ("tile_count", Pointer),
        ("inner", Pointer),
    )


class PrefillDownArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("inner", Pointer),
        ("weights", Pointer),
        ("scales", Pointer),
        ("pairs", Pointer),
        ("tiles", Pointer),
        ("tile_count", Pointer),
        ("out", Pointer),
    )


class PrefillCombineArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("out", Pointer),
        ("expert_weights", Pointer),
        ("y", Pointer),
    )


class PrefillEntryArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("tokens", Pointer),
        ("table", Pointer),
        ("hidden", Pointer),
        ("enorm", Pointer),
        ("hnorm", Pointer),
        ("out", Pointer),
    )


class PrefillNormArgs(Structure):
    _fields_ = (
        ("fault", Pointer),
        ("live", Pointer),
        ("layer", c_int32),
        ("rows", c_int32),
        ("in", Pointer),
        ("norm", Pointer),
        ("normed", Pointer),
    )
