"""Sampling: random numbers, masks, filters, rejection sampling and the draft-depth rule."""

from cuq1.sampling.filter import Distribution, filtered
from cuq1.sampling.logprobs import TokenLogprob, token_logprob, token_logprobs
from cuq1.sampling.mask import Allowed, Mask, MaskPath, masked
from cuq1.sampling.params import MAX_DRAFTS, MAX_LOGPROBS, MIN_AUTO_DRAFTS, DecodeParams
from cuq1.sampling.rng import Purpose, fresh_seed, philox4x32, uniform
from cuq1.sampling.rounds import DecodeStream, FinishReason, Round
from cuq1.sampling.speculative import Verdict, accept, draw, residual, verify

__all__ = [
    "MAX_DRAFTS",
    "MAX_LOGPROBS",
    "MIN_AUTO_DRAFTS",
    "Allowed",
    "DecodeParams",
    "DecodeStream",
    "Distribution",
    "FinishReason",
    "Mask",
    "MaskPath",
    "Purpose",
    "Round",
    "TokenLogprob",
    "Verdict",
    "accept",
    "draw",
    "filtered",
    "fresh_seed",
    "masked",
    "philox4x32",
    "residual",
    "token_logprob",
    "token_logprobs",
    "uniform",
    "verify",
]
